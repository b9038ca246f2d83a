"""Which sequence's rows are in the arena: making room, setting rows aside, going back to an earlier moment."""

from __future__ import annotations

import logging
import weakref

import torch

from ..cache.arena import Arena
from ..cache.budget import parse_bytes
from ..cache.layout import ArenaLayout, ArenaSize, arena_bytes, arena_size
from ..errors import OptionError
from .sequence import Checkpoint, Sequence

log = logging.getLogger(__name__)


class Tenancy:
    """One arena and the sequence that lives in it; another one's rows are parked beside it until it is active again."""

    def __init__(
        self, layout: ArenaLayout, device: torch.device, *, hold: bool, kv_memory: str | int | None = None
    ) -> None:
        self.layout, self.device, self.hold, self.kv_memory = layout, device, hold, kv_memory
        self.arena = Arena(layout, ArenaSize(0, 0, 0), device)
        self._active: weakref.ref[Sequence] | None = None

    def size_for(self, sequence: Sequence, budget: int | None, tokens: int, new_tokens: int) -> ArenaSize:
        """The arena that reading `tokens` more and writing `new_tokens` needs, for the active sequence."""
        held = int(self.arena.length.max(axis=1).sum()) if sequence.total else 0
        evicting = budget is not None and sequence.total + tokens > budget
        return arena_size(
            self.layout,
            budget=budget if evicting or self.hold else None,
            tokens=tokens,
            new_tokens=new_tokens,
            hold=self.hold,
            held=held,
            held_longest=int(self.arena.length.max()) if sequence.total else 0,
        )

    def reserve(self, sequence: Sequence, budget: int | None, tokens: int, new_tokens: int) -> None:
        """Make the arena large enough for a piece and its reply; the active sequence's rows stay."""
        size = self.size_for(sequence, budget, tokens, new_tokens)
        needed = arena_bytes(self.layout, size)
        if self.kv_memory is not None and needed > parse_bytes(self.kv_memory):
            raise OptionError(
                f"this turn needs {needed / 2**20:,.1f} MiB of KV memory, more than the {self.kv_memory} allowed: "
                "send a shorter text, or start over with more"
            )
        saved = self.arena.save() if sequence.total and not self.arena.size.covers(size, self.layout) else None
        self.make(size)
        if saved is not None:
            self.arena.load(saved)

    def make(self, size: ArenaSize) -> None:
        """An arena of at least this size; rows are lost if the present one is too small."""
        if self.arena.size.covers(size, self.layout):
            return
        log.info(
            "the KV arena grows from %s to %s bytes", f"{self.arena.nbytes:,}", f"{arena_bytes(self.layout, size):,}"
        )
        self.arena = Arena(
            self.layout, ArenaSize(0, 0, 0), self.device
        )  # the old one is freed before a new one is made
        self.arena = Arena(self.layout, size, self.device)

    def activate(self, sequence: Sequence) -> None:
        """Bring a sequence's rows into the arena; those of the sequence that was there are set aside."""
        active = self._active() if self._active is not None else None
        if active is sequence:
            return
        if active is not None and active.total and not active.spoilt:
            active.parked = self.arena.save()
        self._active = weakref.ref(sequence)
        self.arena.clear()
        if sequence.parked is not None:
            self.make(ArenaSize(0, 0, int(sequence.parked.capacity.sum())))
            self.arena.load(sequence.parked)
            sequence.parked = None

    def checkpoint(self, sequence: Sequence) -> Checkpoint:
        """A copy of everything that a turn may change."""
        self.activate(sequence)
        return Checkpoint(
            fed=sequence.total,
            rows=self.arena.save() if sequence.total else None,
            ring=sequence.ring.copy() if sequence.ring is not None else None,
            limit=None if sequence.limit is None else sequence.limit.copy(),
            rotary=sequence.rotary,
            budget=sequence.budget,
        )

    def restore(self, sequence: Sequence, saved: Checkpoint) -> None:
        """Bring a sequence back to a checkpoint of it."""
        sequence.parked = None
        self.activate(sequence)
        del sequence.ids[saved.fed :]
        self.arena.clear()
        if saved.rows is not None:
            self.make(ArenaSize(0, 0, int(saved.rows.capacity.sum())))
            self.arena.load(saved.rows)
        if saved.ring is None:
            sequence.ring = None
        elif sequence.ring is not None:
            sequence.ring.restore(saved.ring)
        sequence.limit, sequence.rotary, sequence.budget = saved.limit, saved.rotary, saved.budget
        sequence.spoilt = False
