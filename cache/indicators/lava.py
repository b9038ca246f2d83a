"""LAVa's score (Shen et al., arXiv 2509.09754): a bound on how much the layer's output moves if a token is dropped.

`s = max over the group of pool(mean over the window's rows of A) * max_n |v_n|_1`, before the window; the norm is one
number per KV head, so it matters only where heads are compared. Default: max pooling over 7, as in the authors' code.
With the allocation lava and adaptive heads this is LAVa.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..attention import before_window, empty_scores, pool_max, window_attention

if TYPE_CHECKING:
    from torch import Tensor

    from ..view import LayerView


@dataclass(frozen=True)
class LavaIndicator:
    """The window's attention times the largest value of the head."""

    pool: int = 7

    needs: ClassVar[frozenset[str]] = frozenset({"window_queries", "values"})

    def score(self, view: LayerView) -> Tensor:
        """fp32 `[kv_heads, n]`, 0 for window columns."""
        assert view.values is not None, "the indicator asked for them"
        scores = empty_scores(view)
        for head, attention in window_attention(view):
            length, before = view.columns[head], before_window(view, head)
            votes = pool_max(attention.mean(1).mul_(before), view.positions[head, :length], self.pool).amax(0)
            norms = view.values[head, :length].float().abs().sum(-1).mul_(before)
            scores[head, :length] = votes.mul_(norms.amax()).mul_(before)
        return scores
