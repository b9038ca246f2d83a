"""Products in matrix tiles are those of the weights with fp32 activations, and no vector's depend on the others."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cake_infer.models.quantisation import quantise

pytest.importorskip("numba", reason="the compiled step needs the extra cpu")

from cake_infer.engine.kernels import digits, matvec, tile_rows, tiles
from cake_infer.engine.kernels.arithmetic import FASTMATH
from numba import njit

pytestmark = pytest.mark.skipif(not tiles.SUPPORTED, reason="this CPU has no matrix tiles, or Linux keeps them back")
ROWS = 53  # three blocks of tiles and five rows behind them
LIKE = {"bfloat16": np.zeros(0, np.uint16), "int8": np.zeros(0, np.int8)}
FORMATS = list(LIKE)


@njit(fastmath=FASTMATH)  # as the step that calls it is: what says nothing of its own takes this from its caller
def multiply(address, factors, begin, end, x, notes, out, like):
    tile_rows.begin_tiles(notes[1], x.shape[0], like)
    matvec.take(x, notes, like)
    matvec.rows_times(address, factors, begin, end, x, notes, out, 0, like)
    tile_rows.end_tiles(like)


@njit
def by_widening(address, end, x, out, like):
    matvec.stored_rows(address, 0, end, x, out, 0, like)


def in_lines(size: int, fill: int) -> np.ndarray:
    memory = np.full(size + 64, fill, np.int8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size]


def activations(columns: int, seed: int) -> np.ndarray:
    """Numbers of very different sizes, as hidden states are."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(columns) * np.exp(2 * rng.standard_normal(columns))).astype(np.float32)


class Matrix:
    """Weights as they are stored, and as the float64 numbers they stand for."""

    def __init__(self, kind: str, columns: int, rows: int = ROWS) -> None:
        drawn = torch.randn(rows, columns, generator=torch.Generator().manual_seed(columns))
        self.kind, self.rows = kind, rows
        if kind == "int8":
            self._held = quantise(drawn, kind)
            self.address, self.factors = self._held.data.data_ptr(), self._held.factors.data_ptr()
            self.wide = self._held.data.double().numpy() * self._held.factors.double().numpy()[:, None]
        else:
            self._held = drawn.bfloat16()
            self.address, self.factors = self._held.data_ptr(), 0
            self.wide = self._held.double().numpy()

    def times(self, x: np.ndarray, begin: int = 0, end: int | None = None) -> np.ndarray:
        """Rows begin..end of some vectors; the memory holds what something longer left: a thread uses one for all."""
        scratch = np.full((len(x), digits.scratch_bytes(2 * 1664)), 77, np.int8)
        notes = (scratch, in_lines(tile_rows.tile_bytes(1664, len(x)), 77))
        out = np.full((len(x), self.rows), np.nan, np.float32)
        end = self.rows if end is None else end
        multiply(self.address, self.factors, begin, end, x, notes, out, LIKE[self.kind])
        return out


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("columns", [16, 32, 48, 64, 80, 128, 576, 592, 1600])
def test_products_are_exact_to_the_rounding_of_fp32(kind, columns):
    matrix, x = Matrix(kind, columns), np.stack([activations(columns, columns + s) for s in range(3)])
    wanted = x.astype(np.float64) @ matrix.wide.T
    size = np.abs(x).astype(np.float64) @ np.abs(matrix.wide).T
    for vectors in (1, 3):
        assert np.all(np.abs(matrix.times(x[:vectors]) - wanted[:vectors]) < 2e-6 * size[:vectors])


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("columns", [576, 592])
@pytest.mark.parametrize("vectors", [2, 15, 16, 17, 33])
def test_a_vector_gets_the_same_bits_alone_and_among_others(kind, columns, vectors):
    matrix, x = Matrix(kind, columns), np.stack([activations(columns, seed) for seed in range(vectors)])
    together = matrix.times(x)
    np.testing.assert_array_equal(together, np.concatenate([matrix.times(one[None]) for one in x]))


@pytest.mark.parametrize("kind", FORMATS)
def test_what_is_not_finite_stays_with_its_own_vector(kind):
    matrix, x = Matrix(kind, 128), np.stack([activations(128, seed) for seed in range(4)])
    clean = matrix.times(x)
    for damage in (np.nan, np.inf, -np.inf):
        broken = x.copy()
        broken[1, 37] = damage
        found = matrix.times(broken)
        assert not np.isfinite(found[1]).any()
        np.testing.assert_array_equal(found[[0, 2, 3]], clean[[0, 2, 3]])


@pytest.mark.parametrize("kind", FORMATS)
def test_a_row_does_not_depend_on_who_works_it(kind):
    matrix, x = Matrix(kind, 576), np.stack([activations(576, seed) for seed in range(3)])
    whole = matrix.times(x)
    for parts in (1, 2, 3, 5):
        shares = [matvec.share(ROWS, part, parts) for part in range(parts)]
        assert [begin for begin, _ in shares[1:]] == [end for _, end in shares[:-1]]
        assert (shares[0][0], shares[-1][1]) == (0, ROWS)
        for begin, end in shares:
            if end > begin:
                np.testing.assert_array_equal(matrix.times(x, begin, end)[:, begin:end], whole[:, begin:end])


@pytest.mark.parametrize("kind", FORMATS)
def test_tiles_and_widened_weights_agree(kind):
    matrix, x = Matrix(kind, 576), activations(576, 1)[None]
    slow = np.zeros((1, ROWS), np.float32)
    by_widening(matrix.address, ROWS, x, slow, LIKE[kind])
    if kind == "int8":
        slow *= matrix._held.factors.numpy().reshape(-1)
    size = np.abs(x).astype(np.float64) @ np.abs(matrix.wide).T
    assert np.all(np.abs(matrix.times(x) - slow) < 4e-6 * size)


@pytest.mark.parametrize("kind", FORMATS)
def test_few_rows_are_worked_without_tiles(kind):
    matrix, x = Matrix(kind, 576, rows=11), np.stack([activations(576, seed) for seed in range(2)])
    wanted = x.astype(np.float64) @ matrix.wide.T
    size = np.abs(x).astype(np.float64) @ np.abs(matrix.wide).T
    assert np.all(np.abs(matrix.times(x) - wanted) < 2e-6 * size)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("size", [1e-20, 1e30])
def test_zeros_give_zeros_and_sizes_do_not_matter(kind, size):
    matrix = Matrix(kind, 128)
    assert np.all(matrix.times(np.zeros((2, 128), np.float32)) == 0)
    x = activations(128, 3)[None] * np.float32(size)
    wanted = x.astype(np.float64) @ matrix.wide.T
    largest = np.abs(x).astype(np.float64) @ np.abs(matrix.wide).T
    assert np.all(np.abs(matrix.times(x) - wanted) < 2e-6 * largest)
