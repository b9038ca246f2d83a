"""The engine's own rule: a full row gives up the slot that the newest query attends to least, outside the window.

A slot's score is the mean over the query heads of its KV head: TOVA (Oren et al., 2024, arXiv 2401.06104) for each KV
head apart, which is what CAKE's code does while decoding, but for its pooling.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .base import HeldRow, OneByOne


@dataclass(frozen=True)
class AttentionHold(OneByOne):
    """Nothing is remembered. Every runner of a step has this rule in its own form, but for intervals."""

    interval: int = 1

    def worth(self, rows: list[HeldRow], position: int) -> list[Tensor]:
        """See `base.OneByOne`."""
        return [row.weights.mean(0) for row in rows]
