"""SnapKV (Li et al., NeurIPS 2024, arXiv 2404.14469): the last queries of the prompt vote.

`s = pool(sum over the window's rows of A)` over the columns before the window, mean over the query heads of a KV head.
Defaults: window 32, max pooling over 7 (the authors' LongBench setting; their class has 5 and the average). Their code
repeats keys and keeps them per query head; here a KV head keeps one set, as in their later grouped form.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..attention import before_window, empty_scores, pool_max, window_attention
from ..scores import pool_neighbours

if TYPE_CHECKING:
    from torch import Tensor

    from ..view import LayerView


@dataclass(frozen=True)
class SnapKVIndicator:
    """The attention that the window pays to a token and its neighbours."""

    pool: int = 7
    pooling: str = "max"

    needs: ClassVar[frozenset[str]] = frozenset({"window_queries"})

    def score(self, view: LayerView) -> Tensor:
        """fp32 `[kv_heads, n]`, 0 for window columns."""
        scores = empty_scores(view)
        for head, attention in window_attention(view):
            votes = attention.sum(1).mul_(before_window(view, head))  # [group, length]
            positions = view.positions[head, : votes.shape[1]]
            if self.pooling == "max":
                scores[head, : votes.shape[1]] = pool_max(votes, positions, self.pool).mean(0)
            else:
                scores[head, : votes.shape[1]] = pool_neighbours(votes.mean(0), positions, self.pool)
        return scores

    def describe(self) -> str:
        return f"{self.pooling} pool {self.pool}"
