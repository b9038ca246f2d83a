"""A sequence in a batch, what a step brings for it, and whose prompt is read on."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..cache.arena import Arena
from ..cache.layout import ArenaSize
from ..cache.shared import SharedArena
from ..errors import CakeError
from .generation import GenerationConfig
from .picker import Picker, Token
from .prefill import OnChunk, Reading
from .seat import Seat
from .sequence import Sequence
from .timing import Timing


@dataclass(frozen=True)
class Outcome:
    """What a step has brought for one sequence: its next token, or why it was given up, or neither for a reply of none.

    finished: the sequence has left the batch.
    """

    sequence: Sequence
    token: Token | None = None
    error: CakeError | None = None
    finished: bool = False


@dataclass(eq=False)
class Member:
    """A sequence in a batch: waiting until it has an arena, being read until it has a picker, decoded from then on."""

    sequence: Sequence
    ids: list[int]
    generation: GenerationConfig
    limit: int
    size: ArenaSize
    stop_ids: frozenset[int]
    on_chunk: OnChunk | None
    timing: Timing
    keep: bool
    arena: Arena | None = None
    reading: Reading[Tensor] | None = None
    picker: Picker | None = None
    next: int | None = None  # the token that the next step feeds
    unread: int = 0  # tokens of the prompt, times the layers, that are still to be read
    seat: Seat | None = None  # where the step is a graph


def next_reader(members: list[Member], last: Member | None, readers: int, arena: SharedArena) -> Member | None:
    """Whose prompt is read on, of up to `readers` at once: the first one's, in turn with that of which the least is
    left, if that is less. `last`: whose turn was the last one."""
    unread = [member for member in members if member.picker is None]
    begun = [member for member in unread if member.reading is not None]
    if not begun:
        return unread[0] if unread else None
    first, shortest = begun[0], min(unread if len(begun) < readers else begun, key=lambda member: member.unread)
    if shortest is last or shortest.unread >= first.unread:
        return first
    has_room = shortest.reading is not None or arena.has_room_behind(shortest.size)
    return shortest if has_room else first
