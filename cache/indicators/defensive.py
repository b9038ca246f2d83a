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

from ..joined import SharedPositions
from ..policies.base import PolicyModel
from ..projection import value_sizes
from ..transfer import to_device
from ..worst import worst_case

if TYPE_CHECKING:
    from torch import Tensor

    from ..view import LayerView


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
        compared, means, protected = self._parts(view)
        return compared + means.masked_fill(~protected, 0.0)

    def worth(self, view: LayerView, indicator: Tensor) -> Tensor:
        """The score, and for protected tokens the layer's largest: as heads are compared by the authors."""
        return self._parts(view)[0]

    def _parts(self, view: LayerView) -> tuple[Tensor, Tensor, Tensor]:
        """Worked out once for both, each `[kv_heads, n]`: what heads are compared by, mean attention, and what that
        protects."""
        name = f"defensivekv {self}"
        if name not in view.memo:
            view.memo[name] = self._work_out(view)
        found: tuple[Tensor, Tensor, Tensor] = view.memo[name]
        return found

    def _work_out(self, view: LayerView) -> tuple[Tensor, Tensor, Tensor]:
        norms = value_sizes(view, self.norm)
        of_all = _over_heads(view, norms)
        found = worst_case(view, self.pool)
        before = view.positions < view.window_start
        ends = None if view.lengths is None else to_device(list(view.lengths), view.keys.device, torch.int64)[:, None]
        if ends is not None:
            before &= torch.arange(view.keys.shape[1], device=ends.device) < ends
        average = (found.worst * before).sum(1, keepdim=True) / before.sum(1, keepdim=True).clamp_min(1)
        # the ratio first: that of heads that alone hold tokens is exact then, and so are ties between these
        scores = torch.maximum(found.worst, average).mul_(norms / of_all.clamp_min(1e-30))
        if ends is not None:
            scores.masked_fill_(torch.arange(view.keys.shape[1], device=ends.device) >= ends, float("-inf"))
        protected = self._protected(found.mean, view.window)
        return torch.where(protected, _largest(scores), scores), found.mean, protected

    def _protected(self, mean: Tensor, window: int) -> Tensor:
        """bool `[kv_heads, n]`: the tokens of each head that hold the mass of its mean attention `[kv_heads, n]`."""
        protected = torch.zeros(mean.shape, dtype=torch.bool, device=mean.device)
        room = min(max(0, self.budget - window), mean.shape[1])
        if room:
            total = mean.sum(1, keepdim=True)
            best, columns = mean.topk(room, dim=1)
            share = best.cumsum(1) / total.clamp_min(1e-30)
            count = (share < self.mass - (1 - total)).sum(1, keepdim=True)
            protected.scatter_(1, columns, torch.arange(room, device=mean.device) < count)
        return protected

    def describe(self) -> str:
        return f"pool {self.pool} mass {self.mass:g} norm {self.norm}"


def _over_heads(view: LayerView, norms: Tensor) -> Tensor:
    """`[1, n]` or `[kv_heads, n]`: the sum over all heads; those that gave the token up had it too."""
    kv_heads = norms.shape[0]
    if view.lengths is None and bool((view.positions == view.positions[0]).all()):
        return norms.sum(0, keepdim=True)
    shared = SharedPositions.of(view)
    mean = shared.mean([row[:length] for row, length in zip(norms, view.columns, strict=True)])
    return shared.spread(view, mean.mul_(kv_heads))


def _largest(scores: Tensor) -> Tensor:
    """The largest finite score, NaN if there is none."""
    largest = scores.masked_fill(~scores.isfinite(), float("-inf")).max()
    return torch.where(largest.isfinite(), largest, float("nan"))
