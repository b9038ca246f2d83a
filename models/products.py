"""Products of tokens and weights: in which dtype, and by whom."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .quantisation import Int8Matrix, Matrix

INT8_TOKENS = 16  # as many meet an int8 matrix as it is, on a GPU; for more it is better widened once


def linear(
    x: Tensor, weight: Matrix, bias: Tensor | None, out: Tensor | None, dtype: torch.dtype | None = None
) -> Tensor:
    """x @ weight^T + bias, into `out` where given. An int8 weight takes up to INT8_TOKENS rows of x, gives `dtype`
    (by default that of x), and is not widened."""
    if isinstance(weight, Int8Matrix):
        from .int8_products import int8_linear

        assert out is None
        return int8_linear(x, weight, bias, dtype)
    assert isinstance(weight, Tensor)
    if out is None:
        return F.linear(x, weight, bias)
    return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)


def shape_of(x: Tensor, weight: Matrix) -> tuple[int, int]:
    """The shape of x @ weight^T."""
    return x.shape[0], weight.shape[0]


def product_dtype(stored: torch.dtype, device: torch.device) -> torch.dtype:
    """In what a prefill multiplies: as stored on a GPU, in fp32 on a CPU, but in bf16 where the CPU has matrix
    instructions for it (AMX) and the weights carry no more. Hidden states, norms and rotation stay in fp32 there."""
    if device.type != "cpu":
        return stored if stored.is_floating_point else torch.bfloat16
    narrow = stored in (torch.bfloat16, torch.int8, torch.uint8)
    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    return torch.bfloat16 if narrow and torch.backends.mkldnn.enabled and has_amx() else torch.float32
