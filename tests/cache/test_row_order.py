"""The order of a row is total and the same everywhere: the window, then by score, ties by position."""

from __future__ import annotations

import math
import random

import pytest
import torch
from cake_infer.cache import row_order as module
from cake_infer.cache.row_order import row_order


def plain_order(scores: list[float], positions: list[int], window_start: int) -> list[int]:
    columns = range(len(scores))
    window = sorted((p, c) for c, p in zip(columns, positions, strict=True) if p >= window_start)
    others = sorted((-s, p, c) for c, s, p in zip(columns, scores, positions, strict=True) if p < window_start)
    return [c for _, c in window] + [c for _, _, c in others]


def random_rows(rng: random.Random, heads: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of every kind, with many ties among them; positions unique within a head, in any order."""
    values = [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 3e38, -3e38, 0.25, 0.25000003]
    scores = [[rng.choice([*values, rng.gauss(0, 1)]) for _ in range(n)] for _ in range(heads)]
    positions = [rng.sample(range(5 * n), n) for _ in range(heads)]
    return torch.tensor(scores), torch.tensor(positions, dtype=torch.int32)


def test_the_order_equals_a_plain_sort_for_every_keep() -> None:
    rng = random.Random(4)
    for _ in range(300):
        heads, n = rng.randint(1, 3), rng.randint(1, 30)
        indicator, positions = random_rows(rng, heads, n)
        window_start = rng.choice([0, 2 * n, 5 * n])
        expected = [plain_order(indicator[h].tolist(), positions[h].tolist(), window_start) for h in range(heads)]
        for keep in {1, n // 2, n}:
            found = row_order(indicator, positions, window_start, None, keep)
            assert found.dtype == torch.int64
            assert found.tolist() == [row[:keep] for row in expected]  # a smaller keep is a prefix


def test_heads_with_lengths_and_keeps_of_their_own() -> None:
    rng = random.Random(6)
    for _ in range(100):
        indicator, positions = random_rows(rng, 3, 20)
        lengths = [rng.randint(0, 20) for _ in range(3)]
        keep = [rng.randint(0, length) for length in lengths]
        indicator[0, lengths[0] :] = math.inf  # what is beyond a head's length is never looked at
        indicator[1, lengths[1] :] = math.nan
        found = row_order(indicator, positions, 60, tuple(lengths), keep)
        assert found.shape == (3, max(keep))
        for head in range(3):
            valid = slice(0, lengths[head])
            expected = plain_order(indicator[head, valid].tolist(), positions[head, valid].tolist(), 60)
            assert found[head].tolist() == expected[: keep[head]] + [-1] * (max(keep) - keep[head])


def test_the_order_of_columns_changes_nothing() -> None:
    rng = random.Random(8)
    indicator, positions = random_rows(rng, 1, 40)
    indicator = indicator.round()  # ties everywhere
    expected = positions[0, row_order(indicator, positions, 120, None, 40)[0]]
    for _ in range(20):
        mixed = torch.tensor(rng.sample(range(40), 40))
        order = row_order(indicator[:, mixed], positions[:, mixed], 120, None, 40)
        assert torch.equal(positions[:, mixed][0, order[0]], expected)


def test_the_window_comes_first_even_when_its_scores_are_low() -> None:
    indicator = torch.tensor([[9.0, 0.0, 5.0, -2.0, 7.0]])
    positions = torch.tensor([[0, 4, 1, 3, 2]])
    assert row_order(indicator, positions, 3, None, 4).tolist() == [[3, 1, 0, 4]]


def test_a_tie_goes_to_the_lower_position_also_between_the_two_zeros() -> None:
    positions = torch.tensor([[7, 2, 5]])
    for values in ([0.0, -0.0, 0.0], [-0.0, 0.0, -0.0]):
        assert row_order(torch.tensor([values]), positions, 100, None, 3).tolist() == [[1, 2, 0]]


def test_keeping_more_than_there_is_is_refused() -> None:
    indicator, positions = torch.zeros(2, 5), torch.arange(5).repeat(2, 1)
    for lengths, keep in ((None, 6), ((5, 3), 4), ((5, 3), (5, 4)), (None, (1, 2, 3))):
        with pytest.raises(ValueError, match="cannot keep"):
            row_order(indicator, positions, 5, lengths, keep)


def test_torch_orders_rows_on_a_device_as_numpy_does_on_a_cpu() -> None:
    rng = random.Random(9)
    for _ in range(100):
        heads, n = rng.randint(1, 3), rng.randint(1, 40)
        indicator, positions = random_rows(rng, heads, n)
        valid = [rng.randint(0, n) for _ in range(heads)]
        most, start = rng.randint(0, min(valid)), rng.choice([0, 2 * n, 5 * n])
        on_cpu = module._on_cpu(indicator.numpy(), positions.numpy(), start, valid, most)
        assert torch.equal(on_cpu, module._on_device(indicator, positions, start, valid, most))
