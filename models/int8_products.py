"""Products of a few tokens with int8 matrices on a CUDA device, without widening them: what a decode step does.

Fixed configurations and no host reads, fit for a CUDA graph.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from . import triton_int8 as kernels
from .products import INT8_TOKENS
from .quantisation import Int8Matrix


def int8_linear(x: Tensor, matrix: Int8Matrix, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """`x @ matrix^T + bias` for x `[n, in]`: `[n, out]` in `dtype`, that of x by default.

    Sums are made in fp32 and rounded once. The matrix is read once for every INT8_TOKENS rows of x: a widened one is
    faster for many more.
    """
    tokens, columns = x.shape
    outputs = matrix.shape[0]
    if tokens > INT8_TOKENS:
        return torch.cat([int8_linear(part, matrix, bias, dtype) for part in torch.split(x, INT8_TOKENS)])
    x = x.contiguous()
    out = torch.empty(tokens, outputs, dtype=dtype or x.dtype, device=x.device)
    arguments = (matrix.data, matrix.factors, matrix.factors if bias is None else bias, out)
    if tokens == 1:
        kernels.matvec_kernel[(-(-outputs // 8),)](
            x, *arguments, outputs, columns, ROWS=8, BLOCK=512, BIAS=bias is not None, num_warps=4, num_stages=4
        )
    elif tokens:
        kernels.few_rows_kernel[(-(-outputs // 32),)](
            x,
            *arguments,
            tokens,
            outputs,
            columns,
            TOKENS=INT8_TOKENS,
            ROWS=32,
            BLOCK=256 if x.dtype.itemsize <= 2 else 64,
            BIAS=bias is not None,
            WIDEN=triton.knobs.runtime.interpret,
            num_warps=4,
            num_stages=4,
        )
    return out
