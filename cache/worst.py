"""The worst case over the window's queries (DefensiveKV, Feng et al., ICLR 2026, arXiv 2510.13334): how much attention
a token gets from the row that wants it most, once rows have been averaged over neighbouring positions.

`M = max over rows and query heads of pooled(a) * sum(a) / sum(pooled(a))`, with `a` a row of the window's attention
before the window and zeros in it: averaging moves mass into the window and over gaps, and each row gets its own back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .attention import Neighbours, before_window, window_attention
from .view import LayerView

TILE_FLOATS = 1 << 18  # of rows of the window that are pooled at a time


@dataclass(frozen=True)
class WorstCase:
    """worst, mean: fp32 `[kv_heads, n]`, the largest pooled row and the mean row, 0 for columns that a head has not;
    `mean` is 0 in the window. moments: dispersion and shift, see `scores.py`, where they came out with these."""

    worst: Tensor
    mean: Tensor
    moments: tuple[float, float] | None = None


def worst_case(view: LayerView, pool: int) -> WorstCase:
    """By the compiled pass where the view has one that fits, else in torch. pool: odd width of the average."""
    if view.window_pass is not None and view.window_pass.fits(view):
        found = view.window_pass.worst(view, pool // 2)
        if found is not None:
            view.memo["moments"] = found.moments
            return found
    return by_torch(view, pool // 2)


def by_torch(view: LayerView, reach: int) -> WorstCase:
    """Anywhere, one KV head's attention at a time. reach: columns that far apart in the text, or nearer, are pooled."""
    worst, mean = (torch.zeros(view.keys.shape[:2], device=view.keys.device) for _ in range(2))
    for head, attention in window_attention(view):
        length = attention.shape[2]
        attention.mul_(before_window(view, head))
        worst[head, :length] = _worst(attention, view.positions[head, :length], reach)
        mean[head, :length] = attention.mean((0, 1))
        del attention  # before the next head's is made
    return WorstCase(worst, mean)


def _worst(rows: Tensor, positions: Tensor, reach: int) -> Tensor:
    """`[length]`: the largest of the pooled rows `[group, r, length]`, each scaled back to its own mass."""
    near = Neighbours(positions, reach)
    worst = torch.zeros(rows.shape[-1], device=rows.device)
    every = rows.flatten(0, 1)
    # a third at a time: in order, summed and masked they take no more than the rows themselves
    size = max(1, min(len(every) // 3, TILE_FLOATS // every.shape[1]))
    for some in torch.split(every, size):
        pooled = near.sums(near.ordered(some))
        mass = some.sum(-1, keepdim=True) / pooled.sum(-1, keepdim=True).clamp_min(1e-30)
        torch.maximum(worst, pooled.mul_(mass).amax(0), out=worst)
    return near.restored(worst)
