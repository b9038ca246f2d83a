"""What stays of a layer that has been read: the budget is dealt again, and earlier layers shrink.

With a merge the values that leave a row go into those that stay, at every cut: when a layer is read, and again whenever
a later one takes slots from it. So merged values depend on the order of cuts, and are not those of one cut at the end.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from ..cache.arena import Arena
from ..cache.cascade import Cascade, LayerClaim
from ..cache.merges.base import Merge, Tokens
from ..cache.packed_arena import PackedArena
from ..cache.policies.base import LayerScore
from ..cache.row_order import row_order
from ..cache.staged import Staged
from ..cache.view import LayerView


def keep_best(
    arena: Arena,
    staged: Staged,
    view: LayerView,
    scored: LayerScore,
    cascade: Cascade,
    merge: Merge | None = None,
) -> None:
    """Deal the budget again over the layers read so far, shrink the earlier ones, and keep the best of this one."""
    chosen = chosen_from(staged, view, scored)
    *earlier, lengths = deal(staged, view, scored, cascade, chosen)
    for before, shares in enumerate(earlier):
        if merge is not None:
            fold_tails(arena, before, shares, view.window_start, merge)
        arena.shrink(before, shares)
    carried = scored.indicator if scored.carried is None else scored.carried
    order = chosen.order(lengths)
    arena.keep(view.layer, staged, order, lengths, carried)
    if merge is not None:
        fold_evicted(arena, view, staged, order, lengths, carried, merge)


def deal(staged: Staged, view: LayerView, scored: LayerScore, cascade: Cascade, chosen: Chosen) -> list[list[int]]:
    """Add a layer to the cascade; returns the row lengths of all layers read so far, per KV head, this one last."""
    floor = min(view.window, view.total)
    caps = tuple(max(min(length, view.sliding_window or length) - floor, 0) for length in staged.lengths)
    return cascade.add(LayerClaim(floor, caps, scored.preference, scored.curve, chosen.rank))


def chosen_from(staged: Staged, view: LayerView, scored: LayerScore) -> Chosen:
    """The order that a layer's scores give."""
    indicator, order = view.memo.get("order", (None, None))
    whole = order if indicator is scored.indicator else None
    return Chosen(scored, staged, view.total - view.window, min(view.window, view.total), whole)


def fold_tails(arena: Arena, layer: int, lengths: list[int], window_start: int, merge: Merge) -> None:
    """Before a compacted layer is cut to `lengths`: the values behind them go into those before them."""
    for head, length in enumerate(lengths):
        if length < arena.held[layer, head]:
            row = row_tokens(arena, layer, head, window_start)
            merge.fold(row[:length], row[length:])
            put_back(arena, layer, head, row)


def fold_evicted(
    arena: Arena,
    view: LayerView,
    staged: Staged,
    order: Tensor,
    lengths: list[int],
    score: Tensor,
    merge: Merge,
) -> None:
    """After a layer is kept: the values of the staged columns that are not go into its rows."""
    for head, length in enumerate(lengths):
        gone = torch.ones(staged.lengths[head], dtype=torch.bool, device=order.device)
        gone[order[head, :length]] = False
        columns = gone.nonzero()[:, 0]
        tokens = Tokens(staged.keys[head], staged.values[head], staged.position[head], score[head], columns)
        row = row_tokens(arena, view.layer, head, view.window_start)
        merge.fold(row, tokens)
        put_back(arena, view.layer, head, row)


def row_tokens(arena: Arena, layer: int, head: int, window_start: int) -> Tokens:
    """A row as it lies in the arena, or a copy, widened and the window first, where rows are packed; the window's
    scores, which no indicator has to give, are infinite."""
    if isinstance(arena, PackedArena):
        keys, values, positions, score = arena.tokens(layer, head)
    else:
        start = int(arena.offset[layer, head])
        keys, values, positions = arena.row(layer, head)
        score = arena.score[start : start + int(arena.length[layer, head])]
    return Tokens(keys, values, positions, score.masked_fill(positions >= window_start, math.inf))


def put_back(arena: Arena, layer: int, head: int, row: Tokens) -> None:
    """Store the values of `row_tokens` again, where they are a copy."""
    if isinstance(arena, PackedArena):
        arena.put_values(layer, head, row.values)


class Chosen:
    """The order in which a staged layer's columns are kept, made anew only where more are asked for than before.

    whole: that of all columns, where it has been worked already.
    """

    def __init__(
        self, scored: LayerScore, staged: Staged, window_start: int, floor: int, whole: Tensor | None = None
    ) -> None:
        self.indicator, self.worth = scored.indicator, scored.worth
        self.staged, self.window_start, self.floor = staged, window_start, floor
        self._order = whole
        self._asked = [] if whole is None else list(staged.lengths)

    def order(self, lengths: list[int]) -> Tensor:
        """int64 `[kv_heads, >= max(lengths)]`: columns, the most worth keeping first."""
        if self._order is None or any(new > old for new, old in zip(lengths, self._asked, strict=True)):
            staged, self._asked = self.staged, list(lengths)
            self._order = row_order(self.indicator, staged.position, self.window_start, staged.lengths, lengths)
        return self._order

    def rank(self, limit: int) -> list[np.ndarray]:
        """Per head the scores of its best columns before the window, at most `limit`, best first."""
        lengths = [min(length, self.floor + limit) for length in self.staged.lengths]
        order = self.order(lengths)[:, self.floor : max(lengths)].clamp_min(0)
        ranked = (self.indicator if self.worth is None else self.worth).gather(1, order).cpu().numpy()
        rows = [row[: length - self.floor] for row, length in zip(ranked, lengths, strict=True)]
        if self.worth is None or all((row[1:] <= row[:-1]).all() for row in rows):
            return rows
        # what heads are compared by falls in another order than what is kept
        before = self.staged.position < self.window_start
        whole = zip(self.worth, before, self.staged.lengths, strict=True)
        best = [row[:end][keep[:end]].sort(descending=True).values.cpu().numpy() for row, keep, end in whole]
        return [row[: length - self.floor] for row, length in zip(best, lengths, strict=True)]
