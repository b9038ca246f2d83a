"""The window's attention over a layer, one KV head at a time, and pooling by position."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .view import LayerView


def window_attention(view: LayerView) -> Iterator[tuple[int, Tensor]]:
    """For each KV head its index and `softmax(q k^T * scale)`, fp32 `[group, r, length]`, of the window's queries.

    By position: causal, and inside a sliding window. One head's array exists at a time, twice for a moment.
    """
    kv_heads, _, head_dim = view.keys.shape
    queries = view.queries.to(view.keys.device, torch.float32).mul(view.scale)
    queries = queries.reshape(kv_heads, view.group, -1, head_dim)
    at = view.query_positions.to(view.keys.device)[:, None]
    for head, length in enumerate(view.columns):
        logits = queries[head] @ view.keys[head, :length].float().t()
        positions = view.positions[head, :length]
        if view.sliding_window is not None:
            logits.masked_fill_((positions > at) | (positions <= at - view.sliding_window), float("-inf"))
        else:  # all queries see what was there before the first of them
            late = (positions > at.min()).nonzero()[:, 0]
            logits[..., late] = logits[..., late].masked_fill(positions[late] > at, float("-inf"))
        logits = torch.softmax(logits, dim=-1)
        yield head, logits


def before_window(view: LayerView, head: int) -> Tensor:
    """bool `[length]`: the columns of a head that the window does not keep anyway."""
    return view.positions[head, : view.columns[head]] < view.window_start


def empty_scores(view: LayerView) -> Tensor:
    """fp32 `[kv_heads, n]`, -inf everywhere: what a column gets that no head has."""
    return torch.full(view.keys.shape[:2], float("-inf"), device=view.keys.device)


def pool_max(score: Tensor, positions: Tensor, pool: int) -> Tensor:
    """The largest score within `pool // 2` positions of each column.

    score: fp32 `[..., n]`, not negative. positions: int `[n]`, unique, in any order.
    """
    order = positions.argsort()
    ordered, near = score[..., order], positions[order]
    pooled = ordered.clone()
    for offset in range(1, min(pool // 2, len(near) - 1) + 1):
        gap = near[offset:] - near[:-offset] > pool // 2
        before, after = ordered[..., :-offset].masked_fill(gap, 0), ordered[..., offset:].masked_fill(gap, 0)
        pooled[..., offset:] = torch.maximum(pooled[..., offset:], before)
        pooled[..., :-offset] = torch.maximum(pooled[..., :-offset], after)
    return torch.empty_like(pooled).index_copy_(-1, order, pooled)


class Neighbours:
    """Columns in the order of their positions, int `[n]`, unique, in any order, and which of them are `reach` apart or
    nearer. Worked out once for all rows that have these positions."""

    def __init__(self, positions: Tensor, reach: int) -> None:
        order = positions.argsort()
        near = positions[order]
        self._order = None if torch.equal(near, positions) else order
        apart = [near[offset:] - near[:-offset] > reach for offset in range(1, min(reach, len(near) - 1) + 1)]
        self._gaps = [gap if gap.any() else None for gap in apart]

    def ordered(self, rows: Tensor) -> Tensor:
        """fp32 `[..., n]` with its columns in order; the same tensor where they are."""
        return rows if self._order is None else rows[..., self._order]

    def sums(self, ordered: Tensor) -> Tensor:
        """The sum over each column and its neighbours, in order: fp32 `[..., n]`."""
        sums = ordered.clone()
        for offset, gap in enumerate(self._gaps, 1):
            before, after = ordered[..., :-offset], ordered[..., offset:]
            sums[..., offset:] += before if gap is None else before.masked_fill(gap, 0)
            sums[..., :-offset] += after if gap is None else after.masked_fill(gap, 0)
        return sums

    def restored(self, ordered: Tensor) -> Tensor:
        """fp32 `[n]` in the order of the columns again."""
        return ordered if self._order is None else torch.empty_like(ordered).index_copy_(0, self._order, ordered)
