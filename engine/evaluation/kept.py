"""What one policy keeps of a full cache: which columns of each row, and how their numbers are stored."""

from __future__ import annotations

import torch
from torch import Tensor

from ...cache.quantise import pack_keys, pack_values, whole_groups, widen_keys, widen_values
from ...cache.saved_rows import SavedRows


class Kept:
    """What one policy keeps of a full cache.

    orders: per layer int64 `[kv_heads, >= length]`, the columns most worth keeping first; columns of a prompt read in
    one piece are positions. lengths: per layer and KV head. bits: in how many what lies outside of the `window` is
    packed, None for as it is. rows: of a policy that changes what it keeps, its own prefill's rows; None where they are
    those of the full cache.
    """

    def __init__(self, bits: int | None = None, window: int = 0) -> None:
        self.bits, self.window = bits, window
        self.rows: SavedRows | None = None
        self.orders: list[Tensor] = []
        self.lengths: list[list[int]] = []
        self.preferences: list[float | tuple[float, ...]] = []
        self._packed: list[list[int]] = []  # per layer and KV head, how many were packed when the layer was read

    def add(self, order: Tensor, lengths: list[list[int]]) -> None:
        """Take a further layer's order, and the lengths of all layers with it."""
        self.orders.append(order)
        self._packed.append(lengths[-1])
        self.lengths = lengths

    @classmethod
    def everything(cls, tokens: int, layers: int, kv_heads: int, bits: int, window: int, device: torch.device) -> Kept:
        """A full cache of so many tokens, packed."""
        kept, inside = cls(bits, window), min(window, tokens)
        order = torch.arange(tokens, device=device).roll(inside).expand(kv_heads, -1)  # the window comes first
        for layer in range(layers):
            kept.add(order, [[tokens] * kv_heads] * (layer + 1))
            kept.preferences.append(1.0)
        return kept

    def numbers(self, layer: int, head: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values `[length, head_dim]` of one row, as they are stored, out of a full cache's row."""
        columns = self.columns(layer, head)
        if self.bits is None:
            return keys.index_select(0, columns), values.index_select(0, columns)
        inside = min(self.window, len(columns))
        whole = min(inside + whole_groups(len(columns) - inside), self._packed[layer][head])
        columns = self.orders[layer][head, :whole]  # a group that was cut later had its scale when it was whole
        kept = keys.index_select(0, columns), values.index_select(0, columns)
        if whole > inside:
            packed = pack_keys(kept[0][inside:], self.bits), pack_values(kept[1][inside:], self.bits)
            widen_keys(kept[0][inside:], *packed[0], self.bits)
            widen_values(kept[1][inside:], *packed[1], self.bits)
        length = self.lengths[layer][head]
        return kept[0][:length], kept[1][:length]

    def columns(self, layer: int, head: int) -> Tensor:
        """int64 `[length]`: the kept columns of one row, the most worth keeping first."""
        return self.orders[layer][head, : self.lengths[layer][head]]

    def own_row(self, layer: int, head: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values `[length, head_dim]` and positions `[length]` out of `rows`."""
        assert self.rows is not None, "its rows are those of the full cache"
        lengths = self.rows.length.reshape(-1)
        number = layer * self.rows.length.shape[1] + head
        start = int(lengths[:number].sum())
        span = slice(start, start + int(lengths[number]))
        return self.rows.keys[span], self.rows.values[span], self.rows.position[span]

    def agrees(self, layer: int) -> bool:
        """Whether the heads of a layer keep equally many."""
        return len(set(self.lengths[layer])) == 1

    @property
    def slots(self) -> int:
        return sum(sum(row) for row in self.lengths)
