"""What stays of a layer that has been read: the budget is dealt again, and earlier layers shrink."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from ..cache.arena import Arena, Staged
from ..cache.cascade import Cascade, LayerClaim
from ..cache.policies.base import LayerScore
from ..cache.scores import row_order
from ..cache.view import LayerView


def keep_best(arena: Arena, staged: Staged, view: LayerView, scored: LayerScore, cascade: Cascade) -> None:
    """Deal the budget again over the layers read so far, shrink the earlier ones, and keep the best of this one."""
    floor = min(view.window, view.total)
    chosen = Chosen(scored, staged, view.total - view.window, floor)
    caps = tuple(max(min(length, view.sliding_window or length) - floor, 0) for length in staged.lengths)
    *earlier, lengths = cascade.add(LayerClaim(floor, caps, scored.preference, scored.curve, chosen.rank))
    for before, shares in enumerate(earlier):
        arena.shrink(before, shares)
    carried = scored.indicator if scored.carried is None else scored.carried
    arena.keep(view.layer, staged, chosen.order(lengths), lengths, carried)


class Chosen:
    """The order in which a staged layer's columns are kept, made once, for as many as are asked for first."""

    def __init__(self, scored: LayerScore, staged: Staged, window_start: int, floor: int) -> None:
        self.indicator, self.worth = scored.indicator, scored.worth
        self.staged, self.window_start, self.floor = staged, window_start, floor
        self._order: Tensor | None = None

    def order(self, lengths: list[int]) -> Tensor:
        """int64 `[kv_heads, >= max(lengths)]`: columns, the most worth keeping first."""
        if self._order is None:
            staged = self.staged
            self._order = row_order(self.indicator, staged.position, self.window_start, staged.lengths, lengths)
        return self._order

    def rank(self, limit: int) -> list[np.ndarray]:
        """Per head the scores of its best columns before the window, at most `limit`, best first."""
        lengths = [min(length, self.floor + limit) for length in self.staged.lengths]
        if self.worth is not None:  # by which heads are compared, where the indicator is an order only
            before = self.staged.position < self.window_start
            rows = [
                row[:end][keep[:end]] for row, keep, end in zip(self.worth, before, self.staged.lengths, strict=True)
            ]
            best = [row.sort(descending=True).values.cpu().numpy() for row in rows]
            return [row[: length - self.floor] for row, length in zip(best, lengths, strict=True)]
        order = self.order(lengths)[:, self.floor :].clamp_min(0)
        ranked = self.indicator.gather(1, order).cpu().numpy()
        return [row[: length - self.floor] for row, length in zip(ranked, lengths, strict=True)]
