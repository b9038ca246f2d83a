"""LAVa's allocation (Shen et al., arXiv 2509.09754): layers whose scores are spread out get more.

`P = entropy(s / sum s) / log N` over the N scores of all heads before the window. With the indicator lava and adaptive
heads this is LAVa. The authors' code takes the entropy over the window's attention scores too; a score that is not
above zero, or infinite, counts as nothing here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from ..view import LayerView


@dataclass(frozen=True)
class LavaAllocation:
    """Entropy of the indicator itself."""

    needs: ClassVar[frozenset[str]] = frozenset()

    def preference(self, view: LayerView, indicator: Tensor) -> float:
        """0 (one token has it all) to 1 (all alike)."""
        parts = []
        for head, length in enumerate(view.columns):
            parts.append(indicator[head, :length][view.positions[head, :length] < view.window_start])
        scores = torch.cat(parts).double()
        scores = torch.where(scores.isfinite() & (scores > 0), scores, 0.0)
        total = float(scores.sum())
        if len(scores) < 2 or not 0 < total < math.inf:
            return 0.0
        share = scores / total
        return float(-torch.special.xlogy(share, share).sum()) / math.log(len(scores))
