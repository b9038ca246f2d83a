"""Decoding on a GPU by one CUDA graph a token, one step ahead of what the host has read.

A step's token is chosen on the device and fed by the next step there, so the host launches step k + 1 before it has
read the token of step k: the device never waits for it. A token comes to the host through pinned memory, and what is
waited for is the event behind that copy. Where a reply ends with a token that the device has fed already, that step is
undone: the host's tables do not know of it, and with `hold` the slots are put back.

The host's tables (`Arena.length`, `Sequence.ids`) are those of a step that has not run ahead, at any moment that a
caller can see. Whoever else needs the rows calls `Ahead.land` first.
"""

from __future__ import annotations

import logging
import time
import weakref
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..cache.arena import Arena
from ..cache.holds.base import HoldRule
from ..cache.packed_arena import PackedArena
from ..cache.packed_store import PackedStore
from ..cache.store import Store
from ..models.decoder import Decoder
from .attention import Attention
from .capture import Body, Capture, CudaGraphs, Uncaptured
from .device_sampling import DeviceSampler, Kind
from .device_step import DeviceState, DeviceStep, host_tables, undo
from .packed_seats import cut_seat, flush_seat, packed_store_of
from .seat import Chosen, Seat

log = logging.getLogger(__name__)

_ROOM = 4  # with hold, work space is made for rows of so many times the mean length: layers differ


@dataclass(frozen=True)
class _Flight:
    """A step that has been launched and not been read."""

    seats: list[Seat]
    slot: int  # of the pinned copies


class Ahead:
    """Decodes up to any number of replies together, one step ahead. The rows of all seats are in one store.

    window, hold: as in `decode.step`. valid, unused: rows of the head that no token has. Not for two threads at once.
    """

    def __init__(
        self,
        decoder: Decoder,
        attention: Attention,
        *,
        window: int,
        hold: bool,
        valid: int | None = None,
        unused: Tensor | None = None,
        rule: HoldRule | None = None,
        capture: Capture | None = None,
    ) -> None:
        """Raises BackendError where this decoder's step cannot be captured.

        rule: by which packed rows are cut, between steps, so that these hold nothing; None for other rows.
        """
        self._decoder, self._window, self._hold, self._rule = decoder, window, hold, rule
        self._valid, self._unused = valid, unused
        self._step = DeviceStep(decoder, attention, window=window, hold=hold)
        self._capture = capture or (CudaGraphs() if decoder.device.type == "cuda" else Uncaptured())
        self._replays: dict[tuple[int, Kind], Body] = {}
        self._states: dict[int, DeviceState] = {}  # by their number of rows
        self._state: DeviceState | None = None
        self._seats: list[Seat | None] = []  # by row
        self._flight: _Flight | None = None
        self._store: weakref.ref[Store] | None = None  # of the replays; no more than that keeps a store alive
        self._packed: weakref.ref[PackedStore] | None = None  # of the packed parts of rows in it
        self._longest = 0
        self._slot = 0
        self._pinned: list[Tensor] = []
        self._events: list[torch.cuda.Event] = []
        self.captures = 0  # how many so far

    # -- steps --------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def advance(self, seats: list[Seat], *, room: int = 1) -> list[Chosen]:
        """Feed each seat's token and give the next ones. room: how many seats there may soon be.

        A seat that comes in while a step is under way gets its token at the next call. Each seat's reply must have room
        for the token that it gets.
        """
        assert seats, "nobody decodes"
        self._admit(seats, room)
        flight = self._flight or self._launch(seats)
        self._flight = None
        for seat in flight.seats:
            _commit(seat)
            if self._rule is not None and self._state is not None:
                cut_seat(self._state, seat, self._decoder, self._window, self._rule)
        going_on = self._going_on(flight, seats)
        if going_on:
            self._flight = self._launch(going_on)
        tokens, state = self._wait(flight), self._state
        assert state is not None
        chosen = []
        for seat in flight.seats:
            assert seat.row is not None
            seat.token = tokens[seat.row]
            logits = state.logits[seat.row] if state.logits is not None and Kind.LOGITS in seat.kind else None
            chosen.append(Chosen(seat, seat.token, logits))
        return chosen

    @torch.inference_mode()
    def prepare(self, seat: Seat, *, room: int = 1) -> None:
        """Capture what the first `advance` of this seat would have to."""
        self._admit([seat], room)
        self._replay(seat.kind)

    @torch.inference_mode()
    def leave(self, seat: Seat, *, keep: bool = True) -> None:
        """Let a seat go: with `keep` its rows, ring and history are as if no step had run ahead. Safe to call twice."""
        row, state = seat.row, self._state
        if row is None or state is None:
            return
        if keep:
            self._undo(seat)
            state.give_back(row, seat.sequence)
        if self._flight is not None and seat in self._flight.seats:
            self._flight.seats.remove(seat)
            if not self._flight.seats:
                self._flight = None
        state.take(row)
        self._seats[row] = None
        seat.row, seat.ahead, seat.arena = None, False, None

    def land(self) -> None:
        """Let every seat go; each comes in again with the next `advance` that names it. Its token is fed then."""
        for seat in self._seats:
            if seat is not None:
                self.leave(seat)

    def abandon(self) -> None:
        """After a step that failed: forget every seat. Their rows mean nothing any more."""
        for seat in self._seats:
            if seat is not None:
                seat.row, seat.ahead, seat.arena = None, False, None
        self._seats, self._state, self._flight = [], None, None
        self._states.clear()
        self._drop()

    # -- seats --------------------------------------------------------------------------------------------------------

    def _admit(self, seats: list[Seat], room: int) -> None:
        """Give a row to each seat that has none; a larger state, or another store, only while nobody flies."""
        store = _store_of(seats)
        newcomers = [seat for seat in seats if seat.row is None]
        if not newcomers:
            return
        free = sum(seat is None for seat in self._seats)
        changed = self._store is None or self._store() is not store
        ring = any(seat.sequence.ring is not None for seat in newcomers)  # a document need not have one
        if self._state is None or (ring and self._state.ring is None) or changed or free < len(newcomers):
            assert not (changed and any(seat.ahead for seat in seats)), "a store was replaced under a step"
            arenas = [seat.arena for seat in seats]
            self.land()
            for seat, arena in zip(seats, arenas, strict=True):
                seat.arena = arena
            if changed:
                self._use(store, packed_store_of(seats))
            self._state = self._state_of(max(room, len(seats)), seats)
            self._seats = [None] * self._state.rows
            newcomers = seats
        state = self._state
        for seat in newcomers:
            row = self._seats.index(None)
            self._seats[row], seat.row = seat, row
            arena, limit = seat.arena, seat.sequence.limit
            assert arena is not None
            state.put(row, host_tables(arena, limit), seat.sequence, seat.token, seat.picker)
            self._longest_for(arena, store)

    def _state_of(self, count: int, seats: list[Seat]) -> DeviceState:
        """Tables for at least so many seats, a power of two."""
        rows = 1 << (count - 1).bit_length()
        window = self._window if any(seat.sequence.ring is not None for seat in seats) else None
        state = self._states.get(rows)
        if state is None or (state.ring is None) != (window is None):
            config, device = self._decoder.config, self._decoder.device
            sampler = DeviceSampler(rows, config.vocab_size, self._valid, self._unused, device)
            packed = self._packed is not None
            state = self._states[rows] = DeviceState(self._decoder, rows, window, sampler, packed=packed)
            for key in [key for key in self._replays if key[0] == rows]:
                del self._replays[key]
        self._pinned = [torch.zeros(rows, dtype=torch.int64) for _ in range(2)]
        if self._decoder.device.type == "cuda":
            self._pinned = [table.pin_memory() for table in self._pinned]
            self._events = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        return state

    def _use(self, store: Store, packed: PackedStore | None) -> None:
        """Step over another store from now on."""
        if self._replays:
            log.info("the KV arena has changed: the decode graph is captured anew")
        self._drop()
        self._store = weakref.ref(store)
        self._packed = None if packed is None else weakref.ref(packed)
        slots = store.position.numel()
        mean = slots // (store.layout.num_layers * store.layout.num_kv_heads)
        # Without weights no work space depends on it. It is fixed by the store, so that no prompt is captured for.
        self._longest = min(slots, 1 << (_ROOM * mean).bit_length()) if self._hold else slots

    def _longest_for(self, arena: Arena, store: Store) -> None:
        if int(arena.capacity.max()) > self._longest:
            log.info("a row of %s slots is longer than the decode graph is for: captured anew", arena.capacity.max())
            self._longest = store.position.numel()
            self._drop()

    def _drop(self) -> None:
        self._replays.clear()
        self._capture.forget()

    def _undo(self, seat: Seat) -> None:
        """Put back the slots of a seat that the step ahead has exchanged."""
        limit, arena = seat.sequence.limit, seat.arena
        if seat.ahead and limit is not None and arena is not None and self._rule is None:
            undo(arena, limit, seat.sequence.total)

    # -- launches -----------------------------------------------------------------------------------------------------

    def _launch(self, seats: list[Seat]) -> _Flight:
        assert self._state is not None
        kind = Kind.GREEDY
        for seat in seats:
            kind |= seat.kind
            flush_seat(self._state, seat)
        self._replay(kind)()
        self._slot ^= 1
        self._pinned[self._slot].copy_(self._state.chosen, non_blocking=True)
        if self._events:
            self._events[self._slot].record()
        for seat in seats:
            seat.ahead = True
        return _Flight(list(seats), self._slot)

    def _wait(self, flight: _Flight) -> list[int]:
        """The tokens of a step, by row; waits for the copy of these alone."""
        if self._events:
            self._events[flight.slot].synchronize()
        tokens: list[int] = self._pinned[flight.slot].tolist()
        return tokens

    def _going_on(self, flight: _Flight, seats: list[Seat]) -> list[Seat]:
        """Who is fed by the step that is launched ahead: whoever will not be at the end, whatever its token is.

        The others' rows do nothing in it. Nobody where somebody's logits are to be read before they are overwritten.
        """
        assert self._state is not None
        if any(Kind.LOGITS in seat.kind for seat in flight.seats):
            return []
        ended = [seat for seat in flight.seats if seat.picker.last]
        for seat in ended:
            if seat.row is not None:
                self._state.take(seat.row)
        return [seat for seat in seats if seat not in ended]

    def _replay(self, kind: Kind) -> Body:
        """What makes a step of this kind with the present tables."""
        state, store = self._state, self._store
        assert state is not None
        assert store is not None
        replay = self._replays.get((state.rows, kind))
        if replay is None:
            started = time.perf_counter()
            if Kind.LOGITS in kind and state.logits is None:
                vocab = self._decoder.config.vocab_size
                state.logits = torch.zeros(state.rows, vocab, dtype=torch.float32, device=state.device)
            longest, packed_store = self._longest, self._packed

            def body() -> None:
                slots, packed = store(), None if packed_store is None else packed_store()
                assert slots is not None, "a replay has outlived its store"
                assert packed_store is None or packed is not None, "a replay has outlived its packed store"
                self._step(state, slots, longest, kind, packed)

            replay = self._replays[state.rows, kind] = self._captured(body, state)
            seconds = time.perf_counter() - started
            log.info("the decode step for %s is ready in %.1f s", _sequences(state.rows), seconds)
        return replay

    def _captured(self, body: Body, state: DeviceState) -> Body:
        """A replay of the body; the body itself, and a notice, where it cannot be captured."""
        length = state.length.clone()
        state.length.fill_(-1)  # nobody: the runs before the capture change nothing
        try:
            replay = self._capture(body)
            self.captures += 1
        except RuntimeError as error:  # torch's and CUDA's own errors derive from it
            reason = str(error).partition("\n")[0]
            log.warning("the decode step could not be captured, so it is launched kernel by kernel: %s", reason)
            replay = body
        finally:
            state.length.copy_(length)
        return replay


def _commit(seat: Seat) -> None:
    """Let the host's tables know that the seat's token has been fed."""
    assert seat.arena is not None
    limit: np.ndarray | None = None if isinstance(seat.arena, PackedArena) else seat.sequence.limit
    seat.arena.length += 1 if limit is None else (seat.arena.length < limit)
    seat.sequence.ids.append(seat.token)
    seat.ahead = False


def _store_of(seats: list[Seat]) -> Store:
    stores = [seat.arena.store for seat in seats if seat.arena is not None]
    assert len(stores) == len(seats), "a seat came without its arena"
    assert all(store is stores[0] for store in stores), "rows of one batch live in one store"
    return stores[0]


def _sequences(count: int) -> str:
    return "1 sequence" if count == 1 else f"up to {count} sequences"
