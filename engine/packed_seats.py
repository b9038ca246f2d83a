"""What packed rows of a reply that decodes ahead need between two steps: groups are packed, held rows are cut."""

from __future__ import annotations

from ..cache.holds.base import HoldRule
from ..cache.packed_arena import PackedArena
from ..cache.packed_store import PackedStore
from ..models.decoder import Decoder
from .device_step import DeviceState, host_tables
from .packed_holding import cut_packed
from .seat import Seat


def flush_seat(state: DeviceState, seat: Seat) -> None:
    """Pack what fills a group of a seat's rows, whose host tables are those of the step that comes next."""
    arena = seat.arena
    if isinstance(arena, PackedArena) and arena.due.any():
        arena.flush()
        assert seat.row is not None
        state.place(seat.row, host_tables(arena, seat.sequence.limit))


def cut_seat(state: DeviceState, seat: Seat, decoder: Decoder, window: int, rule: HoldRule) -> None:
    """Let a seat's rows give up what they have grown beyond their limits, as behind any step.

    Waits for the step that has been counted last, once in so many tokens as fill a group.
    """
    arena, sequence = seat.arena, seat.sequence
    if sequence.limit is None or not isinstance(arena, PackedArena):
        return
    if (arena.held >= sequence.limit + rule.every).any():
        assert seat.row is not None
        state.give_back(seat.row, sequence)
        cut_packed(decoder, arena, sequence, window, rule)
        state.place(seat.row, host_tables(arena, sequence.limit))


def packed_store_of(seats: list[Seat]) -> PackedStore | None:
    """Where the packed parts of the seats' rows are."""
    arena = seats[0].arena
    return arena.packed.store if isinstance(arena, PackedArena) else None
