"""The cascade: exact, within the budget at every layer, never growing, and at the end the same as dealing once."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from cake_infer.cache.budget import deal_seats
from cake_infer.cache.cascade import Cascade, LayerClaim
from cake_infer.errors import BudgetError, OptionError


class Layers:
    """A cascade over layers with one head, in plain numbers."""

    def __init__(self, num_layers: int, budget: int, window: int) -> None:
        self.cascade, self.window = Cascade(num_layers, 1, budget, window), window

    def add(self, preference: float, cap: int, tokens: int) -> list[int]:
        floor = min(self.window, tokens)
        claim = LayerClaim(floor, (max(0, min(cap, tokens - floor)),), preference)
        return [row[0] for row in self.cascade.add(claim)]


def test_lengths_after_the_last_layer_are_those_of_dealing_once() -> None:
    rng = random.Random(5)
    for _ in range(500):
        layers, window = rng.randint(1, 8), rng.randint(1, 9)
        budget, tokens = window + rng.choice([0, 1, rng.randint(0, 40)]), rng.choice([1, window, rng.randint(1, 90)])
        preferences = [rng.choice([0.0, rng.lognormvariate(0, 2)]) for _ in range(layers)]
        caps = [max(0, rng.choice([tokens, min(tokens, 20)]) - window) for _ in range(layers)]
        cascade = Layers(layers, budget, window)
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
        assert cascade.cascade.lengths == [[length] for length in lengths]
        assert sum(lengths) == layers * min(window, tokens) + min((budget - window) * layers, sum(caps))


@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 15, 16, 17, 31, 32, 33])
def test_short_prompts_against_window_8_and_budget_16(tokens: int) -> None:
    cascade = Layers(3, 16, 8)
    for preference in (5.0, 0.001, 1.0):
        lengths = cascade.add(preference, tokens - 8, tokens)
    if tokens <= 16:
        assert lengths == [tokens] * 3
    else:
        assert sum(lengths) == 48
        assert all(8 <= length <= tokens for length in lengths)


def test_a_budget_beyond_the_prompt_evicts_nothing() -> None:
    cascade = Layers(2, 10_000, 8)
    assert cascade.add(1.0, 12, 20) == [20]
    assert cascade.add(0.0, 12, 20) == [20, 20]


@pytest.mark.parametrize(
    ("budget", "expected"), [(8, [8, 8, 8]), (9, [11, 8, 8]), (10, [14, 8, 8]), (40, [40, 40, 40])]
)
def test_a_share_that_rounds_to_nothing_still_leaves_the_window(budget: int, expected: list[int]) -> None:
    cascade = Layers(3, budget, 8)
    for preference in (1.0, 1e-6, 0.0):
        lengths = cascade.add(preference, 32, 40)
    assert lengths == expected


@pytest.mark.parametrize("budget", [7, 1, 0])
def test_a_budget_below_the_window_is_refused_with_the_minimum(budget: int) -> None:
    with pytest.raises(BudgetError, match="minimum is 8"):
        Cascade(3, 1, budget, 8)


def test_a_sliding_layer_with_a_small_cap_gives_its_surplus_to_the_others() -> None:
    cascade = Layers(2, 50, 10)
    assert cascade.add(100.0, 16 - 10, 200) == [16]
    assert cascade.add(1.0, 200 - 10, 200) == [16, 10 + 80 - 6]


def test_a_refused_layer_changes_nothing() -> None:
    cascade = Layers(2, 20, 10)
    cascade.add(1.0, 90, 100)
    with pytest.raises(ValueError, match="finite"):
        cascade.add(float("nan"), 90, 100)
    assert cascade.add(1.0, 90, 100) == [20, 20]


def test_an_unknown_rule_over_heads_is_refused() -> None:
    with pytest.raises(OptionError, match="equal, adaptive, own"):
        Cascade(2, 2, 20, 10, heads="mine")


# -- heads ---------------------------------------------------------------------------------------------------------


class Simulated:
    """A prompt of random scores: per layer and head what lies beyond the window, in order of worth, ties among them."""

    def __init__(self, rng: random.Random) -> None:
        self.layers, self.heads, self.window = rng.randint(1, 6), rng.randint(1, 4), rng.randint(1, 6)
        self.budget = self.window + rng.choice([0, 1, rng.randint(0, 30)])
        tokens = rng.randint(1, 60)
        ragged = rng.random() < 0.3
        self.weights = [rng.choice([0.0, rng.lognormvariate(0, 1.5)]) for _ in range(self.layers)]
        self.scores = []
        for _ in range(self.layers):
            heads = []
            for _ in range(self.heads):
                count = rng.randint(0, tokens) if ragged else tokens
                spread, ties = rng.uniform(0.2, 3), rng.random() < 0.3
                row = [rng.choice([0.0, 1.0, np.inf]) if ties else rng.lognormvariate(0, spread) for _ in range(count)]
                heads.append(np.sort(np.array(row, np.float32))[::-1])
            self.scores.append(heads)

    def caps(self, layer: int) -> tuple[int, ...]:
        return tuple(len(row) for row in self.scores[layer])

    @property
    def slots(self) -> int:
        return (self.budget - self.window) * self.layers * self.heads

    def claim(self, layer: int, weight: float | tuple[float, ...] | None = None) -> LayerClaim:
        def rank(limit: int) -> list[np.ndarray]:
            return [row[:limit] for row in self.scores[layer]]

        def curve(limit: int) -> np.ndarray:
            size = min(limit, *self.caps(layer))
            return np.mean([row[:size] for row in self.scores[layer]], axis=0, dtype=np.float32)

        chosen = self.weights[layer] if weight is None else weight
        return LayerClaim(self.window, self.caps(layer), chosen, curve, rank)

    def cascaded(self, cascade: Cascade, **claims) -> list[list[int]]:
        before = None
        for layer in range(self.layers):
            lengths = cascade.add(self.claim(layer, **{name: value[layer] for name, value in claims.items()}))
            assert len(lengths) == layer + 1
            assert sum(map(sum, lengths)) <= self.budget * self.layers * self.heads
            for old, new in zip(before or [], lengths, strict=False):
                assert all(n <= o for n, o in zip(new, old, strict=True)), "a row grew"
            before = lengths
        return [[length - self.window for length in row] for row in lengths]


def ada_kv(scores: list[np.ndarray], seats: int, alpha: float) -> list[int]:
    """One layer dealt at once: every head's first `floor(alpha m)`, then single best tokens of all heads."""
    heads, lengths = len(scores), [min(int(alpha * seats), len(row)) for row in scores]
    for _ in range(min(heads * seats, sum(map(len, scores))) - sum(lengths)):
        candidates = [(-scores[h][lengths[h]], h) for h in range(heads) if lengths[h] < len(scores[h])]
        lengths[min(candidates)[1]] += 1
    return lengths


@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.5, 1.0])
def test_adaptive_heads_are_those_of_one_dealing_with_forced_floors(alpha: float) -> None:
    rng = random.Random(7)
    unequal = 0
    for _ in range(150):
        prompt = Simulated(rng)
        cascade = Cascade(prompt.layers, prompt.heads, prompt.budget, prompt.window, heads="adaptive", head_floor=alpha)
        found = prompt.cascaded(cascade)
        caps = [-(-sum(prompt.caps(layer)) // prompt.heads) for layer in range(prompt.layers)]
        shares = deal_seats(prompt.weights, caps, (prompt.budget - prompt.window) * prompt.layers)
        assert found == [ada_kv(prompt.scores[layer], share, alpha) for layer, share in enumerate(shares)]
        whole = [min(prompt.heads * share, sum(prompt.caps(layer))) for layer, share in enumerate(shares)]
        assert [sum(row) for row in found] == whole, "a layer's share is not dealt exactly"
        unequal += any(len(set(row)) > 1 for row in found)
    if alpha < 1:
        assert unequal > 50, "heads did not differ: nothing was tested"


def test_a_shrinking_layer_keeps_a_part_of_what_each_head_had() -> None:
    """The claim behind the cascade, for every number of seats, where the floor falls and where it does not."""
    from cake_infer.cache.shares import AdaptiveHeads

    rng = random.Random(3)
    for _ in range(60):
        prompt = Simulated(rng)
        alpha, scores = rng.choice([0.0, 0.2, 0.37, 0.5, 0.9, 1.0]), prompt.scores[0]
        most = max(map(len, scores))
        heads = AdaptiveHeads(scores, [len(row) for row in scores], alpha)
        lengths = [heads.lengths(seats) for seats in range(most, -1, -1)]
        assert lengths == [ada_kv(scores, seats, alpha) for seats in range(most, -1, -1)]
        assert all(small <= large for a, b in pairwise(lengths) for small, large in zip(b, a, strict=True))


def test_global_sharing_keeps_the_best_scores_of_all_rows() -> None:
    rng = random.Random(11)
    for _ in range(150):
        prompt = Simulated(rng)
        cascade = Cascade(prompt.layers, prompt.heads, prompt.budget, prompt.window, scored=True, heads="own")
        found = prompt.cascaded(cascade)
        entries = [
            (-score, layer, head)
            for layer, rows in enumerate(prompt.scores)
            for head, row in enumerate(rows)
            for score in row.tolist()
        ]
        expected = [[0] * prompt.heads for _ in range(prompt.layers)]
        for _, layer, head in sorted(entries)[: prompt.slots]:
            expected[layer][head] += 1
        assert found == expected


def test_composite_ranks_share_by_the_mean_score_of_each_rank() -> None:
    rng = random.Random(13)
    for _ in range(150):
        prompt = Simulated(rng)
        if len({len(row) for rows in prompt.scores for row in rows}) > 1:
            continue
        cascade = Cascade(prompt.layers, prompt.heads, prompt.budget, prompt.window, scored=True)
        found = prompt.cascaded(cascade)
        means = [(-np.mean(rows, axis=0, dtype=np.float32)).tolist() for rows in prompt.scores]
        entries = sorted((value, layer) for layer, row in enumerate(means) for value in row)
        expected = [0] * prompt.layers
        for _, layer in entries[: (prompt.budget - prompt.window) * prompt.layers]:
            expected[layer] += 1
        assert found == [[n] * prompt.heads for n in expected]


def test_rows_with_weights_of_their_own_are_dealt_to_as_layers_are() -> None:
    rng = random.Random(17)
    for _ in range(150):
        prompt = Simulated(rng)
        cascade = Cascade(prompt.layers, prompt.heads, prompt.budget, prompt.window, heads="own")
        table = [tuple(rng.choice([0.0, rng.random()]) for _ in range(prompt.heads)) for _ in range(prompt.layers)]
        found = prompt.cascaded(cascade, weight=table)
        rows = [(layer, head) for layer in range(prompt.layers) for head in range(prompt.heads)]
        caps = [prompt.caps(layer)[head] for layer, head in rows]
        expected = deal_seats([table[layer][head] for layer, head in rows], caps, prompt.slots)
        assert [n for row in found for n in row] == expected


@pytest.mark.parametrize("heads", ["equal", "adaptive"])
def test_an_allocation_that_waits_keeps_everything_until_the_last_layer(heads: str) -> None:
    rng = random.Random(19)
    for _ in range(60):
        prompt = Simulated(rng)

        def settle(weights: list[float]) -> list[float]:
            return [weight * (1 + index) for index, weight in enumerate(weights)]

        late = Cascade(prompt.layers, prompt.heads, prompt.budget, prompt.window, heads=heads, settle=settle)
        for layer in range(prompt.layers - 1):
            whole = [[prompt.window + cap for cap in prompt.caps(earlier)] for earlier in range(layer + 1)]
            assert late.add(prompt.claim(layer)) == whole
        found = late.add(prompt.claim(prompt.layers - 1))
        at_once = Cascade(prompt.layers, prompt.heads, prompt.budget, prompt.window, heads=heads)
        for layer, weight in enumerate(settle(prompt.weights)):
            expected = at_once.add(prompt.claim(layer, weight))
        assert found == expected


def test_a_score_that_is_not_a_number_is_refused_and_changes_nothing() -> None:
    cascade = Cascade(2, 1, 12, 10, scored=True, heads="own")
    bad, good = np.array([np.nan], np.float32), np.array([2.0, 1.0], np.float32)
    with pytest.raises(ValueError, match="not a number"):
        cascade.add(LayerClaim(10, (1,), rank=lambda limit: [bad]))
    assert cascade.add(LayerClaim(10, (2,), rank=lambda limit: [good])) == [[12]]
