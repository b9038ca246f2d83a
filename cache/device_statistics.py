"""The fast twin of `scores.cake_statistics` on CUDA devices: launches the kernels of `triton_statistics`.

The host waits once for a layer, for two numbers. Beside the result there are a few rows of sums: nothing of the size
`[H, w, S]`.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from . import triton_statistics as kernels
from .transfer import to_device
from .view import LayerView

_PIECES = 64  # of a head's columns in the first pass, at most


def next_power(value: int) -> int:
    """The least power of 2 that is not below `value`."""
    return 1 << max(0, value - 1).bit_length()


def column_scores(view: LayerView, gamma: float) -> tuple[Tensor, Tensor]:
    """fp32 `[kv_heads, n]`: mean and `gamma` times variance of the window's attention to a column, the mean over the
    query heads, 0 in the window and undefined behind a head's columns; float64 `[2]`: dispersion and shift.

    Keys and queries of one dtype are multiplied as they are (exact in fp32), of two in fp32.
    """
    kv_heads, n, head_dim = view.keys.shape
    device, rows = view.keys.device, view.queries.shape[1]
    height = view.group * rows
    queries = view.queries.to(device).contiguous()  # [kv_heads, group, rows, head_dim] by its memory
    at = view.query_positions.to(device)
    lengths = to_device(list(view.columns), device, torch.int32)
    assert view.keys.stride(2) == 1 == view.positions.stride(1)
    wide = max(view.keys.dtype.itemsize, queries.dtype.itemsize) > 2
    widen = queries.dtype != view.keys.dtype or triton.knobs.runtime.interpret
    dim_pad = max(16, next_power(head_dim))
    block = 32 if wide else 64
    blocks = -(-n // block)
    piece_blocks = -(-blocks // _PIECES)
    pieces = -(-blocks // piece_blocks)
    tall = min(32 if wide else 128, max(16, next_power(height)))
    parts = torch.empty(4, pieces, kv_heads, height, dtype=torch.float32, device=device)
    strides = (view.keys.stride(0), view.keys.stride(1), view.positions.stride(0))
    shape = {
        "HEAD_DIM": head_dim,
        "DIM_PAD": dim_pad,
        "BLOCK": block,
        "SLIDING": view.sliding_window is not None,
        "WIDEN": widen,
    }
    kernels.partial_kernel[(pieces, -(-height // tall), kv_heads)](
        queries,
        view.keys,
        view.positions,
        at,
        lengths,
        parts,
        view.scale,
        view.window_start,
        view.sliding_window or 0,
        *strides,
        height,
        rows,
        pieces,
        piece_blocks * block,
        ROWS=tall,
        num_warps=8 if tall == 128 else 4,
        num_stages=2,
        **shape,
    )
    dispersion, lse = _joined(parts)
    score = torch.empty(kv_heads, n, dtype=torch.float32, device=device)
    shift = torch.empty(kv_heads, blocks, dtype=torch.float32, device=device)
    kernels.moments_kernel[(blocks, kv_heads)](
        queries,
        view.keys,
        view.positions,
        at,
        lengths,
        lse,
        score,
        shift,
        view.scale,
        gamma,
        view.window_start,
        view.sliding_window or 0,
        *strides,
        n,
        rows,
        GROUP=view.group,
        ROWS=min(16 if wide else 32, max(16, next_power(rows))),
        num_warps=4,
        **shape,
    )
    return score, torch.stack((dispersion, shift.sum(dtype=torch.float64)))


def _joined(parts: Tensor) -> tuple[Tensor, Tensor]:
    """From the first pass: the dispersion, float64, and the log-sum-exp fp32 `[kv_heads, height]` of every query."""
    top, total, mass, dot = parts.double()  # [pieces, kv_heads, height]
    largest = top.amax(0)
    below = top - largest
    share = below.exp()
    norm = (share * total).sum(0)
    share /= norm
    # lse * sum a - sum a z, with z relative to the row's largest logit: both terms have one sign, nothing cancels.
    dispersion = norm.log() * (share * mass).sum(0) - (share * (dot + below * mass)).sum(0)
    return dispersion.sum(), (largest + norm.log()).float()
