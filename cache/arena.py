"""The KV arena: one preallocated buffer for K and one for V, in which ragged rows live and are compacted in place.

A *slot* is room for one token's key and value of one KV head in one layer; a *row* is the kept slots of one (layer, KV
head). A row is (offset, length, capacity) in slots. Rows of a layer lie side by side; where its heads have equal
capacity, and only there, the layer is one strided view ``[kv_heads, length, head_dim]`` that attention reads in place.

The buffer has two regions. *Kept* rows are stored in the KV dtype from the left. *Staging* holds the incoming tokens of
one layer, in the compute dtype, to the right of them. While a piece of text is read, rows that are already compacted
are packed at the left end of the kept region and rows of layers that are still to be read wait at its right end.
After a prefill the staging bytes become the decode headroom: rows spread to the right, last row first.

Nothing is allocated after construction but index tensors and one bounce buffer of at most 4 MiB: copying between
overlapping views is undefined in torch (wrong data without an error for strided 3-D views, a race on a GPU).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .layout import ALIGNMENT, ArenaLayout, ArenaSize, arena_bytes, kv_bytes, table_slots
from .saved_rows import SavedRows
from .staged import Staged
from .store import Store

SLACK = 8  # a kept region may be larger than it must be by one part in so many


class Arena:
    """Rows of one sequence. All offsets, lengths and capacities are in slots; int64 tables `[layers, kv_heads]`.

    `first`: where the arena's span begins in a store that others live in too (`cache/shared.py`); `tables` are then
    the three tables, and nothing outside the span of `size` is ever touched. Else the arena has a store of its own.
    """

    def __init__(
        self,
        layout: ArenaLayout,
        size: ArenaSize,
        device: torch.device | str = "cpu",
        *,
        store: Store | None = None,
        first: int = 0,
        tables: list[np.ndarray] | None = None,
    ) -> None:
        self.layout, self.size, self.device = layout, size, torch.device(device)
        self.store = store or Store(layout, kv_bytes(layout, size), table_slots(size), self.device)
        self.keys, self.values = self.store.keys, self.store.values  # [slots, head_dim]
        self.position, self.score = self.store.position, self.store.score
        shape = (layout.num_layers, layout.num_kv_heads)
        own: list[np.ndarray] = [np.zeros(shape, dtype=np.int64) for _ in range(3)]
        self.offset, self.length, self.capacity = tables or own
        self.first = first
        self.unsettled = False  # in a store of several: its text has not been read to the end
        self._kept_end = first  # of the kept region while a piece is read
        self._packed_end = first  # of the rows already compacted
        self._read = 0  # layers already compacted

    # -- what is there ------------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        return arena_bytes(self.layout, self.size)

    @property
    def held(self) -> np.ndarray:
        """Tokens of each row, int64 `[layers, kv_heads]`: its length, and what is packed beside it."""
        return self.length

    @property
    def kept_slots(self) -> int:
        return int(self.held.sum())

    @property
    def _end_bytes(self) -> int:
        """Where the span ends in the bytes of keys (and of values)."""
        return self.first * self.layout.head_dim * self.layout.kv_dtype.itemsize + kv_bytes(self.layout, self.size)

    @property
    def _end(self) -> int:
        """Where the span ends in the tables of positions and scores."""
        return self.first + table_slots(self.size)

    @property
    def _last_slot(self) -> int:
        """Behind the last whole slot of the span that has both."""
        return min(self._end, self._end_bytes // (self.layout.head_dim * self.layout.kv_dtype.itemsize))

    def clear(self) -> None:
        """Forget every row."""
        self.offset[:], self.length[:], self.capacity[:] = 0, 0, 0

    def agrees(self, layer: int) -> bool:
        """Whether the heads of a layer have one length and one stride, so that `rows` gives one strided view."""
        length, offset = self.length[layer], self.offset[layer]
        return bool((length == length[0]).all() and len(set(np.diff(offset).tolist())) <= 1)

    def rows(self, layer: int, extra: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values `[kv_heads, length + extra, head_dim]` and positions `[kv_heads, length + extra]`, no copy.

        Only where the heads agree. `extra` slots behind the length (inside the capacity) are included for a newcomer.
        """
        first = int(self.offset[layer, 0])
        stride = int(self.offset[layer, 1]) - first if self.layout.num_kv_heads > 1 else 1
        shape = (self.layout.num_kv_heads, int(self.length[layer, 0]) + extra)
        dim = self.layout.head_dim
        keys = self.keys.as_strided((*shape, dim), (stride * dim, dim, 1), first * dim)
        values = self.values.as_strided((*shape, dim), (stride * dim, dim, 1), first * dim)
        return keys, values, self.position.as_strided(shape, (stride, 1), first)

    def row(self, layer: int, head: int, extra: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values `[length + extra, head_dim]` and positions `[length + extra]` of one row, no copy."""
        start = int(self.offset[layer, head])
        span = slice(start, start + int(self.length[layer, head]) + extra)
        return self.keys[span], self.values[span], self.position[span]

    # -- reading a piece of text --------------------------------------------------------------------------------------

    def begin(self, kept_slots: int, columns: int | None = None) -> None:
        """Make ready to read a piece: what is held waits at the right end of the kept region.

        `kept_slots` is how many slots the new rows may hold at once, over all layers and heads (see `kept_limit`).
        `columns`: of the longest layer that will be staged. Where decoding will take more room than that, a part of it
        is lent to the kept region: then rows need not be packed again after every layer.
        """
        self._read = self.layout.num_layers
        self._slide()  # first to the left, so that on the way to the right no row runs over another
        self._kept_end = kept_slots + self._packed_end
        if columns is not None:
            self._kept_end = max(
                self._kept_end, min(self._kept_end + kept_slots // SLACK, self._staging_limit(columns))
            )
        lengths = self.length.reshape(-1)
        starts = self._kept_end - np.cumsum(lengths[::-1])[::-1]
        self.store.move_rows(self.offset.reshape(-1), starts, lengths)
        self.offset[:], self.capacity[:] = starts.reshape(self.offset.shape), self.length
        self._packed_end, self._read = 0, 0

    def _staging_limit(self, columns: int) -> int:
        """The last slot at which staging of so many columns may begin."""
        layout, count = self.layout, self.layout.num_kv_heads * columns
        start = self._end_bytes - count * layout.head_dim * layout.staging_dtype.itemsize
        start = start // ALIGNMENT * ALIGNMENT
        return min(start // (layout.head_dim * layout.kv_dtype.itemsize), self._end - count)

    def stage(self, layer: int, tokens: int, first_position: int) -> Staged:
        """Views for `tokens` new tokens of a layer, its kept rows moved in front; the new columns are unwritten."""
        layout = self.layout
        held = tuple(int(n) for n in self.held[layer])
        columns = max(held) + tokens
        start = -(-self._kept_end * layout.head_dim * layout.kv_dtype.itemsize // ALIGNMENT) * ALIGNMENT
        count = layout.num_kv_heads * columns
        end = start + count * layout.head_dim * layout.staging_dtype.itemsize
        assert end <= self._end_bytes, "the arena was sized for a shorter piece"
        assert self._kept_end + count <= self._end, "the arena was sized for a shorter piece"
        shape = (layout.num_kv_heads, columns, layout.head_dim)
        keys = self.store.k[start:end].view(layout.staging_dtype).view(shape)
        values = self.store.v[start:end].view(layout.staging_dtype).view(shape)
        position = self.position[self._kept_end : self._kept_end + count].view(shape[:2])
        score = self.score[self._kept_end : self._kept_end + count].view(shape[:2])
        fresh = torch.arange(first_position, first_position + tokens, dtype=torch.int32, device=self.device)
        for head, length in enumerate(held):
            if length:
                self._bring(layer, head, *(table[head, :length] for table in (keys, values, position, score)))
        if min(held) == max(held):  # of all heads at once
            position[:, held[0] :], score[:, held[0] :] = fresh, 0.0
        else:
            for head, length in enumerate(held):
                position[head, length : length + tokens] = fresh
                score[head, length : length + tokens] = 0.0
        self.length[layer], self.capacity[layer] = 0, 0
        return Staged(keys, values, position, score, held, tokens)

    def _bring(self, layer: int, head: int, keys: Tensor, values: Tensor, position: Tensor, score: Tensor) -> None:
        """Copy a row into these `[length, ...]`."""
        offset = int(self.offset[layer, head])
        old_keys, old_values, old_position = self.row(layer, head)
        keys.copy_(old_keys)
        values.copy_(old_values)
        position.copy_(old_position)
        score.copy_(self.score[offset : offset + len(score)])

    def shrink(self, layer: int, lengths: tuple[int, ...] | list[int]) -> None:
        """Cut a compacted layer's rows to `lengths` (per KV head). Rows are in order of worth: only lengths change."""
        assert all(new <= old for new, old in zip(lengths, self.held[layer], strict=True)), "a row never grows"
        self._cut(layer, lengths)

    def _cut(self, layer: int, lengths: tuple[int, ...] | list[int]) -> None:
        self.length[layer] = lengths

    def keep(self, layer: int, staged: Staged, order: Tensor | None, lengths: list[int], score: Tensor | None) -> None:
        """Write a staged layer's chosen columns behind the rows compacted so far.

        `order` int64 `[kv_heads, max(lengths)]`: columns, the most worth keeping first (None: all, as they are);
        `score` fp32 `[kv_heads, columns]`. Earlier rows are slid to the left first, if there is no room behind them.
        """
        limit = self._kept_end - int(self.length[layer + 1 :].sum())
        if self._read == 0 or self._packed_end + sum(lengths) > limit:
            self._slide()
        first, total = self._packed_end, sum(lengths)
        assert first + total <= limit, "the cascade promised more than its budget"
        self.length[layer], self.capacity[layer] = lengths, lengths
        self.offset[layer] = first + np.cumsum(lengths) - lengths
        self._packed_end, self._read = first + total, layer + 1
        kept = slice(first, first + total)
        if order is not None:  # one gather for all heads: few launches matter on a GPU
            columns = staged.keys.shape[1]
            starts = torch.arange(0, columns * len(lengths), columns, device=order.device)[:, None]
            best = order[:, : max(lengths)] + starts
            chosen = torch.cat([row[:length] for row, length in zip(best, lengths, strict=True)])
            self._gather(staged.keys.flatten(0, 1), chosen, self.keys[kept])
            self._gather(staged.values.flatten(0, 1), chosen, self.values[kept])
            torch.index_select(staged.position.flatten(), 0, chosen, out=self.position[kept])
            if score is not None:
                torch.index_select(score.flatten(), 0, chosen, out=self.score[kept])
            return
        if score is None:
            self.score[kept] = 0.0
        for head, length in enumerate(lengths):
            keys, values, position = self.row(layer, head)
            keys.copy_(staged.keys[head, :length])
            values.copy_(staged.values[head, :length])
            position.copy_(staged.position[head, :length])
            if score is not None:
                start = int(self.offset[layer, head])
                self.score[start : start + length] = score[head, :length]

    def finish(self, headroom: np.ndarray) -> None:
        """Spread the compacted rows: `headroom` `[layers, 1 or kv_heads]` free slots behind each."""
        self._spread(headroom)

    def _spread(self, headroom: np.ndarray) -> None:
        self._slide()
        extra = headroom.astype(np.int64) + np.zeros_like(self.length)
        ends = self.first + np.cumsum((self.length + extra).reshape(-1)).reshape(self.length.shape)
        assert ends[-1, -1] <= self._last_slot, "the arena was sized for fewer new tokens"
        starts = ends - self.length - extra
        self.store.move_rows(self.offset.reshape(-1), starts.reshape(-1), self.length.reshape(-1))
        self.offset[:], self.capacity[:] = starts, self.length + extra

    # -- in a store that others live in too -------------------------------------------------------------------------

    def settle(self) -> None:
        """Give back what only reading needed: from now on the span is the rows and their headroom."""
        self.size, self.unsettled = ArenaSize(0, 0, int(self.capacity.sum())), False

    @property
    def span_end(self) -> int:
        """Behind the last slot that a neighbour in the store must leave alone."""
        if not self.unsettled:
            return self.first + self.size.decode
        return max(self._end, -(-self._end_bytes // (self.layout.head_dim * self.layout.kv_dtype.itemsize)))

    def move_to(self, first: int) -> None:
        """Move the whole span to the left, so that it begins at slot `first`, which must be free."""
        distance = self.first - first
        assert distance >= 0, "a span only moves to the left"
        # with the slot behind the row, where `hold` keeps what it gave up last
        counts = np.minimum(self.length + 1, self.capacity).reshape(-1)
        self.store.move_rows(self.offset.reshape(-1), self.offset.reshape(-1) - distance, counts)
        self.offset -= distance
        self.first = first

    def leave_store(self, empty: Store) -> None:
        """Hold on to the store no longer; the rows are gone."""
        self.store = empty
        self.keys, self.values, self.position, self.score = empty.keys, empty.values, empty.position, empty.score

    def move_into(self, store: Store, first: int, saved: SavedRows) -> None:
        """Live in another store from now on, with the rows of a copy made of this arena."""
        self.leave_store(store)
        self.first = first
        self.load(saved)

    # -- copies of rows -----------------------------------------------------------------------------------------------

    def save(self) -> SavedRows:
        """A packed copy of every row, that `load` brings back exactly, headroom included."""
        spans = [slice(int(o), int(o + n)) for o, n in zip(self.offset.flat, self.length.flat, strict=True)]
        parts = [torch.cat([table[s] for s in spans]) for table in (self.keys, self.values, self.position, self.score)]
        return SavedRows(parts[0], parts[1], parts[2], parts[3], self.length.copy(), self.capacity.copy())

    def holds(self, saved: SavedRows) -> bool:
        """Whether saved rows and their headroom fit."""
        return self.first + int(saved.capacity.sum()) <= self._last_slot

    def load(self, saved: SavedRows) -> None:
        """Replace every row by a saved copy; each gets the headroom it had."""
        assert self.holds(saved), "the arena is smaller than the saved rows"
        count = int(saved.length.sum())
        span, lengths = slice(self.first, self.first + count), saved.length.reshape(-1)
        self.keys[span], self.values[span] = saved.keys, saved.values
        self.position[span], self.score[span] = saved.position, saved.score
        self.length[:] = self.capacity[:] = saved.length
        self.offset[:] = self.first + (np.cumsum(lengths) - lengths).reshape(saved.length.shape)
        self._read = self.layout.num_layers
        self._spread(saved.capacity - saved.length)

    # -- moving -------------------------------------------------------------------------------------------------------

    def _slide(self) -> None:
        """Pack the compacted layers to the left, in order of offset."""
        lengths, offsets = self.length[: self._read].reshape(-1), self.offset[: self._read].reshape(-1)
        starts = self.first + np.cumsum(lengths) - lengths
        self.store.move_rows(offsets, starts, lengths)
        self.offset[: self._read] = starts.reshape(self.offset[: self._read].shape)
        self.capacity[: self._read] = self.length[: self._read]
        self._packed_end = self.first + int(lengths.sum())

    def _gather(self, source: Tensor, chosen: Tensor, target: Tensor) -> None:
        """`target[i] = source[chosen[i]]` for `[columns, head_dim]`, in tiles where the dtype changes on the way."""
        if source.dtype == target.dtype:
            torch.index_select(source, 0, chosen, out=target)
            return
        tile = max(1, self.store.bounce_bytes // (source.shape[1] * source.element_size()))
        for start in range(0, chosen.shape[0], tile):
            target[start : start + tile] = source.index_select(0, chosen[start : start + tile])
