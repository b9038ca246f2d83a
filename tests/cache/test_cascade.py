"""The cascade: exact, within the budget at every layer, never growing, and at the end the same as dealing once."""

from __future__ import annotations

import random

import pytest
from cake_infer.cache.budget import deal_seats
from cake_infer.cache.cascade import Cascade
from cake_infer.errors import BudgetError, OptionError


def test_lengths_after_the_last_layer_are_those_of_dealing_once() -> None:
    rng = random.Random(5)
    for _ in range(500):
        layers, window = rng.randint(1, 8), rng.randint(1, 9)
        budget, tokens = window + rng.choice([0, 1, rng.randint(0, 40)]), rng.choice([1, window, rng.randint(1, 90)])
        preferences = [rng.choice([0.0, rng.lognormvariate(0, 2)]) for _ in range(layers)]
        caps = [max(0, rng.choice([tokens, min(tokens, 20)]) - window) for _ in range(layers)]
        cascade = Cascade(layers, budget, window)
        least = [10**9] * layers
        for layer in range(layers):
            lengths = cascade.add(preferences[layer], caps[layer], tokens)
            assert len(lengths) == layer + 1
            assert sum(lengths) <= budget * layers
            assert all(new <= old for new, old in zip(lengths, least, strict=False))
            assert all(min(window, tokens) <= length <= tokens for length in lengths)
            least[: layer + 1] = lengths
        at_once = deal_seats(preferences, caps, (budget - window) * layers)
        assert lengths == [min(window, tokens) + seats for seats in at_once]
        assert cascade.lengths == lengths
        assert sum(lengths) == layers * min(window, tokens) + min((budget - window) * layers, sum(caps))


@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 15, 16, 17, 31, 32, 33])
def test_short_prompts_against_window_8_and_budget_16(tokens: int) -> None:
    cascade = Cascade(3, 16, 8)
    for preference in (5.0, 0.001, 1.0):
        lengths = cascade.add(preference, tokens - 8, tokens)
    if tokens <= 16:
        assert lengths == [tokens] * 3
    else:
        assert sum(lengths) == 48
        assert all(8 <= length <= tokens for length in lengths)


def test_a_budget_beyond_the_prompt_evicts_nothing() -> None:
    cascade = Cascade(2, 10_000, 8)
    assert cascade.add(1.0, 12, 20) == [20]
    assert cascade.add(0.0, 12, 20) == [20, 20]


@pytest.mark.parametrize(
    ("budget", "expected"), [(8, [8, 8, 8]), (9, [11, 8, 8]), (10, [14, 8, 8]), (40, [40, 40, 40])]
)
def test_a_share_that_rounds_to_nothing_still_leaves_the_window(budget: int, expected: list[int]) -> None:
    cascade = Cascade(3, budget, 8)
    for preference in (1.0, 1e-6, 0.0):
        lengths = cascade.add(preference, 32, 40)
    assert lengths == expected


@pytest.mark.parametrize("budget", [7, 1, 0])
def test_a_budget_below_the_window_is_refused_with_the_minimum(budget: int) -> None:
    with pytest.raises(BudgetError, match="minimum is 8"):
        Cascade(3, budget, 8)


def test_a_sliding_layer_with_a_small_cap_gives_its_surplus_to_the_others() -> None:
    cascade = Cascade(2, 50, 10)
    assert cascade.add(100.0, 16 - 10, 200) == [16]
    assert cascade.add(1.0, 200 - 10, 200) == [16, 10 + 80 - 6]


def test_a_negative_cap_counts_as_none_and_one_beyond_the_rows_as_all_of_them() -> None:
    cascade = Cascade(3, 50, 10)
    assert cascade.add(1.0, -6, 200)[-1] == 10
    assert cascade.add(1.0, 500, 12)[-1] == 12
    assert cascade.add(1.0, 5, 4)[-1] == 4


def test_uniform_allocation_ignores_preferences() -> None:
    uniform, by_preference = Cascade(2, 20, 10, "uniform"), Cascade(2, 20, 10)
    uniform.add(9.0, 90, 100), by_preference.add(9.0, 90, 100)
    assert uniform.add(1.0, 90, 100) == [20, 20]
    assert by_preference.add(1.0, 90, 100) == [28, 12]
    with pytest.raises(OptionError, match="preference, uniform"):
        Cascade(2, 20, 10, "pyramid")


def test_a_refused_layer_changes_nothing() -> None:
    cascade = Cascade(2, 20, 10)
    cascade.add(1.0, 90, 100)
    with pytest.raises(ValueError, match="finite"):
        cascade.add(float("nan"), 90, 100)
    assert cascade.add(1.0, 90, 100) == [20, 20]
