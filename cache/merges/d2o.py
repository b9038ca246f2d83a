"""D2O's merging (Wan et al., ICLR 2025, arXiv 2406.13035): an evicted value goes into the kept token whose key is most
similar.

With `u` the largest cosine of the evicted key to a kept one, a token is merged if `u >= similarity`, and then
`v <- (v + sum w v_e) / (1 + sum w)` over all that go to one kept token, `w = max(u, 0) |v_e| / (|v_e| + |v|)`: the
values-only form of NVIDIA kvpress (MergingPress). Default: similarity the mean of u over what leaves the row at once,
as in D2O's first step. The authors' code moves that threshold on from step to step, takes its decision for all heads
together, averages keys of different positions, and multiplies by u without dividing by it, so that values shrink.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.functional import normalize

from .base import Tokens

TILE_FLOATS = 1 << 18  # of similarities at a time
_EPS = 1e-6


@dataclass(frozen=True)
class D2OMerge:
    """A kept value becomes a weighted mean; every cut counts it as one again, whatever it has taken in before."""

    similarity: float | None = None

    needs: ClassVar[frozenset[str]] = frozenset()

    def fold(self, kept: Tokens, gone: Tokens) -> None:
        """Similarities exist a tile at a time."""
        if not len(gone) or not len(kept):
            return
        directions = normalize(kept.keys.float(), dim=-1).t()
        step = max(1, TILE_FLOATS // len(kept))
        found = [(normalize(tile.keys.float(), dim=-1) @ directions).max(-1) for _, tile in gone.tiles(step)]
        likeness = torch.cat([one.values for one in found])
        targets = torch.cat([one.indices for one in found])
        least = likeness.mean() if self.similarity is None else self.similarity
        values = kept.values.float()
        norms = values.norm(dim=-1)
        taken, weights = torch.zeros_like(values), torch.zeros_like(norms)
        for span, tile in gone.tiles(step):
            value, target = tile.values.float(), targets[span]
            norm = value.norm(dim=-1)
            weight = likeness[span].clamp_min(0) * (likeness[span] >= least) * norm / (norm + norms[target] + _EPS)
            taken.index_add_(0, target, value * weight[:, None])
            weights.index_add_(0, target, weight)
        kept.values.copy_((values + taken) / (1 + weights)[:, None])

    def describe(self) -> str:
        return "merge d2o" if self.similarity is None else f"merge d2o {self.similarity:g}"
