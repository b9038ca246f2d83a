"""CapKV (Yang et al., 2026, arXiv 2604.25975): the rows that carry most of the cache as a channel.

With `q` the mean query before rotation, turned by the mean rotation of the next 512 positions, `w[n] = exp(temperature
* (cos(k_n, q) - max))`, `A = I + sum w[n] v_n v_n^T` and `s[n] = w[n] * v_n^T A^-1 v_n`, mean over the query heads of a
KV head: weighted leverage scores, whose sum is below D. Defaults: temperature 5, 4 sinks kept. Keys and queries are
normalised as in kvpress, the authors' code, where the paper has the plain product; A is factorised by Cholesky, which
is the same number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch.nn.functional import normalize

from ..attention import empty_scores
from ..rotated import mean_rotation

if TYPE_CHECKING:
    from torch import Tensor

    from ..view import LayerView


@dataclass(frozen=True)
class CapKVIndicator:
    """Directions of values that nothing else in the cache carries."""

    temperature: float = 5.0
    sinks: int = 4
    ahead: int = 512

    needs: ClassVar[frozenset[str]] = frozenset({"query_mean", "rotation", "values"})

    def score(self, view: LayerView) -> Tensor:
        """fp32 `[kv_heads, n]`, infinite for the sinks."""
        assert view.query_mean is not None
        assert view.values is not None
        anchor = normalize(view.query_mean @ mean_rotation(view, self.ahead).t(), dim=-1)
        scores = empty_scores(view)
        for head, length in enumerate(view.columns):
            keys = normalize(view.keys[head, :length].float(), dim=-1)
            values = view.values[head, :length].float()
            leverage = torch.zeros(length, device=keys.device)
            for query_head in range(head * view.group, (head + 1) * view.group):
                logits = keys @ anchor[query_head] * self.temperature
                weight = (logits - logits.max()).exp_()
                gram = torch.eye(values.shape[1], device=keys.device) + (values * weight[:, None]).t() @ values
                solved = torch.linalg.solve_triangular(torch.linalg.cholesky_ex(gram).L, values.t(), upper=False)
                leverage += weight * solved.square_().sum(0)
            leverage /= view.group
            scores[head, :length] = leverage.masked_fill_(view.positions[head, :length] < self.sinks, float("inf"))
        return scores

    def describe(self) -> str:
        return f"temperature {self.temperature:g} sinks {self.sinks}"
