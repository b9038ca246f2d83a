"""Packed rows of one sequence in a store: written group by group, shrunk, slid together and spread like the arena's."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .layout import ArenaLayout
from .packed_store import PackedStore
from .quantise import GROUP, pack_keys, pack_values, whole_groups, widen_keys, widen_values
from .saved_rows import SavedPacked, inside, whole
from .transfer import to_device

TILE = 64 * GROUP  # slots packed at a time: bounds the fp32 copies


class PackedRows:
    """Offsets, lengths and capacities int64 `[layers, kv_heads]` in slots of the store; a span of it from `first` on.

    A row is the tokens outside of the window, see `packed_store.py`. `slots`: of the span, whole groups.
    """

    def __init__(
        self,
        layout: ArenaLayout,
        slots: int,
        device: torch.device | str = "cpu",
        *,
        store: PackedStore | None = None,
        first: int = 0,
        tables: list[np.ndarray] | None = None,
    ) -> None:
        self.layout, self.slots, self.first = layout, slots, first
        self.store = store or PackedStore(layout, slots, device)
        shape = (layout.num_layers, layout.num_kv_heads)
        own: list[np.ndarray] = [np.zeros(shape, dtype=np.int64) for _ in range(3)]
        self.offset, self.length, self.capacity = tables or own
        self._end = first  # of the rows written so far while a piece is read
        self._read = 0  # layers written so far

    def clear(self) -> None:
        """Forget every row."""
        self.offset[:], self.length[:], self.capacity[:] = 0, 0, 0

    # -- reading a piece of text --------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Make ready to read a piece: what is held waits at the right end of the span."""
        self._read = self.layout.num_layers
        self._slide()
        end = self.first + self.slots
        for layer, head in reversed(self._in_order()):
            size = whole_groups(int(self.length[layer, head]))
            end -= size
            self._move(layer, head, end)
            self.capacity[layer, head] = size
        self._end, self._read = self.first, 0

    def widen(self, layer: int, head: int, keys: Tensor, values: Tensor) -> None:
        """Write a row's numbers into `keys` and `values` `[length, head_dim]`, any float dtype."""
        store, start = self.store, int(self.offset[layer, head])
        slots = slice(start, start + whole_groups(keys.shape[0]))
        groups = slice(slots.start // GROUP, slots.stop // GROUP)
        widen_keys(keys, store.key_codes[slots], store.key_scale[groups], store.key_minimum[groups], store.bits)
        widen_values(values, store.value_codes[slots], store.value_scale[slots], store.value_minimum[slots], store.bits)

    def marks(self, layer: int, head: int) -> tuple[Tensor, Tensor]:
        """Positions int32 and scores fp32 `[length]` of a row, no copy."""
        start = int(self.offset[layer, head])
        span = slice(start, start + int(self.length[layer, head]))
        return self.store.position[span], self.store.score[span]

    def drop(self, layer: int) -> None:
        """Forget a layer's rows: they have been staged."""
        self.length[layer], self.capacity[layer] = 0, 0

    def shrink(self, layer: int, lengths: np.ndarray) -> None:
        """Cut a layer's rows to `lengths` `[kv_heads]`; whole groups behind them are free for the next slide."""
        assert (lengths <= self.length[layer]).all(), "a row never grows"
        self.length[layer] = lengths

    def place(self, layer: int, lengths: list[int]) -> None:
        """Make room for a layer's rows behind those written so far, which slide to the left first if they must."""
        limit = self.first + self.slots - int(self.capacity[layer + 1 :].sum())
        needed = sum(whole_groups(length) for length in lengths)
        if self._end + needed > limit:
            self._slide()
        assert self._end + needed <= limit, "the cascade promised more than its budget"
        for head, length in enumerate(lengths):
            size = whole_groups(length)
            self.offset[layer, head], self.length[layer, head], self.capacity[layer, head] = self._end, length, size
            self._end += size
        self._read = layer + 1

    def write(
        self, layer: int, head: int, at: int, keys: Tensor, values: Tensor, position: Tensor, score: Tensor | float
    ) -> None:
        """Pack `[n, head_dim]` into a row from its slot `at` on, the first of a group."""
        assert at % GROUP == 0, "a group is packed as a whole"
        store, n = self.store, keys.shape[0]
        start = int(self.offset[layer, head]) + at
        slots = slice(start, start + whole_groups(n))
        groups = slice(slots.start // GROUP, slots.stop // GROUP)
        store.key_codes[slots], store.key_scale[groups], store.key_minimum[groups] = pack_keys(keys, store.bits)
        self.put_values(layer, head, values, at)
        slots = slice(start, start + n)
        store.position[slots], store.score[slots] = position, score

    def put_values(self, layer: int, head: int, values: Tensor, at: int = 0) -> None:
        """Pack values `[n, head_dim]` into a row from its slot `at` on."""
        store, start = self.store, int(self.offset[layer, head]) + at
        slots = slice(start, start + values.shape[0])
        codes, scale, minimum = pack_values(values, store.bits)
        store.value_codes[slots], store.value_scale[slots], store.value_minimum[slots] = codes, scale, minimum

    def append_groups(
        self, rows: np.ndarray, starts: np.ndarray, source: tuple[Tensor, Tensor, Tensor, Tensor]
    ) -> None:
        """Pack 32 tokens behind each of the rows that `rows` bool `[layers, kv_heads]` says, all of whole groups.

        `starts`: of each in row-major order, the slot of its first token in `source`: keys, values `[slots, head_dim]`,
        positions and scores `[slots]`. Some rows at a time, in few operations.
        """
        store, ends = self.store, (self.offset + self.length)[rows]
        assert not (ends % GROUP).any(), "a group is packed as a whole"
        assert (self.length + GROUP <= self.capacity)[rows].all(), "a row was sized for fewer new tokens"
        for first in range(0, len(ends), TILE // GROUP):
            some = slice(first, first + TILE // GROUP)
            tokens, slots = (
                to_device((table[some, None] + np.arange(GROUP)).ravel(), store.device, torch.int64)
                for table in (starts, ends)
            )
            groups = to_device(ends[some] // GROUP, store.device, torch.int64)
            keys, values, position, score = (table[tokens] for table in source)
            store.key_codes[slots], store.key_scale[groups], store.key_minimum[groups] = pack_keys(keys, store.bits)
            codes, scale, minimum = pack_values(values, store.bits)
            store.value_codes[slots], store.value_scale[slots], store.value_minimum[slots] = codes, scale, minimum
            store.position[slots], store.score[slots] = position, score
        self.length[rows] += GROUP

    def append(self, layer: int, head: int, keys: Tensor, values: Tensor, position: Tensor, score: Tensor) -> None:
        """Pack tokens `[n, head_dim]` behind a row. Keys of a group that is not full are packed anew with them."""
        length = int(self.length[layer, head])
        inside = length % GROUP
        assert length + keys.shape[0] <= self.capacity[layer, head], "the row was sized for fewer new tokens"
        store, start = self.store, int(self.offset[layer, head]) + length
        self.put_values(layer, head, values, length)
        slots = slice(start, start + keys.shape[0])
        store.position[slots], store.score[slots] = position, score
        if inside:
            first = start - inside
            old = torch.empty(inside, keys.shape[1], dtype=torch.float32, device=keys.device)
            group = slice(first // GROUP, first // GROUP + 1)
            widen_keys(
                old,
                store.key_codes[first : first + GROUP],
                store.key_scale[group],
                store.key_minimum[group],
                store.bits,
            )
            keys = torch.cat([old, keys.float()])
            start = first
        slots = slice(start, start + whole_groups(keys.shape[0]))
        groups = slice(slots.start // GROUP, slots.stop // GROUP)
        store.key_codes[slots], store.key_scale[groups], store.key_minimum[groups] = pack_keys(keys, store.bits)
        self.length[layer, head] = length + position.shape[0]

    def finish(self, capacity: np.ndarray) -> None:
        """Spread the rows: `capacity` `[layers, kv_heads]` slots for each, whole groups."""
        self._slide()
        ends = self.first + np.cumsum(capacity.reshape(-1)).reshape(capacity.shape)
        assert ends[-1, -1] <= self.first + self.slots, "the store was sized for fewer new tokens"
        for layer, head in reversed(self._in_order()):
            self._move(layer, head, int(ends[layer, head] - capacity[layer, head]))
        self.capacity[:] = capacity

    def settle(self) -> None:
        """Give back what only reading needed."""
        self.slots = int(self.capacity.sum())

    def enter(self, store: PackedStore, first: int) -> None:
        """Live in another store from now on; the rows are gone until they are loaded again."""
        self.store, self.first = store, first

    def move_to(self, first: int) -> None:
        """Move the whole span to the left, so that it begins at slot `first`, which must be free."""
        distance = self.first - first
        assert distance >= 0, "a span only moves to the left"
        for layer, head in self._in_order():
            self._move(layer, head, int(self.offset[layer, head]) - distance)
        self.first = first

    # -- copies and moves ---------------------------------------------------------------------------------------------

    def save(self) -> SavedPacked:
        """A copy of every row, which `load` brings back exactly."""
        sizes = whole(self.length)
        each = [slice(int(o), int(o + n)) for o, n in zip(self.offset.flat, sizes.flat, strict=True)]
        behind = torch.from_numpy(~inside(self.length)).to(self.store.key_codes.device)
        tables: list[Tensor] = []
        for table in self.store.tables:
            step = self.store.slots // table.shape[0] if table.shape[0] else 1
            parts = [table[span.start // step : span.stop // step] for span in each]
            tables.append(torch.cat(parts))
            if step == 1:  # what lies behind a row is whatever was there before
                tables[-1].masked_fill_(behind.view(-1, *[1] * (table.dim() - 1)), 0)
        return SavedPacked(self.store.bits, tuple(tables), self.length.copy(), self.capacity.copy())

    def load(self, saved: SavedPacked) -> None:
        """Replace every row by a saved copy; each gets the room it had."""
        sizes = whole(saved.length)
        count = int(sizes.sum())
        assert int(saved.capacity.sum()) <= self.slots, "the store is smaller than the saved rows"
        for table, copy in zip(self.store.tables, saved.tables, strict=True):
            step = self.store.slots // table.shape[0] if table.shape[0] else 1
            table[self.first // step : (self.first + count) // step] = copy
        self.length[:], self.capacity[:] = saved.length, sizes
        ends = np.cumsum(sizes.reshape(-1)).reshape(sizes.shape)
        self.offset[:] = self.first + ends - sizes
        self._read = self.layout.num_layers
        self.finish(saved.capacity)

    def _in_order(self) -> list[tuple[int, int]]:
        heads = self.layout.num_kv_heads
        return [divmod(i, heads) for i in range(self.layout.num_layers * heads)]

    def _slide(self) -> None:
        """Move the rows written so far to the left, in order of offset."""
        end = self.first
        for layer, head in self._in_order()[: self._read * self.layout.num_kv_heads]:
            size = whole_groups(int(self.length[layer, head]))
            self._move(layer, head, end)
            self.capacity[layer, head] = size
            end += size
        self._end = end

    def _move(self, layer: int, head: int, target: int) -> None:
        self.store.move(int(self.offset[layer, head]), target, whole_groups(int(self.length[layer, head])))
        self.offset[layer, head] = target
