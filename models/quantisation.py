"""int8 matrices with one scale per output channel and int4 ones in groups of columns; activations stay as they are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import OptionError

_ROWS = 512  # rows worked at a time: bounds the fp32 copies, which stay in a core's cache
LEVELS = 127  # int8 is symmetric: -127 .. 127, and zero is zero
GROUP = 32  # columns of an int4 row that share a scale and a lowest value


@dataclass(frozen=True, slots=True)
class _Packed:
    """Packed numbers and what they are multiplied with, both contiguous."""

    data: Tensor
    factors: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.factors.nbytes

    def numel(self) -> int:
        return self.shape.numel()

    @property
    def shape(self) -> torch.Size:
        return self.data.shape


@dataclass(frozen=True, slots=True)
class Int8Matrix(_Packed):
    """`matrix[row, column] = data[row, column] * factors[row]`: int8 `[out, in]` and fp32 `[out]`, both contiguous."""

    def widen_into(self, out: Tensor, start: int) -> Tensor:
        stop = start + out.shape[0]
        rows = self.data[start:stop].float()  # in steps of one dtype each, which torch works in vectors
        return out.copy_(rows.mul_(self.factors[start:stop, None]))

    def rows(self, ids: Tensor) -> Tensor:
        return self.data[ids] * self.factors[ids, None]


@dataclass(frozen=True, slots=True)
class Int4Matrix(_Packed):
    """`matrix[row, column] = q * scale + low` with q = 0 .. 15 and a group's own scale and low.

    data: uint8 `[out, in / 2]`; of the 16 bytes of a group, byte j holds column j in its low half and column 16 + j in
    its high half. factors: bf16 `[out, in / 32, 2]`, scale and low. Both contiguous.
    """

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.data.shape[0], 2 * self.data.shape[1]))

    def widen_into(self, out: Tensor, start: int) -> Tensor:
        stop = start + out.shape[0]
        return out.copy_(_int4_values(self.data[start:stop], self.factors[start:stop]))

    def rows(self, ids: Tensor) -> Tensor:
        return _int4_values(self.data[ids], self.factors[ids])


Matrix = Tensor | Int8Matrix | Int4Matrix


def quantise(matrix: Tensor, quant: str) -> Int8Matrix | Int4Matrix:
    """A matrix `[out, in]` as "int8" or "int4". Raises OptionError for an int4 row that has no whole groups."""
    return _as_int8(matrix) if quant == "int8" else _as_int4(matrix)


def _as_int8(matrix: Tensor) -> Int8Matrix:
    """Round each row to the nearest of 255 levels between minus and plus its largest magnitude."""
    data = torch.empty(matrix.shape, dtype=torch.int8, device=matrix.device)
    factors = torch.empty(matrix.shape[0], dtype=torch.float32, device=matrix.device)
    for start in range(0, matrix.shape[0], _ROWS):
        rows = matrix[start : start + _ROWS].float()
        step = rows.abs().amax(dim=1).div_(LEVELS)
        factors[start : start + _ROWS] = step
        step = torch.where(step > 0, step, 1.0)  # a row of zeros stays one
        data[start : start + _ROWS] = (rows / step[:, None]).round_()
    return Int8Matrix(data, factors)


def _as_int4(matrix: Tensor) -> Int4Matrix:
    """Round each group of a row to the nearest of 16 levels between its lowest and highest value (GGML's Q4_1)."""
    out_rows, columns = matrix.shape
    if columns % GROUP:
        raise OptionError(f"int4 needs matrices of whole groups of {GROUP} columns, this model has {columns}: use int8")
    data = torch.empty(out_rows, columns // 2, dtype=torch.uint8, device=matrix.device)
    factors = torch.empty(out_rows, columns // GROUP, 2, dtype=torch.bfloat16, device=matrix.device)
    for start in range(0, out_rows, _ROWS):
        groups = matrix[start : start + _ROWS].float().view(-1, columns // GROUP, GROUP)
        low, high = groups.aminmax(dim=2)
        pair = torch.stack([(high - low) / 15, low], dim=2).bfloat16()
        factors[start : start + _ROWS] = pair
        scale, low = pair.float().unbind(2)
        levels = (groups - low[..., None]).div_(torch.where(scale > 0, scale, 1.0)[..., None])
        levels = levels.round_().clamp_(0, 15).to(torch.uint8)
        halves = levels.view(-1, columns // GROUP, 2, GROUP // 2)
        data[start : start + _ROWS] = (halves[:, :, 0] | (halves[:, :, 1] << 4)).flatten(1)
    return Int4Matrix(data, factors)


def _int4_values(data: Tensor, factors: Tensor) -> Tensor:
    """fp32 `[n, in]` of packed rows `[n, in / 2]`."""
    packed = data.view(data.shape[0], -1, GROUP // 2)
    levels = torch.cat([packed & 15, packed >> 4], dim=2).float()  # [n, groups, 32]
    scale, low = factors.float().unbind(2)
    return levels.mul_(scale[..., None]).add_(low[..., None]).flatten(1)


def widen_into(out: Tensor, matrix: Matrix, start: int = 0) -> Tensor:
    """Write rows `start, start + 1, ...` of a matrix, as many as `out` has, into `out` in its dtype."""
    if isinstance(matrix, Tensor):
        return out.copy_(matrix[start : start + out.shape[0]])
    for first in range(0, out.shape[0], _ROWS):
        matrix.widen_into(out[first : first + _ROWS], start + first)
    return out


def embedded(matrix: Matrix, ids: Tensor) -> Tensor:
    """Rows `ids` int64 `[n]` of an embedding, in its own dtype (fp32 for quantised ones)."""
    return torch.nn.functional.embedding(ids, matrix) if isinstance(matrix, Tensor) else matrix.rows(ids)
