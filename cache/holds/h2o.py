"""H2O while decoding (Zhang et al., NeurIPS 2023, arXiv 2306.14048): every slot adds up the attention that it gets.

The mean over the query heads of a KV head is added at each step, and the least sum outside the window goes. After a
prefill by the indicator h2o the sums go on from those of the prompt; after any other they begin at 0, since its scores
are no sums of attention. As in the paper `recent` of a row (0.5) are the last tokens, which are not given up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from .base import HeldRow, OneByOne


@dataclass(frozen=True)
class H2OHold(OneByOne):
    """The sums lie with the slots."""

    recent: float = 0.5
    interval: int = 1

    keeps_scores: ClassVar[bool] = True

    def worth(self, rows: list[HeldRow], position: int) -> list[Tensor]:
        """See `base.OneByOne`; adds to the scores."""
        return [
            row.scores.add_(row.weights.mean(0)).masked_fill(
                row.positions > position - int(self.recent * len(row.positions)), float("inf")
            )
            for row in rows
        ]
