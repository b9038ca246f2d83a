"""int8 matrices with one scale per output channel; activations stay fp32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_ROWS = 1024  # rows quantised at a time: bounds the fp32 copy
LEVELS = 127  # symmetric: -127 .. 127, and zero is zero


@dataclass(frozen=True, slots=True)
class Int8Matrix:
    """`matrix[row, column] = data[row, column] * scale[row]`: int8 `[out, in]` and fp32 `[out]`, both contiguous."""

    data: Tensor
    scale: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scale.nbytes

    def numel(self) -> int:
        return self.data.numel()

    def is_contiguous(self) -> bool:
        return self.data.is_contiguous()

    def data_ptr(self) -> int:
        return self.data.data_ptr()


Matrix = Tensor | Int8Matrix


def quantise(matrix: Tensor) -> Int8Matrix:
    """Round each row of `[out, in]` to the nearest of 255 levels between minus and plus its largest magnitude."""
    data = torch.empty(matrix.shape, dtype=torch.int8, device=matrix.device)
    scale = torch.empty(matrix.shape[0], dtype=torch.float32, device=matrix.device)
    for start in range(0, matrix.shape[0], _ROWS):
        rows = matrix[start : start + _ROWS].float()
        step = rows.abs().amax(dim=1).div_(LEVELS)
        scale[start : start + _ROWS] = step
        step = torch.where(step > 0, step, 1.0)  # a row of zeros stays one
        data[start : start + _ROWS] = rows.div_(step[:, None]).round_()
    return Int8Matrix(data, scale)


def widen_into(out: Tensor, matrix: Matrix, start: int = 0) -> Tensor:
    """Write rows `start, start + 1, ...` of a matrix, as many as `out` has, into `out` in its dtype."""
    stop = start + out.shape[0]
    if isinstance(matrix, Int8Matrix):
        return torch.mul(matrix.data[start:stop], matrix.scale[start:stop, None], out=out)
    return out.copy_(matrix[start:stop])


def embedded(matrix: Matrix, ids: Tensor) -> Tensor:
    """Rows `ids` int64 `[n]` of an embedding, in its own dtype (fp32 for int8)."""
    if isinstance(matrix, Int8Matrix):
        return matrix.data[ids] * matrix.scale[ids, None]
    return torch.nn.functional.embedding(ids, matrix)
