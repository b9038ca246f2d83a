"""G-KV (2025, arXiv 2512.00504): a reply is cut back at intervals, and what mattered once is remembered for a while.

Every 128 new tokens, per KV head: the causal attention of the last 16 queries, the largest over the query heads, the
mean over the queries, without the window's columns and divided by its largest; `F = max(0.8 * F before, this)`. `R` is
R-KV's redundancy (`base.redundancy`) without the window, divided by its largest. The window and the best by `mix * F -
(1 - mix) * R` stay. Defaults: mix 0.5, as in the authors' runs (their class has other ones). The window is the
engine's, at least as long as theirs of 16.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import AtIntervals, best, redundancy


@dataclass(frozen=True)
class GKVHold(AtIntervals):
    """`F` lies with the slots; 0 for those that were not judged before."""

    interval: int = 128
    votes: int = 16
    decay: float = 0.8
    mix: float = 0.5
    alike: float = 0.5

    keeps_scores: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"window_queries"})

    @property
    def every(self) -> int:
        return self.interval

    def cut(
        self, keys: Tensor, positions: Tensor, scores: Tensor, queries: Tensor, scale: float, limit: int, window: int
    ) -> tuple[Tensor, Tensor]:
        """See `base.AtIntervals`."""
        last = int(positions.max())
        queries = queries[:, -self.votes :].float()
        at = torch.arange(last + 1 - queries.shape[1], last + 1, device=keys.device)
        logits = queries @ keys.float().t() * scale
        logits.masked_fill_(positions > at[:, None], -math.inf)
        outside = (positions <= last - window).float()
        local = logits.softmax(-1).amax(0).mean(0) * outside
        local /= local.max().clamp_min(1e-30)
        remembered = torch.maximum(self.decay * scores, local) * outside
        twins = redundancy(keys, positions, self.alike) * outside
        twins /= twins.max().clamp_min(1e-30)
        chosen = best(self.mix * remembered - (1 - self.mix) * twins, positions, limit, window)
        return chosen, remembered[chosen]
