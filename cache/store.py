"""The buffers behind an arena: keys and values as bytes, a position and a score per slot, and one bounce buffer."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

from ..errors import MemoryLimit
from .layout import ALIGNMENT, ArenaLayout
from .transfer import to_device

BOUNCE_BYTES = 4 << 20
SPAN = 1 << 18  # slots of many rows whose addresses are there at once, where memmove cannot reach
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
        """Move `count` slots; see `move_rows`."""
        self.move_rows(np.array([source]), np.array([target]), np.array([count]))

    def move_rows(self, sources: np.ndarray, targets: np.ndarray, counts: np.ndarray) -> None:
        """Move rows of slots, all of them to the left or all of them to the right, so that nothing is spoilt.

        sources, targets: int64, where rows of `counts` slots begin and are to begin, rising, so that no two overlap.
        By memmove, a row at a time in the order that reads before it writes; or gathered into the bounce buffer and
        scattered out of it, in tiles of many rows in that order: two launches a tile and table, however many rows, and
        nothing that waits for the device.
        """
        moving = np.flatnonzero((sources != targets) & (counts > 0))
        if not len(moving):
            return
        sources, targets, counts = sources[moving], targets[moving], counts[moving]
        left = bool(targets[0] < sources[0])
        assert ((targets < sources) == left).all(), "rows that move past each other"
        if self.overlaps:
            rows = range(len(moving)) if left else reversed(range(len(moving)))
            for row in rows:
                self._move(int(sources[row]), int(targets[row]), int(counts[row]))
            return
        ends = np.cumsum(counts)
        total, behind = int(ends[-1]), ends - counts
        moves = to_device(np.stack([ends, sources - behind, targets - behind]), self.device, torch.int64)
        spans = range(0, total, SPAN)
        for first in spans if left else reversed(spans):
            slot = torch.arange(first, min(first + SPAN, total), device=self.device)
            belongs = torch.searchsorted(moves[0], slot, right=True)
            read, write = (moves[i][belongs].add_(slot) for i in (1, 2))
            for table in self.tables:
                tile = max(1, self.bounce_bytes // (table.shape[1] * table.element_size()))
                tiles = range(0, len(slot), tile)
                for at in tiles if left else reversed(tiles):
                    chosen = read[at : at + tile]
                    bounce = self.bounce(table, len(chosen))
                    torch.index_select(table, 0, chosen, out=bounce)
                    table.index_copy_(0, write[at : at + tile], bounce)

    def _move(self, source: int, target: int, count: int) -> None:
        for table in self.tables:
            width, start = table.shape[1] * table.element_size(), table.data_ptr()
            ctypes.memmove(start + target * width, start + source * width, count * width)

    def bounce(self, table: Tensor, count: int) -> Tensor:
        """`[count, width]` of the one bounce buffer, in the table's dtype."""
        size = count * table.shape[1] * table.element_size()
        if self._bounce.numel() < size:
            self._bounce = torch.empty(size, dtype=torch.uint8, device=self.device)
        return self._bounce[:size].view(table.dtype).view(count, table.shape[1])
