"""StreamingLLM while decoding (Xiao et al., ICLR 2024, arXiv 2309.17453): the oldest token behind the sinks goes.

Keys keep their true positions, where the authors turn them by their place in the cache: a text may not go on past the
model's context. Default: 4 sinks.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .base import HeldRow, OneByOne


@dataclass(frozen=True)
class StreamingHold(OneByOne):
    """Nothing is looked at but positions."""

    sinks: int = 4
    interval: int = 1

    def worth(self, rows: list[HeldRow], position: int) -> list[Tensor]:
        """See `base.OneByOne`. A row of nothing but sinks and window gives up its latest sink."""
        places = [row.positions.float() for row in rows]
        return [at.where(row.positions >= self.sinks, 2 * position - at) for at, row in zip(places, rows, strict=True)]
