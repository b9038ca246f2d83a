"""Which columns a row keeps, best first: one total order, so that a smaller row is a beginning of a larger one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .transfer import to_device


def row_order(
    indicator: Tensor,
    positions: Tensor,
    window_start: int,
    lengths: Sequence[int] | None,
    keep: int | Sequence[int],
) -> Tensor:
    """The columns each head keeps, best first: int64 `[kv_heads, max(keep)]`.

    First the window (`position >= window_start`) by position, then score descending, ties by position: one total order,
    so that the answer for a smaller `keep` is a prefix. indicator: fp32 `[kv_heads, n]` without NaN. positions: int
    `[kv_heads, n]`, below 2**31. Only the first `lengths[head]` columns are valid (None: all), and `keep` (for all
    heads, or one number each) must not exceed them: ValueError. Entries past a head's own `keep` are -1.
    """
    kv_heads, n = indicator.shape
    valid = [n] * kv_heads if lengths is None else list(lengths)
    wanted = [keep] * kv_heads if isinstance(keep, int) else list(keep)
    if len(valid) != kv_heads or len(wanted) != kv_heads or any(k > v for k, v in zip(wanted, valid, strict=True)):
        raise ValueError(f"cannot keep {wanted} of {valid} columns in {kv_heads} heads")
    if indicator.device.type == "cpu":
        order = _on_cpu(indicator.float().numpy(), positions.numpy(), window_start, valid, max(wanted))
    else:
        order = _on_device(indicator, positions, window_start, valid, max(wanted))
    if min(wanted) < max(wanted):
        ends = to_device(wanted, order.device, torch.int64)[:, None]
        order.masked_fill_(torch.arange(max(wanted), device=order.device) >= ends, -1)
    return order


def _on_device(indicator: Tensor, positions: Tensor, window_start: int, valid: Sequence[int], most: int) -> Tensor:
    # One integer per column: the score's bits in an order of integers (+ 0 joins the two zeros), then the position.
    bits = (indicator.float() + 0.0).view(torch.int32)
    rank = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).masked_fill_(positions >= window_start, 0x7FFFFFFF).long()
    key = (rank << 32) + (0x7FFFFFFF - positions.long())
    if any(length < key.shape[1] for length in valid):
        columns = torch.arange(key.shape[1], device=key.device)
        ends = to_device(valid, key.device, torch.int64)[:, None]
        key.masked_fill_(columns >= ends, torch.iinfo(torch.int64).min)
    if key.is_cuda and most == key.shape[1]:  # no two of those that are kept are equal
        return key.sort(dim=1, descending=True).indices
    return key.topk(most, dim=1, sorted=True).indices


def _on_cpu(indicator: np.ndarray, positions: np.ndarray, window_start: int, valid: Sequence[int], most: int) -> Tensor:
    """The same integers, turned round: numpy sorts whole rows of them in a third of the time of torch's topk."""
    bits = (indicator + np.float32(0)).view(np.int32)
    bits ^= (bits >> 31) & 0x7FFFFFFF
    bits[positions >= window_start] = 0x7FFFFFFF
    key = ~bits.astype(np.int64) << 32 | positions
    for row, length in zip(key, valid, strict=True):
        row[length:] = np.iinfo(np.int64).max
    if most < key.shape[1] // 2:
        best = np.argpartition(key, most, axis=1)[:, :most]
        order = np.take_along_axis(best, np.argsort(np.take_along_axis(key, best, 1), axis=1), 1)
    else:
        order = np.argsort(key, axis=1)[:, :most]
    return torch.from_numpy(order)
