"""CaM (Zhang et al., ICML 2024): an evicted value goes into the kept tokens that follow it in the text.

Each of the next `m` kept tokens gets `p v / m`, with `p = score / mean score of these m`, held within 0 and 1; where
fewer follow, m is their number. Default: m = 32. The authors merge at decode steps, by accumulated attention, and draw
whether a token is merged with probability p; here it is what eviction during a prefill drops, by the scores of the
policy's indicator, and p itself is the weight, which is the mean of the draws and needs no random numbers. Followers
with infinite scores (the window, sinks) are left out of the mean; where there is no other, nothing is merged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from .base import Tokens

TILE = 2048  # evicted tokens at a time


@dataclass(frozen=True)
class CamMerge:
    """Values only; the sum over a row grows as it does in the authors' code, which does not divide."""

    followers: int = 32

    needs: ClassVar[frozenset[str]] = frozenset()

    def fold(self, kept: Tokens, gone: Tokens) -> None:
        """O(evicted x head_dim): what a run of kept tokens gets is a difference of running sums."""
        if not len(gone) or not len(kept):
            return
        order = kept.positions.argsort()
        positions = kept.positions[order]
        scores = kept.scores[order].double()
        finite = scores.isfinite()
        sums = torch.nn.functional.pad(torch.where(finite, scores, 0.0).cumsum(0), (1, 0))
        counts = torch.nn.functional.pad(finite.double().cumsum(0), (1, 0))
        change = torch.zeros(len(kept) + 1, kept.values.shape[1], dtype=torch.float64, device=kept.values.device)
        for _, tile in gone.tiles(TILE):
            start = torch.searchsorted(positions, tile.positions.contiguous(), right=True)
            end = (start + self.followers).clamp_max(len(kept))
            mean = (sums[end] - sums[start]) / (counts[end] - counts[start])  # NaN where nobody has a score
            weight = torch.where(mean > 0, tile.scores.double() / mean, 0.0).clamp(0, 1)
            part = tile.values.double() * (weight / (end - start).clamp_min(1))[:, None]
            change.index_add_(0, start, part).index_add_(0, end, part, alpha=-1)
        added = torch.empty_like(change[1:])
        added[order] = change[:-1].cumsum(0)
        kept.values.copy_(kept.values.double() + added)

    def describe(self) -> str:
        return f"merge cam {self.followers}"
