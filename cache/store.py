"""The buffers behind an arena: keys and values as bytes, a position and a score per slot, and one bounce buffer."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ..errors import MemoryLimit
from .layout import ALIGNMENT, ArenaLayout

BOUNCE_BYTES = 4 << 20
OVERLAPPING = frozenset({"cpu"})  # devices whose memory memmove can reach: no bounce buffer, every byte touched once


class Store:
    """Room for slots; whose they are is the arenas' business.

    k, v: uint8, the same bytes that `keys` and `values` `[slots, head_dim]` show in the KV dtype; staging takes bytes
    of them in its own dtype. position int32 and score fp32 are tables with an entry per slot.
    """

    def __init__(self, layout: ArenaLayout, kv_bytes: int, table_slots: int, device: torch.device) -> None:
        """`kv_bytes` for the keys and as many for the values. Raises MemoryLimit where the device has not as much."""
        self.layout, self.device = layout, device
        try:
            with torch.inference_mode(False):  # inference tensors could not be written to outside
                self.k = torch.empty(max(kv_bytes, ALIGNMENT), dtype=torch.uint8, device=device)
                self.v = torch.empty(max(kv_bytes, ALIGNMENT), dtype=torch.uint8, device=device)
                self.position = torch.zeros(max(table_slots, 1), dtype=torch.int32, device=device)
                self.score = torch.zeros(max(table_slots, 1), dtype=torch.float32, device=device)
                slot_bytes = layout.head_dim * layout.kv_dtype.itemsize
                whole = self.k.numel() // slot_bytes * slot_bytes
                self.keys = self.k[:whole].view(layout.kv_dtype).view(-1, layout.head_dim)
                self.values = self.v[:whole].view(layout.kv_dtype).view(-1, layout.head_dim)
        except RuntimeError:  # torch's own out-of-memory errors derive from it
            need = f"{(2 * kv_bytes + 8 * table_slots) / 2**20:,.0f} MiB"
            raise MemoryLimit(f"no memory for a KV arena of {need}: lower the budget or the context") from None
        self.bounce_bytes = BOUNCE_BYTES
        self.overlaps = device.type in OVERLAPPING
        self._bounce = torch.empty(0, dtype=torch.uint8, device=device)

    @property
    def nbytes(self) -> int:
        return 2 * self.k.numel() + 8 * self.position.numel()

    @property
    def tables(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Everything a slot has, each `[slots, width]`."""
        return self.keys, self.values, self.position[:, None], self.score[:, None]

    def move(self, source: int, target: int, count: int) -> None:
        """Move `count` slots: by memmove, or in tiles through the bounce buffer, so that nothing is spoilt."""
        if source == target or not count:
            return
        if self.overlaps:
            for table in self.tables:
                width, start = table.shape[1] * table.element_size(), table.data_ptr()
                ctypes.memmove(start + target * width, start + source * width, count * width)
            return
        for table in self.tables:
            tile = max(1, self.bounce_bytes // (table.shape[1] * table.element_size()))
            starts = list(range(0, count, tile))
            for start in starts if target < source else reversed(starts):
                size = min(tile, count - start)
                bounce = self.bounce(table, size)
                bounce.copy_(table[source + start : source + start + size])
                table[target + start : target + start + size] = bounce

    def pack(self, sources: Tensor, target: int) -> None:
        """Move the slots `sources`, int64 and rising, to `target` and behind it; none of them to the right.

        They are gathered in tiles; as none moves to the right, a tile's target holds nothing that is still to be read.
        """
        sources = sources.to(self.device)
        for table in self.tables:
            tile = max(1, self.bounce_bytes // (table.shape[1] * table.element_size()))
            for at in range(0, len(sources), tile):
                chosen = sources[at : at + tile]
                bounce = self.bounce(table, len(chosen))
                torch.index_select(table, 0, chosen, out=bounce)
                table[target + at : target + at + len(chosen)] = bounce

    def bounce(self, table: Tensor, count: int) -> Tensor:
        """`[count, width]` of the one bounce buffer, in the table's dtype."""
        size = count * table.shape[1] * table.element_size()
        if self._bounce.numel() < size:
            self._bounce = torch.empty(size, dtype=torch.uint8, device=self.device)
        return self._bounce[:size].view(table.dtype).view(count, table.shape[1])
