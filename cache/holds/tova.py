"""TOVA while decoding (Oren et al., 2024, arXiv 2401.06104): one token goes, for all heads of a layer together.

A token's score is the newest query's attention summed over all query heads. Where heads hold different tokens, each
gives up the one of lowest sum that it holds. The authors protect no window; here the last `--window` tokens stay.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .base import HeldRow, OneByOne


@dataclass(frozen=True)
class TovaHold(OneByOne):
    """Nothing is remembered."""

    interval: int = 1

    def worth(self, rows: list[HeldRow], position: int) -> list[Tensor]:
        """See `base.OneByOne`."""
        held, index = torch.unique(torch.cat([row.positions for row in rows]), return_inverse=True)
        votes = torch.cat([row.weights.sum(0) for row in rows])
        total = torch.zeros(len(held), device=votes.device).index_add_(0, index, votes)
        return [total[part] for part in index.split([len(row.positions) for row in rows])]
