"""Intervals against a plain resampling loop and against what a mean's distribution must be."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from cake_infer.engine.evaluation.bootstrap import bootstrap, paired


def test_the_interval_is_that_of_resampling_by_hand():
    values = [0.31, -0.13, 0.74, 0.22, 0.97, -0.41, 0.053]
    found = bootstrap(values, resamples=400, seed=3)
    generator = np.random.default_rng(3)
    drawn = generator.integers(0, len(values), (400, len(values)))
    means = sorted(statistics.fmean(values[int(i)] for i in row) for row in drawn)
    assert found.mean == pytest.approx(statistics.fmean(values))
    for edge, share in ((found.low, 0.025), (found.high, 0.975)):
        place = share * (len(means) - 1)
        low, high = means[math.floor(place)], means[math.ceil(place)]
        assert edge == pytest.approx(low + (high - low) * (place - math.floor(place)))
    assert found.below == pytest.approx(sum(mean < 0 for mean in means) / 400)
    assert found.count == 7


def test_it_covers_like_a_normal_interval_for_many_values():
    values = np.random.default_rng(0).normal(2.0, 1.0, 400)
    found = bootstrap(values.tolist())
    half = 1.96 * values.std(ddof=1) / 20
    assert found.low == pytest.approx(values.mean() - half, abs=0.012)
    assert found.high == pytest.approx(values.mean() + half, abs=0.012)
    assert found.significant


def test_pairs_see_a_difference_that_two_intervals_hide():
    generator = np.random.default_rng(1)
    base = generator.normal(0.0, 5.0, 60)
    better = base - 0.2 + generator.normal(0.0, 0.1, 60)
    one, other = bootstrap(base.tolist()), bootstrap(better.tolist())
    assert one.low < other.mean < one.high
    difference = paired(better.tolist(), base.tolist())
    assert difference.significant
    assert difference.high < 0
    assert difference.below == 1.0
    assert not paired(base.tolist(), base.tolist()).significant
    assert [bootstrap([1.0, 2.0] * count).significant for count in (1, 2, 3)] == [False, False, True]


def test_one_value_and_none():
    assert bootstrap([]) is None
    single = bootstrap([0.5])
    assert (single.mean, single.low, single.high, single.significant) == (0.5, 0.5, 0.5, False)
    with pytest.raises(ValueError, match="zip"):
        paired([1.0, 2.0], [1.0])
