"""Packed rows: the kept tokens outside of the window in 8, 4 or 2 bits, in flat stores that rows slide through.

A packed row is the part of a row that is not in the arena's own store: (offset, length, capacity) in slots, offset and
capacity whole groups of 32 slots, in the arena's order (most worth keeping first). A shrink is a smaller length: a
group that is cut in two keeps the scale and minimum that it got when it was whole. See `quantise.py` for the numbers.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ..errors import MemoryLimit
from .layout import ArenaLayout, packed_bytes
from .quantise import GROUP, code_bytes, value_groups
from .saved_rows import TABLES
from .store import BOUNCE_BYTES, OVERLAPPING


class PackedStore:
    """Room for whole groups; whose they are is the rows' business.

    key_codes, value_codes uint8 `[slots, code_bytes]`; key_scale, key_minimum fp16 `[slots / 32, head_dim]`;
    value_scale, value_minimum fp16 `[slots, value_groups]`; position int32 and score fp32 `[slots]`.
    """

    def __init__(self, layout: ArenaLayout, slots: int, device: torch.device | str = "cpu") -> None:
        """Raises MemoryLimit where the device has not as much."""
        assert layout.kv_bits is not None, "nothing is packed in this layout"
        assert slots % GROUP == 0, "packed rows are whole groups"
        self.layout, self.bits, self.slots, self.device = layout, layout.kv_bits, slots, torch.device(device)
        codes, groups = code_bytes(layout.head_dim, self.bits), value_groups(layout.head_dim)
        try:
            with torch.inference_mode(False):  # inference tensors could not be written to outside
                self.key_codes = torch.empty(slots, codes, dtype=torch.uint8, device=device)
                self.value_codes = torch.empty(slots, codes, dtype=torch.uint8, device=device)
                self.key_scale = torch.empty(slots // GROUP, layout.head_dim, dtype=torch.float16, device=device)
                self.key_minimum = torch.empty_like(self.key_scale)
                self.value_scale = torch.empty(slots, groups, dtype=torch.float16, device=device)
                self.value_minimum = torch.empty_like(self.value_scale)
                self.position = torch.zeros(slots, dtype=torch.int32, device=device)
                self.score = torch.zeros(slots, dtype=torch.float32, device=device)
        except RuntimeError:  # torch's own out-of-memory errors derive from it
            need = f"{packed_bytes(layout, slots) / 2**20:,.0f} MiB"
            raise MemoryLimit(f"no memory for packed KV rows of {need}: lower the budget or the context") from None

    @property
    def nbytes(self) -> int:
        return sum(table.nbytes for table in self.tables)

    @property
    def tables(self) -> tuple[Tensor, ...]:
        """Everything there is, each with as many rows as slots, or as groups."""
        return tuple(getattr(self, name) for name in TABLES)

    def move(self, source: int, target: int, count: int) -> None:
        """Move `count` slots, all three whole groups: by memmove, or in tiles, so that nothing is spoilt."""
        if source == target or not count:
            return
        for table in self.tables:
            each = self.slots // table.shape[0]  # slots of one row of the table
            first, into, size, width = source // each, target // each, count // each, table[0].nbytes
            if self.device.type in OVERLAPPING:
                start = table.data_ptr()
                ctypes.memmove(start + into * width, start + first * width, size * width)
                continue
            tile = max(1, BOUNCE_BYTES // width)
            starts = list(range(0, size, tile))
            for at in starts if target < source else reversed(starts):
                stop = min(at + tile, size)
                table[into + at : into + stop] = table[first + at : first + stop].clone()
