"""H2O while decoding (Zhang et al., NeurIPS 2023, arXiv 2306.14048): every slot adds up the attention that it gets.

The mean over the query heads of a KV head is added at each step, and the least sum outside the window goes. After a
prefill by the indicator h2o the sums go on from those of the prompt; after any other they begin at 0, since its scores
are no sums of attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .base import HeldRow, OneByOne, lowest


@dataclass(frozen=True)
class H2OHold(OneByOne):
    """The sums lie with the slots."""

    keeps_scores: ClassVar[bool] = True

    def losers(self, rows: list[HeldRow], position: int, window: int) -> list[int]:
        """See `base.OneByOne`; adds to the scores."""
        for row in rows:
            row.scores.add_(row.weights.mean(0))
        return [lowest(row.scores, row.positions, position, window) for row in rows]
