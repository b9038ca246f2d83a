"""Composite ranks (KVCompose, arXiv 2509.05165): layers compete by the mean score of their heads' best, second best,
...

Each head's tokens are sorted by score; the r-th composite token of a layer has the mean of the heads' r-th scores, and
the best composite tokens of all layers win. Every head then keeps its own tokens, equally many in a layer, so this is
the form of a global choice for rows of equal lengths. The paper scores by an extra pass over the text; here any
indicator will do whose scores mean the same in every layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from ..view import LayerView


@dataclass(frozen=True)
class CompositeAllocation:
    """Seats by the scores themselves, rank by rank."""

    needs: ClassVar[frozenset[str]] = frozenset()
    scored: ClassVar[bool] = True

    def curve(self, view: LayerView, indicator: Tensor, limit: int) -> np.ndarray:
        """fp32, falling, at most `limit`: the mean over heads of each rank's score, as far as all heads reach."""
        rows = []
        for head, length in enumerate(view.columns):
            before = view.positions[head, :length] < view.window_start
            rows.append(indicator[head, :length][before])
        reach = min(limit, *(len(row) for row in rows))
        return torch.stack([row.topk(reach).values for row in rows]).double().mean(0).float().cpu().numpy()
