"""Confidence intervals by resampling prompts, and paired differences. numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

RESAMPLES = 10_000
LEVEL = 0.95
FEWEST = 6  # with 5 prompts even differences that all have one sign happen by chance more often than once in 20
_AT_ONCE = 1 << 22  # drawn values held together


@dataclass(frozen=True)
class Interval:
    """A mean over `count` prompts and the percentile interval of its bootstrap distribution.

    below: the share of resamples whose mean is below 0, ties counted half (for differences).
    """

    mean: float
    low: float
    high: float
    count: int
    below: float

    @property
    def significant(self) -> bool:
        """Whether the interval leaves out 0, over enough prompts to say so."""
        return self.count >= FEWEST and (self.low > 0 or self.high < 0)


def bootstrap(
    values: Sequence[float], *, resamples: int = RESAMPLES, level: float = LEVEL, seed: int = 0
) -> Interval | None:
    """The percentile bootstrap of the mean (Efron 1979); None for no values."""
    import numpy as np  # so that help needs none of it

    data = np.asarray(values, dtype=np.float64)
    if not len(data):
        return None
    generator = np.random.default_rng(seed)
    means = []
    rows = max(1, _AT_ONCE // len(data))
    for start in range(0, resamples, rows):
        drawn = generator.integers(0, len(data), (min(rows, resamples - start), len(data)))
        means.append(data[drawn].mean(1))
    all_means = np.concatenate(means)
    low, high = np.quantile(all_means, [(1 - level) / 2, (1 + level) / 2])
    below = float((all_means < 0).mean() + (all_means == 0).mean() / 2)
    return Interval(float(data.mean()), float(low), float(high), len(data), below)


def paired(values: Sequence[float], baseline: Sequence[float], **options: int | float) -> Interval | None:
    """The bootstrap of `values - baseline`, prompt by prompt: both in the same order."""
    differences = [one - other for one, other in zip(values, baseline, strict=True)]
    return bootstrap(differences, **options)  # type: ignore[arg-type]
