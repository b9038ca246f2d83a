"""StreamingLLM while decoding (Xiao et al., ICLR 2024, arXiv 2309.17453): the oldest token behind the sinks goes.

Keys keep their true positions, where the authors turn them by their place in the cache: a text may not go on past the
model's context. Default: 4 sinks.
"""

from __future__ import annotations

from dataclasses import dataclass

from .base import HeldRow, OneByOne, lowest


@dataclass(frozen=True)
class StreamingHold(OneByOne):
    """Nothing is looked at but positions."""

    sinks: int = 4

    def losers(self, rows: list[HeldRow], position: int, window: int) -> list[int]:
        """See `base.OneByOne`. A row of nothing but sinks and window gives up its latest sink."""
        ages = [row.positions.float() for row in rows]
        ages = [age.where(row.positions >= self.sinks, 2 * position - age) for age, row in zip(ages, rows, strict=True)]
        return [lowest(age, row.positions, position, window) for age, row in zip(ages, rows, strict=True)]
