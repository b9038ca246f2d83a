"""DefensiveKV (Feng et al., ICLR 2026, arXiv 2510.13334): the worst case over queries, not their mean.

Each of the window's rows before the window is averaged over 5 neighbours and scaled back to its own mass; `M` is the
largest over rows and over the query heads of a KV head; `D = max(M, mean of M)`; `s = D * ||W_o v||_1 / sum over KV
heads of that norm`. First come the tokens that hold up to `mass` (0.9) of the mean attention with the window's own
part, at most as many as the budget has room for, and the token that crosses it is not among them. Default pool 5. Their
code means to count the window's mass but sums the columns in front of it, because the window is cut off before; here it
is the window's. They cut heads of a layer together without a floor: `--heads` chooses that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from ..attention import before_window, empty_scores, window_attention
from ..joined import SharedPositions
from ..policies.base import PolicyModel
from ..projection import projected_norms
from ..scores import pool_neighbours

if TYPE_CHECKING:
    from torch import Tensor

    from ..view import LayerView


@dataclass(frozen=True)
class DefensiveIndicator:
    """`budget` is in tokens: it limits how many tokens attention alone protects."""

    budget: int
    pool: int = 5
    mass: float = 0.9

    needs: ClassVar[frozenset[str]] = frozenset({"window_queries", "values", "output_projection"})

    @classmethod
    def create(cls, model: PolicyModel, budget: int, *, pool: int, mass: float) -> DefensiveIndicator:
        return cls(budget, pool, mass)

    def score(self, view: LayerView) -> Tensor:
        """fp32 `[kv_heads, n]`: the score, and for protected tokens the layer's largest plus their mean attention."""
        return self._scores(view, ranked=True)

    def worth(self, view: LayerView, indicator: Tensor) -> Tensor:
        """The score, and for protected tokens the layer's largest: as heads are compared by the authors."""
        return self._scores(view, ranked=False)

    def _scores(self, view: LayerView, ranked: bool) -> Tensor:
        scores, means = empty_scores(view), torch.zeros(view.keys.shape[:2], device=view.keys.device)
        protected = torch.zeros(view.keys.shape[:2], dtype=torch.bool, device=view.keys.device)
        norms = [projected_norms(view, head) for head in range(view.keys.shape[0])]
        shared = SharedPositions.of(view)
        of_all = shared.total(norms)  # a token's norm over the heads that hold it
        for head, attention in window_attention(view):
            length = attention.shape[2]
            before = before_window(view, head)
            rows = attention.masked_fill(~before, 0.0)
            worst = self._worst(rows, view.positions[head, :length])
            counted = worst[before]
            if len(counted):
                worst = worst.clamp_min(float(counted.mean()))
            scores[head, :length] = worst * norms[head] / of_all[shared.inverse[head]].clamp_min(1e-30)
            mean = rows.mean((0, 1))
            window_mass = 1 - float(mean.sum())
            means[head, :length] = mean
            protected[head, self._protected(mean, window_mass, view.window)] = True
        largest = scores[scores.isfinite()].max()
        return torch.where(protected, largest + means if ranked else largest, scores)

    def _worst(self, rows: Tensor, positions: Tensor) -> Tensor:
        """`[length]`: the largest of the pooled rows `[group, r, length]`, each scaled back to its own mass."""
        pooled = pool_neighbours(rows, positions.expand(rows.shape), self.pool)
        mass = rows.sum(-1, keepdim=True) / pooled.sum(-1, keepdim=True).clamp_min(1e-30)
        return pooled.mul_(mass).amax((0, 1))

    def _protected(self, mean: Tensor, window_mass: float, window: int) -> Tensor:
        """Indices of the tokens that hold the mass."""
        ordered, order = mean.sort(descending=True)
        share = ordered.cumsum(0) / ordered.sum().clamp_min(1e-30)
        count = int((share < self.mass - window_mass).sum())
        return order[: min(count, max(0, self.budget - window))]

    def describe(self) -> str:
        return f"pool {self.pool} mass {self.mass:g}"
