"""Rows of several sequences in one store, each sequence in a span of its own.

A span holds a sequence's rows with their headroom, packed one after another. Spans are packed to the left, and behind
the last one is free room: a newcomer is read there, kept rows and staging, and touches nothing in front of it; when it
has been read, its span shrinks to its rows and their headroom, and what was staging is free again. A sequence that
leaves opens a gap; the next newcomer that would not fit behind the last span closes it first, by sliding later spans to
the left. Packed rows have spans of their own, in a store of their own and in the same order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import numpy as np
import torch

from ..errors import ArenaFull, MemoryLimit
from .arena import Arena
from .budget import size_text
from .layout import ArenaLayout, ArenaSize, StoreSize, packed_bytes, shared_size, span_start
from .packed_arena import PackedArena
from .packed_rows import PackedRows
from .packed_store import PackedStore
from .quantise import GROUP
from .store import Store


class SharedArena:
    """The rows of up to `batch` sequences. A member is an `Arena`, whose tables are rows of the tables here.

    offset, length, capacity: int64 `[batch, layers, kv_heads]`, in slots of the store; zeros where nobody is.
    limit: most bytes of the store, None for as many as the device has.
    """

    def __init__(
        self, layout: ArenaLayout, device: torch.device | str = "cpu", *, batch: int, limit: int | None = None
    ) -> None:
        self.layout, self.device, self.limit = layout, torch.device(device), limit
        self._make(StoreSize(0, 0))
        self._fixed = False
        shape = (batch, layout.num_layers, layout.num_kv_heads)
        self.offset: np.ndarray = np.zeros(shape, dtype=np.int64)
        self.length: np.ndarray = np.zeros(shape, dtype=np.int64)
        self.capacity: np.ndarray = np.zeros(shape, dtype=np.int64)
        self._members: dict[int, Arena] = {}  # by table row

    @property
    def nbytes(self) -> int:
        return self.store.nbytes + (0 if self.packed is None else self.packed.nbytes)

    @property
    def used_bytes(self) -> int:
        """What the members take of it, with their headroom, and staging while they are read."""
        return sum(arena.nbytes for arena in self._members.values())

    @property
    def members(self) -> list[Arena]:
        """From left to right."""
        return sorted(self._members.values(), key=lambda arena: arena.first)

    @property
    def free_rows(self) -> int:
        """How many more sequences the tables have room for."""
        return int(self.offset.shape[0]) - len(self._members)

    def row_of(self, arena: Arena) -> int:
        """Where a member stands in the tables."""
        return next(row for row, member in self._members.items() if member is arena)

    def check(self, size: ArenaSize, before: Iterable[ArenaSize] = ()) -> None:
        """Whether a sequence of this size can come in behind the members and those that wait `before` it.

        Changes nothing. Raises ArenaFull with both figures if it has to wait for others to leave, and MemoryLimit if it
        would not fit alone.
        """
        alone = shared_size(self.layout, [size])
        if not self._allows(alone):
            raise MemoryLimit(
                f"this needs {self._takes(alone)} of KV memory, more than the {self._allowed} allowed: "
                "send a shorter text, ask for fewer new tokens, or allow more"
            )
        needed = shared_size(self.layout, [*(member.size for member in self.members), *before, size])
        if not self._allows(needed):
            raise ArenaFull(
                f"with what runs now this needs {self._takes(needed)} of KV memory, more than the {self._allowed} "
                "allowed: ask again when other replies are over"
            )

    def reserve(self, sizes: Iterable[ArenaSize]) -> None:
        """Make room for these behind the members at once; nobody may be in the middle of being read."""
        needed = shared_size(self.layout, [*(member.size for member in self.members), *sizes])
        if not self._allows(needed):
            raise MemoryLimit(
                f"this needs {self._takes(needed)} of KV memory, more than the {self._allowed} allowed: "
                "run fewer sequences together, or allow more"
            )
        if not self._holds(needed):
            self._grow(needed)

    def take_all(self, like: Iterable[ArenaSize] = ()) -> None:
        """Make the store as large as the limit allows, once: it is never moved then.

        like: sequences that it should suit, where rows are packed: their share is that of these.
        """
        assert self.limit is not None, "there is no end to take"
        limit, packed = self.limit, 0
        if self.layout.kv_bits is not None:
            need = shared_size(self.layout, like)
            share = packed_bytes(self.layout, need.packed) / max(need.nbytes(self.layout), 1)
            packed = int(share * limit) // packed_bytes(self.layout, GROUP) * GROUP
            limit -= packed_bytes(self.layout, packed)
        slots = limit // self.layout.kept_slot_bytes
        self._fixed = True
        self._grow(StoreSize(slots * self.layout.head_dim * self.layout.kv_dtype.itemsize, slots, packed))

    def admit(self, size: ArenaSize, before: Iterable[ArenaSize] = ()) -> Arena:
        """An empty member behind all others, with room for `size`; later spans slide to the left where it is needed.

        before: of those that will come in behind it; a store that has to grow grows for them too, if that is allowed.
        While another member is being read nothing is moved: then this one has to fit behind it. Raises MemoryLimit (or
        ArenaFull) before anything has changed.
        """
        self.check(size)
        if not self.free_rows:
            raise ArenaFull(f"{len(self._members)} sequences are running, as many as may: ask again when one is over")
        if not self._holds(self._end_with(size)):
            if any(member.unsettled for member in self._members.values()):
                raise ArenaFull("there is no room behind the text that is being read: ask again when it has been read")
            needed = shared_size(self.layout, [*(member.size for member in self.members), size])
            if self._holds(needed):
                self.compact()
            else:
                self._grow_for(needed, shared_size(self.layout, [*(one.size for one in self.members), size, *before]))
        row = next(row for row in range(self.offset.shape[0]) if row not in self._members)
        tables = [table[row] for table in (self.offset, self.length, self.capacity)]
        arena = self._member(size, tables)
        arena.clear()
        arena.unsettled = True
        self._members[row] = arena
        return arena

    def _member(self, size: ArenaSize, tables: list[np.ndarray]) -> Arena:
        first = self._first_free()
        if self.packed is None:
            return Arena(self.layout, size, self.device, store=self.store, first=first, tables=tables)
        rows = PackedRows(
            self.layout, size.packed, self.device, store=self.packed, first=_packed_end(self._members.values())
        )
        return PackedArena(self.layout, size, self.device, store=self.store, first=first, tables=tables, packed=rows)

    def has_room_behind(self, size: ArenaSize) -> bool:
        """Whether `admit` would find room for this size without moving anybody."""
        return self.free_rows > 0 and self._holds(self._end_with(size))

    def release(self, arena: Arena) -> None:
        """A member leaves: its rows are free at once, and its tables are zeros."""
        arena.clear()
        del self._members[self.row_of(arena)]

    def compact(self) -> None:
        """Slide every span to the left, in order."""
        end = packed = 0
        for member in self.members:
            member.move_to(span_start(self.layout, end))
            end = member.first + member.size.decode
            if isinstance(member, PackedArena):
                member.packed.move_to(packed)
                packed += member.packed.slots

    def clear(self) -> None:
        """Let everybody leave and free the store."""
        for member in self.members:
            self.release(member)
        self._make(StoreSize(0, 0))

    def _make(self, size: StoreSize) -> None:
        """Other buffers in place of those there are. Raises MemoryLimit."""
        self.store = Store(self.layout, size.kv, size.slots, self.device)
        packed = None if self.layout.kv_bits is None else PackedStore(self.layout, size.packed, self.device)
        self.packed: PackedStore | None = packed

    def _first_free(self) -> int:
        members = self.members
        return span_start(self.layout, members[-1].span_end) if members else 0

    def _end_with(self, size: ArenaSize) -> StoreSize:
        """What there is up to the end of a span of this size behind the last one, where the spans are now."""
        first = self._first_free()
        slot_bytes = self.layout.head_dim * self.layout.kv_dtype.itemsize
        own, packed = shared_size(self.layout, [size]), _packed_end(self._members.values())
        return StoreSize(first * slot_bytes + own.kv, first + own.slots, packed + own.packed)

    @property
    def _there(self) -> StoreSize:
        packed = 0 if self.packed is None else self.packed.slots
        return StoreSize(self.store.k.numel(), self.store.position.numel(), packed)

    def _holds(self, needed: StoreSize) -> bool:
        return self._there.holds(needed)

    def _allows(self, needed: StoreSize) -> bool:
        if self._fixed:
            return self._holds(needed)
        return self.limit is None or needed.nbytes(self.layout) <= self.limit

    def _takes(self, needed: StoreSize) -> str:
        """Bytes for a message; of a fixed store the share of it, by what is scarcer, times its size."""
        if not self._fixed:
            return size_text(needed.nbytes(self.layout))
        there = self._there
        share = max(needed.kv / there.kv, needed.slots / there.slots, needed.packed / max(there.packed, 1))
        return size_text(int(share * self.nbytes))

    @property
    def _allowed(self) -> str:
        return size_text(self.nbytes if self._fixed else self.limit or 0)

    def _grow_for(self, needed: StoreSize, wanted: StoreSize) -> None:
        """Grow to what is wanted, once for all who wait; where there is too little for that, to what is needed now."""
        if self._allows(wanted):
            with contextlib.suppress(MemoryLimit):
                return self._grow(wanted)
        self._grow(needed)

    def _grow(self, needed: StoreSize) -> None:
        """Another store with room for `needed`; the members move into it by way of copies of their rows."""
        members = self.members
        copies = [member.save() for member in members]
        before = self._there
        self._make(StoreSize(0, 0))
        for member in members:
            member.leave_store(self.store)  # so that the old one is freed before a new one is made
            if isinstance(member, PackedArena) and self.packed is not None:
                member.packed.enter(self.packed, 0)
        try:
            self._make(needed)
        except MemoryLimit:
            self._make(before)
            raise
        finally:
            end = packed = 0
            for member, copy in zip(members, copies, strict=True):
                if isinstance(member, PackedArena) and self.packed is not None:
                    member.packed.enter(self.packed, packed)
                    packed += member.packed.slots
                member.move_into(self.store, span_start(self.layout, end), copy)
                end = member.first + member.size.decode


def _packed_end(members: Iterable[Arena]) -> int:
    """Where the last packed span ends."""
    spans = [member.packed for member in members if isinstance(member, PackedArena)]
    return max((span.first + span.slots for span in spans), default=0)
