"""The tables of all rows of a batch on the device, as a decode step reads them: one copy for all layers."""

from __future__ import annotations

import numpy as np
import torch

from ...cache.arena import Arena
from ...cache.packed_arena import PackedArena
from ...cache.transfer import to_device
from .packed import PackedPart
from .rows import Rows

UNLIMITED = np.iinfo(np.int32).max


class RowTables:
    """Offsets, lengths and limits int32 `[layers, batch, kv_heads]` and positions int32 `[batch]`, on the device.

    They are made from what the arenas know on the host, in one copy, and are good for one step: a step raises the
    device's lengths, `advance` the arenas'. The arenas must share a store.
    """

    def __init__(self, arenas: list[Arena], limits: list[np.ndarray | None], positions: list[int]) -> None:
        """limits: `[layers, kv_heads]` of each sequence, None where rows only grow. positions: of the new tokens."""
        self.store, self._arenas = arenas[0].store, arenas
        assert all(arena.store is self.store for arena in arenas), "rows of one batch live in one store"
        lengths = [arena.length for arena in arenas]
        tops = [
            np.full_like(arena.length, UNLIMITED) if limit is None else limit
            for arena, limit in zip(arenas, limits, strict=True)
        ]
        tables = [[arena.offset for arena in arenas], lengths, tops]
        packed_rows = [arena.packed for arena in arenas if isinstance(arena, PackedArena)]
        if packed_rows:
            tables += [[rows.offset for rows in packed_rows], [rows.length for rows in packed_rows]]
        stacked = np.stack([np.stack(table, 1) for table in tables])
        assert int(stacked.max(initial=0)) <= UNLIMITED, "slots are counted in 32 bits"
        packed = np.concatenate([stacked.astype(np.int32).ravel(), np.array(positions, dtype=np.int32)])
        on_device = to_device(packed, self.store.device, torch.int32)
        self.offset, self.length, self.limit, *packed_tables = on_device[: stacked.size].view(stacked.shape).unbind(0)
        self.query_position = on_device[stacked.size :]
        self._full = stacked[1] >= stacked[2]
        self.longest = max(int(max(arena.capacity.max(), arena.length.max() + 1)) for arena in arenas)
        self._packed_store, self._packed = (packed_rows[0].store if packed_rows else None), packed_tables
        self._longest_packed = max((int(rows.length.max()) for rows in packed_rows), default=0)

    def layer(self, index: int) -> Rows:
        """One layer's rows; its lengths are a view that `exchange_least_attended` writes to."""
        return Rows(
            keys=self.store.keys,
            values=self.store.values,
            position=self.store.position,
            offset=self.offset[index],
            length=self.length[index],
            query_position=self.query_position,
            longest=self.longest,
        )

    def packed(self, index: int) -> PackedPart | None:
        """What is packed of one layer's rows, None where nothing is."""
        if self._packed_store is None:
            return None
        offset, length = self._packed
        return PackedPart(self._packed_store, offset[index], length[index], self._longest_packed)

    def any_full(self, index: int) -> bool:
        """Whether a row of the layer has to give up a slot in this step."""
        return bool(self._full[index].any())

    def advance(self) -> None:
        """Let the arenas know what the step did: rows that were not full have grown by the newcomer."""
        for sequence, arena in enumerate(self._arenas):
            arena.length += ~self._full[:, sequence]
