"""CAKE's code while decoding (Qin et al., ICLR 2025, arXiv 2503.12491): the newest query's attention, pooled.

The average over 5 neighbours, then the mean over the query heads of a KV head; the lowest outside the window goes.
Their code pools in storage order, which after a prefill is an order of scores, and so joins strangers; here neighbours
are those in the text.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..scores import pool_neighbours
from .base import HeldRow, OneByOne


@dataclass(frozen=True)
class CakeHold(OneByOne):
    """Nothing is remembered."""

    pool: int = 5
    interval: int = 1

    def worth(self, rows: list[HeldRow], position: int) -> list[Tensor]:
        """See `base.OneByOne`."""
        return [pool_neighbours(row.weights.mean(0), row.positions, self.pool) for row in rows]
