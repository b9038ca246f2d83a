"""Attention over packed rows is that over the numbers they stand for, whatever lies behind a row."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba", reason="the compiled step needs the extra cpu")

from cake_infer.engine.kernels import packed_rows
from numba import njit

WEIGHTS = 256  # the longest piece


@njit
def attend(queries, packed, first, count, oldest, top, total, output, weights, shares, lanes, heads, bits):
    packed_rows.attend_packed(
        queries, packed, first, count, oldest, top, total, output, weights, shares, lanes, heads, bits
    )


class Row:
    """A packed row of random numbers, with other slots before and behind it, and what it stands for in float64."""

    def __init__(self, dim: int, bits: int, slots: int, first: int, count: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        each, groups = 8 // bits, dim // 32 if dim % 32 == 0 else 1
        codes = rng.integers(0, 2**bits, (2, slots, dim))
        joined = sum((codes[..., at::each] << (at * bits)) for at in range(each)).astype(np.uint8)
        self.first, self.count, self.dim, self.bits = first, count, dim, bits
        scales = [rng.uniform(0.5, 3.0, shape) / 2**bits for shape in ((slots // 32, dim), (slots, groups))]
        lows = [rng.standard_normal(shape) for shape in ((slots // 32, dim), (slots, groups))]
        key_scale, value_scale = (scale.astype(np.float16) for scale in scales)
        key_low, value_low = (low.astype(np.float16) for low in lows)
        behind = np.r_[0:first, first + count : slots]
        value_scale[behind], value_low[behind] = np.nan, np.nan
        touched = np.unique(np.arange(first, first + count) // 32)
        others = np.setdiff1d(np.arange(slots // 32), touched)
        key_scale[others], key_low[others] = np.nan, np.nan
        self.position = rng.permutation(10 * slots)[:slots].astype(np.int32)
        self.tables = (
            joined[0].copy(),
            joined[1].copy(),
            *(table.view(np.uint16) for table in (key_scale, key_low, value_scale, value_low)),
            self.position,
        )
        row = slice(first, first + count)
        by_slot = np.repeat(key_scale.astype(np.float64), 32, 0), np.repeat(key_low.astype(np.float64), 32, 0)
        self.keys = (codes[0] * by_slot[0] + by_slot[1])[row]
        by_channel = (np.repeat(t.astype(np.float64), dim // groups, 1) for t in (value_scale, value_low))
        scale, low = by_channel
        self.values = (codes[1] * scale + low)[row]

    def attention(self, queries: np.ndarray, oldest: int) -> tuple[np.ndarray, np.ndarray]:
        """The softmax's logarithm of its sum `[heads]` and the weighted values, by the kernel."""
        heads = len(queries)
        top, total, output = np.zeros(heads, np.float32), np.zeros(heads, np.float32), np.zeros_like(queries)
        weights = np.full((heads, WEIGHTS), np.nan, np.float32)
        shares = np.full((packed_rows.share_lines(heads, self.dim), WEIGHTS), np.nan, np.float32)
        tuples = ((0,) * (self.dim // 16), (0,) * heads, (0,) * self.bits)
        attend(queries, self.tables, self.first, self.count, oldest, top, total, output, weights, shares, *tuples)
        with np.errstate(divide="ignore", invalid="ignore"):
            return top + np.log(total), output / total[:, None]


def rendering(row: Row, queries: np.ndarray, oldest: int) -> tuple[np.ndarray, np.ndarray]:
    logits = queries.astype(np.float64) @ row.keys.T
    logits[:, row.position[row.first : row.first + row.count] <= oldest] = -np.inf
    top = logits.max(1, keepdims=True)
    weights = np.exp(logits - top)
    return (top + np.log(weights.sum(1, keepdims=True)))[:, 0], weights @ row.values / weights.sum(1, keepdims=True)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize(("dim", "heads"), [(64, 3), (48, 1), (128, 2)])
def test_attention_is_that_over_the_numbers_that_codes_stand_for(bits, dim, heads):
    for seed, count in enumerate((1, 15, 31, 32, 33, 200, 256)):
        row = Row(dim, bits, 512, 64, count, seed)
        queries = (np.random.default_rng(seed).standard_normal((heads, dim)) / np.sqrt(dim)).astype(np.float32)
        for oldest in (-1, int(np.median(row.position[64 : 64 + count])) - 1):
            wanted, found = rendering(row, queries, oldest), row.attention(queries, oldest)
            np.testing.assert_allclose(found[0], wanted[0], rtol=0, atol=2e-5)
            np.testing.assert_allclose(found[1], wanted[1], rtol=0, atol=2e-5)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_a_piece_of_which_nothing_is_seen_weighs_nothing(bits):
    row = Row(64, bits, 96, 32, 40)
    tuples = ((0,) * 4, (0,) * 3, (0,) * bits)
    top, total, output = np.ones(3, np.float32), np.ones(3, np.float32), np.ones((3, 64), np.float32)
    weights = np.zeros((3, WEIGHTS), np.float32)
    shares = np.zeros((packed_rows.share_lines(3, 64), WEIGHTS), np.float32)
    queries = np.ones((3, 64), np.float32)
    attend(queries, row.tables, 32, 40, int(row.position.max()), top, total, output, weights, shares, *tuples)
    assert np.all(top == -np.inf)
    assert np.all(total == 0)
    assert np.all(output == 0)


def test_a_number_that_is_none_is_not_hidden():
    row = Row(64, 4, 96, 32, 40)
    row.tables[3].view(np.float16)[1, 5] = np.nan
    assert np.isnan(row.attention(np.ones((3, 64), np.float32), -1)[1]).all()
