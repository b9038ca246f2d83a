"""R-KV (Cai et al., 2025, arXiv 2505.24133): a reply is cut back at intervals, by importance and redundancy.

Every 128 new tokens, per KV head: of the logits of the last 8 queries the largest over the query heads, a softmax over
the columns outside the window, the mean over the queries, the maximum over 7 neighbouring positions: `I`. `R` is the
softmax of each key's mean cosine to the others, the latest of like keys left out. The window and the best by `mix * I -
(1 - mix) * R` stay. Defaults: mix 0.1, as in the authors' README (their code has 0.07). In their code a key without a
like one clears an entry of the first column; here it clears nothing. They cut the prompt too if it is longer than the
budget: here the policy has done that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..attention import pool_max
from .base import AtIntervals, best, redundancy


@dataclass(frozen=True)
class RKVHold(AtIntervals):
    """Nothing is remembered."""

    interval: int = 128
    votes: int = 8
    mix: float = 0.1
    alike: float = 0.5
    pool: int = 7

    needs: ClassVar[frozenset[str]] = frozenset({"window_queries"})

    @property
    def every(self) -> int:
        return self.interval

    def cut(
        self, keys: Tensor, positions: Tensor, scores: Tensor, queries: Tensor, scale: float, limit: int, window: int
    ) -> tuple[Tensor, Tensor]:
        """See `base.AtIntervals`."""
        last = int(positions.max())
        logits = (queries[:, -self.votes :].float() @ keys.float().t() * scale).amax(0)
        inside = positions > last - window
        attention = logits.masked_fill(inside, -math.inf).softmax(-1).nan_to_num(0.0).mean(0)
        importance = pool_max(attention, positions, self.pool)
        twins = redundancy(keys, positions, self.alike)
        chosen = best(self.mix * importance - (1 - self.mix) * twins, positions, limit, window)
        return chosen, scores[chosen]
