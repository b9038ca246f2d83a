"""DefensiveKV (Feng et al., ICLR 2026, arXiv 2510.13334): the worst case over queries, not their mean.

Each of the window's rows before the window is averaged over 5 neighbours and scaled back to its own mass; `M` is the
largest over rows and over the query heads of a KV head; `D = max(M, mean of M)`; `s = D * ||W_o v||_1 / sum over KV
heads of that norm`. First come the tokens that hold up to `mass` (0.9) of the mean attention with the window's own
part, at most as many as the budget has room for, and the token that crosses it is not among them. Defaults: pool 5,
norm l1. Their code means to count the window's mass but sums the columns in front of it, because the window is cut off
before; here it is the window's. They cut heads of a layer together without a floor: `--heads` chooses that. Of a token
that some heads gave up in an earlier turn or piece the sum is taken to be that of as many heads with the mean of the
others: by what is left alone, the fewer heads still had an old token, the more each of them would hold on to it. Norm
l2 is the length of a projected value, which `D x D` matrices give without projecting it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from ..attention import Neighbours, before_window, empty_scores, window_attention
from ..joined import SharedPositions
from ..policies.base import PolicyModel
from ..projection import projected_lengths, projected_norms

if TYPE_CHECKING:
    from torch import Tensor

    from ..view import LayerView

TILE_FLOATS = 1 << 18  # of rows of the window that are pooled at a time


@dataclass(frozen=True)
class DefensiveIndicator:
    """`budget` is in tokens: it limits how many tokens attention alone protects."""

    budget: int
    pool: int = 5
    mass: float = 0.9
    norm: str = "l1"

    needs: ClassVar[frozenset[str]] = frozenset({"window_queries", "values", "output_projection"})

    @classmethod
    def create(cls, model: PolicyModel, budget: int, *, pool: int, mass: float, norm: str) -> DefensiveIndicator:
        return cls(budget, pool, mass, norm)

    def score(self, view: LayerView) -> Tensor:
        """fp32 `[kv_heads, n]`: the score, and for protected tokens the layer's largest plus their mean attention."""
        scores, means, protected = self._parts(view)
        return torch.where(protected, _largest(scores) + means, scores)

    def worth(self, view: LayerView, indicator: Tensor) -> Tensor:
        """The score, and for protected tokens the layer's largest: as heads are compared by the authors."""
        scores, _, protected = self._parts(view)
        return torch.where(protected, _largest(scores), scores)

    def _parts(self, view: LayerView) -> tuple[Tensor, Tensor, Tensor]:
        """Worked out once for both, each `[kv_heads, n]`: scores, mean attention, and what that protects."""
        name = f"defensivekv {self}"
        if name not in view.memo:
            view.memo[name] = self._work_out(view)
        found: tuple[Tensor, Tensor, Tensor] = view.memo[name]
        return found

    def _work_out(self, view: LayerView) -> tuple[Tensor, Tensor, Tensor]:
        scores, means = empty_scores(view), torch.zeros(view.keys.shape[:2], device=view.keys.device)
        protected = torch.zeros(view.keys.shape[:2], dtype=torch.bool, device=view.keys.device)
        measure = projected_lengths if self.norm == "l2" else projected_norms
        norms = [measure(view, head) for head in range(view.keys.shape[0])]
        shared = SharedPositions.of(view)
        of_all = shared.mean(norms).mul_(len(norms))  # that of all heads: those that gave the token up had it too
        for head, attention in window_attention(view):
            length = attention.shape[2]
            before = before_window(view, head)
            attention.mul_(before)
            worst = self._worst(attention, view.positions[head, :length])
            counted = worst[before]
            if len(counted):
                worst = worst.clamp_min(float(counted.mean()))
            scores[head, :length] = worst * norms[head] / of_all[shared.inverse[head]].clamp_min(1e-30)
            mean = attention.mean((0, 1))
            del attention  # before the next head's is made
            window_mass = 1 - float(mean.sum())
            means[head, :length] = mean
            protected[head, self._protected(mean, window_mass, view.window)] = True
        return scores, means, protected

    def _worst(self, rows: Tensor, positions: Tensor) -> Tensor:
        """`[length]`: the largest of the pooled rows `[group, r, length]`, each scaled back to its own mass."""
        near = Neighbours(positions, self.pool // 2)
        worst = torch.zeros(rows.shape[-1], device=rows.device)
        every = rows.flatten(0, 1)
        # a third at a time: in order, summed and masked they take no more than the rows themselves
        size = max(1, min(len(every) // 3, TILE_FLOATS // every.shape[1]))
        for some in torch.split(every, size):
            pooled = near.sums(near.ordered(some))
            mass = some.sum(-1, keepdim=True) / pooled.sum(-1, keepdim=True).clamp_min(1e-30)
            torch.maximum(worst, pooled.mul_(mass).amax(0), out=worst)
        return near.restored(worst)

    def _protected(self, mean: Tensor, window_mass: float, window: int) -> Tensor:
        """Indices of the tokens that hold the mass."""
        ordered, order = mean.sort(descending=True)
        share = ordered.cumsum(0) / ordered.sum().clamp_min(1e-30)
        count = int((share < self.mass - window_mass).sum())
        return order[: min(count, max(0, self.budget - window))]

    def describe(self) -> str:
        return f"pool {self.pool} mass {self.mass:g} norm {self.norm}"


def _largest(scores: Tensor) -> Tensor:
    """The largest finite score, NaN if there is none."""
    finite = scores[scores.isfinite()]
    return finite.max() if len(finite) else torch.full((), float("nan"), device=scores.device)
