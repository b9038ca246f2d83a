"""Which sequence's rows are in the arena: making room, setting rows aside, going back to an earlier moment."""

from __future__ import annotations

import logging
import weakref
from copy import deepcopy

import numpy as np
import torch

from ..cache.budget import parse_bytes, size_text
from ..cache.layout import ArenaLayout, ArenaSize, arena_bytes, arena_size, largest_budget
from ..cache.packed_arena import make_arena
from ..cache.shared import SharedArena
from ..errors import CakeError, MemoryLimit
from .sequence import Checkpoint, Sequence

log = logging.getLogger(__name__)


class Tenancy:
    """One arena and the sequence that lives in it; another one's rows are parked beside it until it is active again."""

    def __init__(
        self,
        layout: ArenaLayout,
        device: torch.device,
        *,
        hold: int,
        late: bool = False,
        kv_memory: str | int | None = None,
    ) -> None:
        """`hold`: slots of a held row behind its limit, 0 where rows only grow. `late`: nothing is evicted before all
        layers of a piece are read, see `Policy.late`."""
        self.layout, self.device, self.hold, self.late, self.kv_memory = layout, device, hold, late, kv_memory
        self.arena = make_arena(layout, ArenaSize(0, 0, 0), device)
        self.batches: weakref.WeakSet[SharedArena] = weakref.WeakSet()  # what takes KV memory beside this arena
        self._active: weakref.ref[Sequence] | None = None

    def lengths(self, sequence: Sequence) -> np.ndarray | None:
        """int64 `[layers, kv_heads]` of what a sequence holds, in the arena or parked; None where it holds nothing."""
        if self.is_active(sequence):
            return self.arena.held if sequence.total else None
        return sequence.parked.held if sequence.parked is not None else None

    def size_for(self, sequence: Sequence, budget: int | None, tokens: int, new_tokens: int) -> ArenaSize:
        """The arena that reading `tokens` more and writing `new_tokens` needs."""
        lengths = self.lengths(sequence)
        hold = self.hold
        if sequence.fixed and hold:  # rows at their limits from the first new token on
            budget = None
            if self.layout.kv_bits is None:
                new_tokens, hold = min(hold, new_tokens + 1), 0
        evicting = budget is not None and sequence.total + tokens > budget
        return arena_size(
            self.layout,
            budget=budget if evicting or hold else None,
            tokens=tokens,
            new_tokens=new_tokens,
            hold=hold,
            held=0 if lengths is None else int(lengths.sum()),
            held_longest=0 if lengths is None else int(lengths.max()),
            late=self.late if sequence.policy is None else sequence.policy.late,
        )

    @property
    def allowed(self) -> int | None:
        """The bytes that `kv_memory` leaves beside the arenas of batches; None without a limit."""
        if self.kv_memory is None:
            return None
        return max(0, parse_bytes(self.kv_memory) - sum(batch.nbytes for batch in self.batches))

    def affordable(
        self, sequence: Sequence, budget: int, tokens: int, new_tokens: int, *, window: int, limit: int | None
    ) -> int:
        """The budget, or less where `limit` bytes are too few for it beside what the sequence holds."""
        if limit is None:
            return budget

        def fits(tried: int) -> bool:
            return arena_bytes(self.layout, self.size_for(sequence, tried, tokens, new_tokens)) <= limit

        found = largest_budget(min(window, budget), budget, fits)
        if found < budget:
            log.info("to stay within the KV memory the budget goes down from %s to %s tokens", budget, found)
        return found

    def reserve(self, sequence: Sequence, budget: int | None, tokens: int, new_tokens: int) -> None:
        """Make the arena large enough for a piece and its reply; the active sequence's rows stay."""
        self.enlarge(sequence, self.size_for(sequence, budget, tokens, new_tokens))

    def enlarge(self, sequence: Sequence, size: ArenaSize) -> None:
        """An arena of at least this size for a sequence, whose rows stay."""
        if self.arena.size.covers(size, self.layout):
            return
        self.set_aside()
        if sequence.parked is not None:  # the last reply's headroom is not needed while a piece is read
            sequence.parked = sequence.parked.tight()
        self.make(size)
        self.activate(sequence)

    def make(self, size: ArenaSize) -> None:
        """An arena of at least this size; rows are lost if the present one is too small.

        Raises MemoryLimit for more than `kv_memory`, or than there is.
        """
        if self.arena.size.covers(size, self.layout):
            return
        needed = arena_bytes(self.layout, size)
        allowed = self.allowed
        if allowed is not None and needed > allowed:
            beside = f" ({size_text(allowed)} beside a batch)" if self.batches else ""
            raise MemoryLimit(
                f"this needs {size_text(needed)} of KV memory, more than the {self.kv_memory} allowed{beside}: "
                "send a shorter text, or start over with more"
            )
        first = not any((self.arena.size.kept, self.arena.size.staging, self.arena.size.decode))
        level = logging.DEBUG if first or needed <= self.arena.nbytes else logging.INFO  # one side may be smaller
        log.log(level, "the KV arena has now %s, %s before", size_text(needed), size_text(self.arena.nbytes))
        self.arena = make_arena(self.layout, ArenaSize(0, 0, 0), self.device)  # frees the old one before the new one
        self.arena = make_arena(self.layout, size, self.device)

    def vacate(self) -> None:
        """Set the active rows aside and free the arena, to make room for another one."""
        self.set_aside()
        self.arena = make_arena(self.layout, ArenaSize(0, 0, 0), self.device)

    def set_aside(self) -> None:
        """Park the rows of the sequence in the arena, if there is one that still means something."""
        active = self._active() if self._active is not None else None
        if active is not None and active.total and not active.spoilt:
            active.parked = self.arena.save()
        self._active = None
        self.arena.clear()

    def activate(self, sequence: Sequence) -> None:
        """Bring a sequence's rows into the arena; those of the sequence that was there are set aside."""
        if self.is_active(sequence):
            return
        if sequence.total and sequence.parked is None:
            raise CakeError("this sequence has no rows to go on from: it is in a batch, or has left one without them")
        self.set_aside()
        if sequence.parked is not None:
            self.make(sequence.parked.size)
            self.arena.load(sequence.parked)
            sequence.parked = None
        self._active = weakref.ref(sequence)

    def is_active(self, sequence: Sequence) -> bool:
        return self._active is not None and self._active() is sequence

    def checkpoint(self, sequence: Sequence) -> Checkpoint:
        """A copy of everything that a turn may change."""
        return Checkpoint(
            fed=sequence.total,
            rows=self.arena.save() if sequence.total and self.is_active(sequence) else sequence.parked,
            ring=sequence.ring.copy() if sequence.ring is not None else None,
            limit=None if sequence.limit is None else sequence.limit.copy(),
            rotary=sequence.rotary,
            budget=sequence.budget,
            read=sequence.read,
        )

    def copy(self, sequence: Sequence) -> Sequence:
        """Another sequence of the same text. Its rows are parked: a copy of the arena's, or the parked ones themselves,
        which nobody writes to."""
        active = sequence.total > 0 and self.is_active(sequence)
        return Sequence(
            ids=list(sequence.ids),
            budget=sequence.budget,
            ring=deepcopy(sequence.ring),
            rotary=sequence.rotary,
            limit=None if sequence.limit is None else sequence.limit.copy(),
            parked=self.arena.save() if active else sequence.parked,
            read=sequence.read,
            policy=sequence.policy,
            kept_by=sequence.kept_by,
        )

    def restore(self, sequence: Sequence, saved: Checkpoint) -> None:
        """Bring a sequence back to a checkpoint of it. Its rows stay parked until it is active again."""
        if self.is_active(sequence):
            self._active = None
            self.arena.clear()
        sequence.parked = saved.rows
        del sequence.ids[saved.fed :]
        if saved.ring is None:
            sequence.ring = None
        elif sequence.ring is not None:
            sequence.ring.restore(saved.ring)
        sequence.limit, sequence.rotary, sequence.budget = saved.limit, saved.rotary, saved.budget
        sequence.read = saved.read
        sequence.spoilt = False
