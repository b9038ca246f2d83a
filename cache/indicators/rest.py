"""ReST-KV (An et al., ICLR 2026): how much the layer's output would move if a token were taken out of it.

Per query head, `a` is the window's attention averaged exponentially from the oldest to the newest row (0.3 for the new
row), `o = sum a_n v_n`, `s[n] = a_n / (1 - a_n) * ||W_o (o - v_n)||_2`, then an average over 5 neighbours and the mean
over the query heads of a KV head. The norm comes from the Gram matrix `W_o^T W_o` of a head, so that no projected value
is ever stored, where the authors' code holds heads x tokens x D of them. Their pooling grows and shifts by one step for
each 2,000 positions by which attention wanders in the window; here it does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from ..attention import before_window, empty_scores, window_attention
from ..projection import projections
from ..scores import pool_neighbours

if TYPE_CHECKING:
    from torch import Tensor

    from ..view import LayerView


@dataclass(frozen=True)
class RestIndicator:
    """The reconstruction error of the output without the token, over a smoothed window."""

    smoothing: float = 0.3
    pool: int = 5

    needs: ClassVar[frozenset[str]] = frozenset({"window_queries", "values", "output_projection"})

    def score(self, view: LayerView) -> Tensor:
        """fp32 `[kv_heads, n]`, 0 for window columns but for their neighbours' part."""
        assert view.values is not None
        scores = empty_scores(view)
        for head, attention in window_attention(view):
            length = attention.shape[2]
            smooth = attention[:, 0]
            for row in range(1, attention.shape[1]):
                smooth = torch.lerp(smooth, attention[:, row], self.smoothing)
            values = view.values[head, :length].float()
            moved = torch.zeros(length, device=values.device)
            for share, matrix in zip(smooth, projections(view, head), strict=True):
                away = share @ values - values
                norm = (away @ (matrix @ matrix.t())).mul_(away).sum(1).clamp_min_(0).sqrt_()
                moved += share / (1 - share).clamp_min(1e-6) * norm
            moved = moved.div_(view.group).mul_(before_window(view, head))
            scores[head, :length] = pool_neighbours(moved, view.positions[head, :length], self.pool)
        return scores

    def describe(self) -> str:
        return f"smoothing {self.smoothing:g} pool {self.pool}"
