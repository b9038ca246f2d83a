"""Which columns a row keeps, best first: one total order, so that a smaller row is a beginning of a larger one."""

from __future__ import annotations

from collections.abc import Sequence

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
    # One integer per column: the score's bits in an order of integers (+ 0 joins the two zeros), then the position.
    bits = (indicator.float() + 0.0).view(torch.int32)
    rank = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).masked_fill_(positions >= window_start, 0x7FFFFFFF).long()
    key = (rank << 32) + (0x7FFFFFFF - positions.long())
    if any(length < n for length in valid):
        columns = torch.arange(n, device=key.device)
        ends = to_device(valid, key.device, torch.int64)[:, None]
        key.masked_fill_(columns >= ends, torch.iinfo(torch.int64).min)
    order = key.topk(max(wanted), dim=1, sorted=True).indices
    if min(wanted) < max(wanted):
        ends = to_device(wanted, key.device, torch.int64)[:, None]
        order.masked_fill_(torch.arange(max(wanted), device=key.device) >= ends, -1)
    return order
