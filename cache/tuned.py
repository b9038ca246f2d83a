"""Constants of CAKE that were found for one model, by budget. No torch here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Tuned:
    """What was best at one budget in tokens per layer and KV head; a gamma of None was not looked for."""

    budget: int
    tau1: float
    tau2: float
    gamma: float | None = None


def nearest(rows: Sequence[Tuned], budget: int) -> Tuned | None:
    """The row of the nearest budget in log scale; of two as near, the smaller one. None without rows."""
    return min(rows, key=lambda row: (abs(math.log(row.budget / max(budget, 1))), row.budget), default=None)
