"""Launches the kernel of `triton_products`: products of a decode step, with norm, gate and residual in the same pass.

Fixed configurations and no host reads, fit for a CUDA graph. The slow twins are `F.linear` and `fused.add_norm`.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ..models.decoder import Decoder
from . import triton_products as kernels

MOST = 16  # tokens; a library's product is made for more


def takes(decoder: Decoder, tokens: int) -> bool:
    """Whether so many tokens' products are worked here: in half precision. In fp32 (but in Triton's interpreter) they
    are left to the library, whose sums a batch and a sequence alone share."""
    narrow = decoder.compute_dtype.itemsize == 2 or triton.knobs.runtime.interpret
    return tokens <= MOST and bool(narrow) and decoder.dtype == decoder.compute_dtype


def logits(decoder: Decoder, hidden: Tensor) -> Tensor:
    """See `Decoder.logits`, of as few tokens."""
    head, config = decoder.lm_head, decoder.config
    if not isinstance(head, Tensor) or head.dtype != hidden.dtype:
        return decoder.logits(hidden)
    return product(hidden, head, norm=(decoder.norm, config.rms_norm_eps, config.norm_offset)).float()


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: tuple[Tensor, float, float] | None = None,
    gated: bool = False,
    add_to: Tensor | None = None,
) -> Tensor:
    """x @ weight^T + bias, `[n, out]` from x `[n, in]`, rounded once, n up to MOST.

    norm: weight, eps and offset of an RMS norm of x. gated: `weight` is gate on top of up, `[2 * out, in]`, and the
    result silu(gate) * up. add_to: a residual `[n, out]` that is raised by it, in place, and returned.
    """
    tokens, columns = x.shape
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    assert x.is_contiguous()
    assert weight.is_contiguous()
    assert add_to is None or add_to.is_contiguous()
    out = torch.empty(tokens, outputs, dtype=x.dtype, device=x.device) if add_to is None else add_to
    scale, eps, offset = (x, 0.0, 0.0) if norm is None else norm
    alone, wide = tokens == 1, x.dtype.itemsize > 2
    rows = 8 if alone else 32
    kernels.product_kernel[(-(-outputs // rows),)](
        x,
        scale,
        weight,
        weight if bias is None else bias,
        out,
        tokens,
        outputs,
        columns,
        eps,
        offset,
        TOKENS=1 if alone else MOST,
        ROWS=rows,
        BLOCK=(512 if alone else 128 if gated else 256) // (2 if wide else 1),
        NORM=norm is not None,
        GATED=gated,
        BIAS=bias is not None,
        ADD=add_to is not None,
        WIDEN=triton.knobs.runtime.interpret,
        num_warps=4,
        num_stages=4,
    )
    return out
