"""An arena whose rows are in two parts: the window and what came after it as they are, everything else packed.

The part in the arena's own store is in order of position: the window, then the tokens of a reply. When it holds the
window and enough to fill a group, its oldest tokens become that group (`flush`), so that all but the last `window + 31`
tokens are packed at any time. The other part are `PackedRows`, the most worth keeping first. A row that is held at its
length gets no further group then, but one in another one's place (`exchange`).

A layer's chosen columns are packed from staging, where they are as they were computed; the cascade shrinks packed rows.
A later turn widens them in front of the staged tokens, and packs what it keeps of them anew.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from .arena import Arena
from .layout import ArenaLayout, ArenaSize
from .packed_rows import TILE, PackedRows
from .quantise import GROUP
from .saved_rows import SavedRows, whole
from .staged import Staged
from .store import Store


class PackedArena(Arena):
    """`length` and `capacity` are those of the part that is not packed; `held` counts both."""

    def __init__(
        self,
        layout: ArenaLayout,
        size: ArenaSize,
        device: torch.device | str = "cpu",
        *,
        store: Store | None = None,
        first: int = 0,
        tables: list[np.ndarray] | None = None,
        packed: PackedRows | None = None,
    ) -> None:
        super().__init__(layout, size, device, store=store, first=first, tables=tables)
        self.packed = packed or PackedRows(layout, size.packed, device)
        self._scratch = torch.empty(0, dtype=torch.uint8, device=self.device)

    @property
    def held(self) -> np.ndarray:
        """See `Arena.held`."""
        held: np.ndarray = self.length + self.packed.length
        return held

    def clear(self) -> None:
        """Forget every row."""
        super().clear()
        self.packed.clear()

    # -- reading a piece of text --------------------------------------------------------------------------------------

    def begin(self, kept_slots: int, columns: int | None = None) -> None:
        """See `Arena.begin`."""
        inside = min(self.layout.window, columns or 0)
        super().begin(self.layout.num_layers * self.layout.num_kv_heads * inside, columns)
        self.packed.begin()

    def stage(self, layer: int, tokens: int, first_position: int) -> Staged:
        """See `Arena.stage`: packed tokens come first, then the others in order of position."""
        staged = super().stage(layer, tokens, first_position)
        self.packed.drop(layer)
        return staged

    def _bring(self, layer: int, head: int, keys: Tensor, values: Tensor, position: Tensor, score: Tensor) -> None:
        n = int(self.packed.length[layer, head])
        self.packed.widen(layer, head, keys[:n], values[:n])
        for target, source in zip((position, score), self.packed.marks(layer, head), strict=True):
            target[:n] = source
        super()._bring(layer, head, keys[n:], values[n:], position[n:], score[n:])

    def _cut(self, layer: int, lengths: tuple[int, ...] | list[int]) -> None:
        self.packed.shrink(layer, np.array(lengths) - self.length[layer])

    def keep(self, layer: int, staged: Staged, order: Tensor | None, lengths: list[int], score: Tensor | None) -> None:
        """See `Arena.keep`. The window comes first in an order; without one it is the last columns."""
        inside = min(self.layout.window, min(lengths))
        outside = [length - inside for length in lengths]
        if order is None:
            ends = torch.tensor(lengths, device=self.device)[:, None]
            window = torch.arange(-inside, 0, device=self.device) + ends
        else:
            window = order[:, :inside]
        super().keep(layer, staged, window, [inside] * len(lengths), score)
        self.packed.place(layer, outside)
        for head, length in enumerate(outside):
            for at in range(0, length, TILE):
                span = slice(at, min(at + TILE, length))
                if order is not None:
                    chosen: Tensor | slice = order[head, inside + span.start : inside + span.stop]
                else:
                    chosen = span
                self.packed.write(
                    layer,
                    head,
                    at,
                    staged.keys[head][chosen],
                    staged.values[head][chosen],
                    staged.position[head][chosen],
                    0.0 if score is None else score[head][chosen],
                )

    def tokens(self, layer: int, head: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A row's keys and values in fp32, positions and scores, the window first: copies."""
        inside, outside = int(self.length[layer, head]), int(self.packed.length[layer, head])
        shape = (inside + outside, self.layout.head_dim)
        keys, values = (torch.empty(shape, dtype=torch.float32, device=self.device) for _ in range(2))
        position = torch.empty(shape[0], dtype=torch.int32, device=self.device)
        score = torch.empty(shape[0], dtype=torch.float32, device=self.device)
        super()._bring(layer, head, *(table[:inside] for table in (keys, values, position, score)))
        self.packed.widen(layer, head, keys[inside:], values[inside:])
        position[inside:], score[inside:] = self.packed.marks(layer, head)
        return keys, values, position, score

    def put_values(self, layer: int, head: int, values: Tensor) -> None:
        """Other values `[held, head_dim]` for a row, in the order of `tokens`."""
        inside = int(self.length[layer, head])
        self.row(layer, head)[1].copy_(values[:inside])
        self.packed.put_values(layer, head, values[inside:])

    def finish(self, headroom: np.ndarray) -> None:
        """See `Arena.finish`: of the new tokens that each row may get, those that leave the window are packed."""
        self._finish(headroom, None)

    def _finish(self, headroom: np.ndarray, most: np.ndarray | None) -> None:
        """`most`: packed slots of each row."""
        new = headroom.astype(np.int64) + np.zeros_like(self.length)
        window = self.layout.window
        behind = np.maximum(self.length + new - window, 0)  # tokens that are outside of the window in the end
        packed = self.packed.length
        capacity = np.maximum(whole(packed), (packed + behind) // GROUP * GROUP)
        if most is not None:
            capacity = np.minimum(capacity, most)
        self._spread(np.minimum(new, window + GROUP - self.length))
        self.packed.finish(capacity)

    def finish_held(self, headroom: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """`finish` for rows that are to hold `lengths` `[layers, kv_heads]`, in whole groups beside the window.

        Returns how long they may be between two steps: as many tokens more as fill a group wait to be packed.
        """
        most = whole(np.maximum(lengths - self.layout.window, 0))
        self._finish(headroom, most)
        limit: np.ndarray = self.layout.window + most
        return limit

    # -- decoding -----------------------------------------------------------------------------------------------------

    @property
    def wanted(self) -> np.ndarray:
        """How many tokens fill each row's last group, which may have been cut in two, or else another one."""
        left: np.ndarray = GROUP - self.packed.length % GROUP
        return left

    @property
    def due(self) -> np.ndarray:
        """Which rows have as many tokens outside of the window."""
        found: np.ndarray = self.length >= self.layout.window + self.wanted
        return found

    def flush(self) -> None:
        """Before a step: where a row has as many tokens outside of the window as fill a group, they are packed."""
        wanted, due = self.wanted, self.due
        if not due.any():
            return
        whole = due & (wanted == GROUP)
        tables = self.keys, self.values, self.position, self.score
        self.packed.append_groups(whole, self.offset[whole], tables)
        for layer, head in zip(*(at.tolist() for at in (due & ~whole).nonzero()), strict=True):
            count, start = int(wanted[layer, head]), int(self.offset[layer, head])
            self.packed.append(layer, head, *(table[start : start + count] for table in tables))
        self._drop_oldest(due, wanted)

    def exchange(self, layer: int, head: int, group: int) -> None:
        """Pack a row's 32 oldest unpacked tokens in place of a packed group; of one behind the last: drop them."""
        if group * GROUP < self.packed.length[layer, head]:
            start = int(self.offset[layer, head])
            tables = (self.keys, self.values, self.position, self.score)
            self.packed.write(layer, head, group * GROUP, *(table[start : start + GROUP] for table in tables))
        one = np.zeros(self.length.shape, dtype=bool)
        one[layer, head] = True
        self._drop_oldest(one, np.full_like(self.length, GROUP))

    def _drop_oldest(self, rows: np.ndarray, counts: np.ndarray) -> None:
        """Forget the `counts` oldest unpacked tokens of the rows that `rows` bool `[layers, kv_heads]` says."""
        starts, left = self.offset[rows], (self.length - counts)[rows]
        self.store.move_rows(starts + counts[rows], starts, left)
        self.length[rows] = left

    def widened(self, layer: int, head: int, dtype: torch.dtype, extra: int = 1) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values `[held + extra, head_dim]` in a dtype and positions likewise of one row: packed, then not.

        `extra`: slots of newcomers. In buffers that the next call uses again.
        """
        n, rest = int(self.packed.length[layer, head]), int(self.length[layer, head]) + extra
        columns, dim = n + rest, self.layout.head_dim
        size = columns * dim * dtype.itemsize
        if self._scratch.numel() < 2 * size + 4 * columns:
            self._scratch = torch.empty(2 * size + 4 * columns + (size >> 2), dtype=torch.uint8, device=self.device)
        keys, values = (self._scratch[at : at + size].view(dtype).view(columns, dim) for at in (0, size))
        position = self._scratch[2 * size : 2 * size + 4 * columns].view(torch.int32)
        self.packed.widen(layer, head, keys[:n], values[:n])
        position[:n] = self.packed.marks(layer, head)[0]
        for target, source in zip((keys, values, position), self.row(layer, head, extra=extra), strict=True):
            target[n:] = source
        return keys, values, position

    # -- copies of rows -----------------------------------------------------------------------------------------------

    def save(self) -> SavedRows:
        """See `Arena.save`."""
        saved = super().save()
        saved.packed = self.packed.save()
        return saved

    def holds(self, saved: SavedRows) -> bool:
        """See `Arena.holds`."""
        assert saved.packed is not None, "these rows are of another layout"
        return super().holds(saved) and int(saved.packed.capacity.sum()) <= self.packed.slots

    def load(self, saved: SavedRows) -> None:
        """See `Arena.load`."""
        assert saved.packed is not None, "these rows are of another layout"
        self.packed.load(saved.packed)
        super().load(saved)

    def settle(self) -> None:
        """See `Arena.settle`."""
        super().settle()
        self.packed.settle()
        self.size = replace(self.size, packed=self.packed.slots)


def make_arena(layout: ArenaLayout, size: ArenaSize, device: torch.device | str = "cpu") -> Arena:
    """An arena of this layout with a store of its own."""
    return Arena(layout, size, device) if layout.kv_bits is None else PackedArena(layout, size, device)
