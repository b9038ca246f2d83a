"""Expected Attention (Devoto et al., 2025, arXiv 2510.00636): what Gaussian queries to come would attend to.

With mean `mu` and covariance `Sigma` of the prompt's queries before rotation, and `R` the mean rotation of the next 512
positions, `z[n] = k_n . R mu / sqrt(D) + k_n . R Sigma R^T k_n / (2 D)`, a softmax over n, the mean over the query
heads of a KV head, and `(s + epsilon) * ||v_n||_2`. Defaults: 4 sinks, which are kept and are not in the moments, 512
positions, epsilon 0, as in kvpress, the authors' code. In a later turn the moments are those of its own tokens; a turn
of a few tokens says little, and its covariance is taken as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from ..attention import empty_scores
from ..rotated import mean_rotation

if TYPE_CHECKING:
    from torch import Tensor

    from ..view import LayerView


@dataclass(frozen=True)
class ExpectedAttentionIndicator:
    """No window: the question need not be in the prompt."""

    sinks: int = 4
    ahead: int = 512
    epsilon: float = 0.0

    needs: ClassVar[frozenset[str]] = frozenset({"query_mean", "query_covariance", "rotation", "values"})

    def score(self, view: LayerView) -> Tensor:
        """fp32 `[kv_heads, n]`, infinite for the sinks."""
        assert view.query_mean is not None
        assert view.query_covariance is not None
        assert view.values is not None
        turn = mean_rotation(view, self.ahead)
        mean = view.query_mean @ turn.t()
        spread = turn @ view.query_covariance @ turn.t()
        scores = empty_scores(view)
        for head, length in enumerate(view.columns):
            keys, values = view.keys[head, :length].float(), view.values[head, :length].float()
            sinks = view.positions[head, :length] < self.sinks
            expected = torch.zeros(length, device=keys.device)
            for query_head in range(head * view.group, (head + 1) * view.group):
                logits = keys @ mean[query_head] * view.scale
                logits += (keys @ spread[query_head]).mul_(keys).sum(1) * (view.scale**2 / 2)
                expected += logits.masked_fill_(sinks, float("-inf")).softmax(0)
            worth = (expected / view.group + self.epsilon) * torch.linalg.vector_norm(values, dim=-1)
            scores[head, :length] = worth.masked_fill_(sinks, float("inf"))
        return scores

    def describe(self) -> str:
        return f"sinks {self.sinks} ahead {self.ahead}"
