"""Copies of rows: what is parked beside an arena, gone back to, or written to a file."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from .layout import ArenaSize
from .quantise import GROUP

# what a packed store has of each slot, or group of 32 slots, in its order
TABLES = (
    "key_codes",
    "value_codes",
    "key_scale",
    "key_minimum",
    "value_scale",
    "value_minimum",
    "position",
    "score",
)


def whole(lengths: np.ndarray) -> np.ndarray:
    """Lengths in whole groups."""
    return -(-lengths // GROUP) * GROUP


def inside(lengths: np.ndarray) -> np.ndarray:
    """Of rows side by side in whole groups, which slots are theirs: bool `[slots]`."""
    sizes, flat = whole(lengths).reshape(-1), lengths.reshape(-1)
    ends = np.cumsum(sizes)
    slots: np.ndarray = np.arange(int(sizes.sum())) - np.repeat(ends - sizes, sizes)
    return slots < np.repeat(flat, sizes)


@dataclass
class SavedPacked:
    """A copy of all packed rows: the store's tables, row by row in whole groups, and their bookkeeping.

    length, capacity: int64 `[layers, kv_heads]`, in slots. bits: of a code.
    """

    bits: int
    tables: tuple[Tensor, ...]  # in the order of TABLES
    length: np.ndarray
    capacity: np.ndarray

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and minima."""
        return sum(table.nbytes for table in self.tables[:6])

    def tight(self) -> SavedPacked:
        """The same without room behind the rows."""
        return replace(self, capacity=whole(self.length))


@dataclass
class SavedRows:
    """A packed copy of all rows: keys and values `[slots, head_dim]`, row by row, and their bookkeeping."""

    keys: Tensor
    values: Tensor
    position: Tensor  # int32 [slots]
    score: Tensor  # fp32 [slots]
    length: np.ndarray  # int64 [layers, kv_heads]
    capacity: np.ndarray  # int64 [layers, kv_heads]
    packed: SavedPacked | None = None  # what lies outside of the window, where rows are packed

    @property
    def held(self) -> np.ndarray:
        """Tokens of each row, packed ones included: int64 `[layers, kv_heads]`."""
        return self.length if self.packed is None else self.length + self.packed.length

    @property
    def size(self) -> ArenaSize:
        """The arena that takes them back, headroom included."""
        packed = 0 if self.packed is None else int(self.packed.capacity.sum())
        return ArenaSize(0, 0, int(self.capacity.sum()), packed)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, with the scales of packed ones."""
        return self.keys.nbytes + self.values.nbytes + (0 if self.packed is None else self.packed.nbytes)

    def tight(self) -> SavedRows:
        """The same rows without headroom."""
        packed = None if self.packed is None else self.packed.tight()
        return replace(self, capacity=self.length, packed=packed)
