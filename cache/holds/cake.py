"""CAKE's code while decoding (Qin et al., ICLR 2025, arXiv 2503.12491): the newest query's attention, pooled.

The average over 5 neighbours, then the mean over the query heads of a KV head; the lowest outside the window goes.
Their code pools in storage order, which after a prefill is an order of scores, and so joins strangers; here neighbours
are those in the text.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..scores import pool_neighbours
from .base import HeldRow, OneByOne, lowest


@dataclass(frozen=True)
class CakeHold(OneByOne):
    """Nothing is remembered."""

    pool: int = 5

    def losers(self, rows: list[HeldRow], position: int, window: int) -> list[int]:
        """See `base.OneByOne`."""
        pooled = [pool_neighbours(row.weights.mean(0), row.positions, self.pool) for row in rows]
        return [lowest(votes, row.positions, position, window) for votes, row in zip(pooled, rows, strict=True)]
