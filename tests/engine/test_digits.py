"""Products in integer arithmetic are those of the weights with fp32 activations, as exact as fp32 itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cake_infer.models.quantisation import quantise

pytest.importorskip("numba", reason="the compiled step needs the extra cpu")

from cake_infer.engine.kernels import digits, int4, matvec
from numba import njit

pytestmark = pytest.mark.skipif(not digits.SUPPORTED, reason="this CPU has no AVX-512 VNNI")
ROWS = 11  # two blocks of four and three rows behind them
LIKE = {"int8": np.zeros(0, np.int8), "int4": np.zeros(0, np.uint8)}
COLUMNS = [("int8", columns) for columns in (16, 64, 80, 96, 128, 576, 1600)] + [
    ("int4", columns) for columns in (32, 96, 128, 160, 192, 224, 576, 1600)
]


scaled_rows = njit(matvec.scaled_rows)  # where a CPU has matrix tiles, the step takes those


@njit
def int8_by_digits(address, factors, begin, end, x, scratch, out, like):
    for s in range(x.shape[0]):
        digits.take_one(x[s], scratch[s], like)
    scaled_rows(address, factors, begin, end, x, (scratch, scratch), out, 0, like)


@njit
def int4_by_digits(address, factors, begin, end, x, scratch, out, like):
    for s in range(x.shape[0]):
        digits.take_one(x[s], scratch[s], like)
    matvec.rows_times(address, factors, begin, end, x, (scratch, scratch), out, 0, like)


BY_DIGITS = {"int8": int8_by_digits, "int4": int4_by_digits}


@njit
def by_widening(address, factors, end, x, out, like):
    matvec.stored_rows(address, 0, end, x, out, 0, like)


def activations(columns: int, seed: int) -> np.ndarray:
    """Numbers of very different sizes, as hidden states are."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(columns) * np.exp(2 * rng.standard_normal(columns))).astype(np.float32)


def matrix_of(quant: str, columns: int):
    return quantise(torch.randn(ROWS, columns, generator=torch.Generator().manual_seed(columns)), quant)


def product(matrix, x: np.ndarray, quant: str, begin: int = 0, end: int = ROWS) -> np.ndarray:
    """Rows begin..end of one vector or several; the scratch holds what a longer one left: a thread uses one for all."""
    x = np.atleast_2d(x)
    scratch = np.full((len(x), digits.scratch_bytes(1664)), 77, np.int8)
    out = np.full((len(x), ROWS), np.nan, np.float32)
    BY_DIGITS[quant](matrix.data.data_ptr(), matrix.factors.data_ptr(), begin, end, x, scratch, out, LIKE[quant])
    return out.squeeze(0) if len(x) == 1 else out


def exact(matrix, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The products in float64, and the size of what is summed: an int4 weight is a sum of two numbers itself."""
    wide, x = matrix.rows(torch.arange(ROWS)).double().numpy(), x.astype(np.float64)
    lows = 0 if matrix.dtype == torch.int8 else matrix.factors[..., 1].double().abs().repeat_interleave(32, 1).numpy()
    return wide @ x, (np.abs(wide) + 2 * lows) @ np.abs(x)


@pytest.mark.parametrize(("quant", "columns"), COLUMNS)
def test_products_are_exact_to_the_rounding_of_fp32(quant, columns):
    matrix, x = matrix_of(quant, columns), activations(columns, columns)
    wanted, size = exact(matrix, x)
    assert np.all(np.abs(product(matrix, x, quant) - wanted) < 2e-6 * size)


@pytest.mark.parametrize(("quant", "columns"), [("int8", 576), ("int4", 576), ("int4", 160)])
def test_integers_and_widened_weights_agree(quant, columns):
    matrix, x = matrix_of(quant, columns), activations(columns, 1)
    slow = np.zeros((1, ROWS), np.float32)
    if quant == "int8":
        by_widening(matrix.data.data_ptr(), 0, ROWS, x[None], slow, LIKE[quant])
        slow *= matrix.factors.numpy()
    else:
        int4.widened_rows(matrix.data.data_ptr(), matrix.factors.data_ptr(), 0, ROWS, x[None], slow, 0)
    assert np.all(np.abs(product(matrix, x, quant) - slow) < 4e-6 * exact(matrix, x)[1])


@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_a_row_does_not_depend_on_who_works_it(quant):
    matrix, x = matrix_of(quant, 576), activations(576, 2)
    whole = product(matrix, x, quant)
    parts = np.concatenate([product(matrix, x, quant, 0, 4)[:4], product(matrix, x, quant, 4, ROWS)[4:]])
    np.testing.assert_array_equal(whole, parts)


@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_vectors_that_meet_a_block_together_do_not_touch_each_other(quant):
    matrix, x = matrix_of(quant, 576), np.stack([activations(576, seed) for seed in range(3)])
    np.testing.assert_array_equal(product(matrix, x, quant), [product(matrix, one, quant) for one in x])


@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_zeros_give_zeros_and_tiny_numbers_do_not_vanish(quant):
    matrix = matrix_of(quant, 128)
    assert np.all(product(matrix, np.zeros(128, np.float32), quant) == 0)
    tiny = activations(128, 3) * np.float32(1e-20)
    wanted, size = exact(matrix, tiny)
    assert np.all(np.abs(product(matrix, tiny, quant) - wanted) < 2e-6 * size)


@pytest.mark.parametrize("quant", ["int8", "int4"])
@pytest.mark.parametrize("damage", [np.nan, np.inf, -np.inf])
def test_damage_is_not_hidden(quant, damage):
    x = activations(128, 4)
    x[37] = damage
    assert not np.isfinite(product(matrix_of(quant, 128), x, quant)).any()
