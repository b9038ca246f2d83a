"""ReST-KV (An et al., ICLR 2026): how much the layer's output would move if a token were taken out of it.

Per query head, `a` is the window's attention averaged exponentially from the oldest to the newest row (0.3 for the new
row), `o = sum a_n v_n`, `s[n] = a_n / (1 - a_n) * ||W_o (o - v_n)||_2`, then an average over neighbours, and the mean
over the query heads of a KV head. The norm comes from the Gram matrix `W_o^T W_o` of a head, so that no projected value
is ever stored, where the authors' code holds heads x tokens x D of them.

The average follows attention that wanders: `t` is by how many positions the best tokens of the newer half of the window
lie behind those of the older half, on average over as many as the budget has room for. Its width is
`max(5, 2 * (|t| // 2000) + 1)`, and its centre lies `|t| // 2000` positions before the token (behind it where t is
negative): scores are carried on the way attention goes. `drift` is the 2,000. The paper's formula for t is not public
in full; which ranks count is ours. The ends are padded with 0, not with the last score.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from ..attention import before_window, empty_scores, window_attention
from ..policies.base import PolicyModel
from ..projection import projections

if TYPE_CHECKING:
    from torch import Tensor

    from ..view import LayerView


@dataclass(frozen=True)
class RestIndicator:
    """The reconstruction error of the output without the token, over a smoothed window. `budget` is in tokens."""

    budget: int
    smoothing: float = 0.3
    pool: int = 5
    drift: int = 2000

    needs: ClassVar[frozenset[str]] = frozenset({"window_queries", "values", "output_projection"})

    @classmethod
    def create(cls, model: PolicyModel, budget: int, *, smoothing: float, pool: int, drift: int) -> RestIndicator:
        return cls(budget, smoothing, pool, drift)

    def score(self, view: LayerView) -> Tensor:
        """fp32 `[kv_heads, n]`, 0 for window columns but for their neighbours' part."""
        assert view.values is not None
        scores = empty_scores(view)
        for head, attention in window_attention(view):
            length = attention.shape[2]
            positions, before = view.positions[head, :length].long(), before_window(view, head)
            steps = self._steps(attention, positions, before, view.window)
            smooth = attention[:, 0]
            for row in range(1, attention.shape[1]):
                smooth = torch.lerp(smooth, attention[:, row], self.smoothing)
            values = view.values[head, :length].float()
            pooled = torch.zeros(length, device=values.device)
            for share, matrix, step in zip(smooth, projections(view, head), steps, strict=True):
                away = share @ values - values
                norm = (away @ (matrix @ matrix.t())).mul_(away).sum(1).clamp_min_(0).sqrt_()
                moved = norm.mul_(share / (1 - share).clamp_min(1e-6)).mul_(before)
                pooled += pool_behind(moved, positions, max(self.pool, 2 * abs(step) + 1), step)
            scores[head, :length] = pooled.div_(view.group)
        return scores

    def _steps(self, attention: Tensor, positions: Tensor, before: Tensor, window: int) -> list[int]:
        """By how many whole `drift`s attention `[group, r, length]` wanders within the window, for each query head."""
        ranks, rows = min(int(before.sum()), max(self.budget - window, 1)), attention.shape[1]
        if not ranks or rows < 2:
            return [0] * attention.shape[0]
        halves = (attention[:, : rows // 2], attention[:, rows // 2 :])
        found = [half.mean(1).masked_fill(~before, -1.0).topk(ranks).indices for half in halves]
        older, newer = (positions[best].double().mean(1) for best in found)
        return [int(wandered / self.drift) for wandered in (newer - older).tolist()]

    def describe(self) -> str:
        return f"smoothing {self.smoothing:g} pool {self.pool}"


def pool_behind(score: Tensor, positions: Tensor, pool: int, shift: int) -> Tensor:
    """The scores within `pool // 2` of the position `shift` before each column's own, added up and divided by `pool`.

    score: fp32 `[n]`. positions: int64 `[n]`, unique, in any order; those that are missing count as 0.
    """
    ordered, order = positions.sort()
    sums = torch.nn.functional.pad(score[order].double().cumsum(0), (1, 0))
    centre = positions - shift
    start = torch.searchsorted(ordered, centre - pool // 2)
    end = torch.searchsorted(ordered, centre + pool // 2, right=True)
    return (sums[end] - sums[start]).clamp_min_(0).div_(pool).float()
