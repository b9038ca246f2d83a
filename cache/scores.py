"""What the window's attention says about a layer: a score for each token, and how spread and how restless it is.

Source: CAKE (Qin et al., ICLR 2025, arXiv 2503.12491). The formulas are exact; the forms are cheap ones, worked KV head
by KV head and in tiles of columns that stay in a core's cache.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from .row_order import row_order
from .transfer import to_device
from .view import LayerView, is_in_order

# A hidden column's logit. Finite, because 0 * -inf is not a number and a tile may be hidden altogether.
_HIDDEN = -1e30
# Floats in a tile [query_rows, columns]: two of them fit in the second level cache of a core.
_TILE_FLOATS = 1 << 17


@dataclass(frozen=True)
class CakeStatistics:
    """indicator: fp32 `[kv_heads, n]`, +inf for window columns, -inf for invalid ones. One dispersion and shift."""

    indicator: Tensor
    dispersion: float
    shift: float


@dataclass
class _Tile:
    """Columns `start:stop` of one head. hidden: bool `[r, columns]` of what a query cannot see, None if it sees all.

    counted: fp32 `[columns]`, 1 before the window and 0 in it, None if all are before it; `in_window` if none is.
    """

    start: int
    stop: int
    hidden: Tensor | None = None
    counted: Tensor | None = None
    in_window: bool = False


def cake_statistics(view: LayerView, gamma: float, pool: int) -> CakeStatistics:
    """Indicator, dispersion and shift of one layer, with `A = softmax(q k^T * scale)` of the window's queries in fp32.

    dispersion `H = -sum A log A` and shift `V = sum_columns Var_rows(A)` (unbiased, 0 with fewer than two rows) run
    over all query heads and the columns before the window, not renormalised. indicator
    `mean_rows A + gamma * Var_rows A` of those columns, summed over neighbours within `pool // 2` positions and divided
    by `pool` (odd), then the mean over the query heads of a KV head.

    Memory: at most two fp32 arrays `[heads / kv_heads * r, n]`; on a CPU one and a tile. On a CUDA device with Triton
    the kernels of `triton_statistics` do the same with less.
    """
    if view.keys.is_cuda and view.keys.shape[2] <= 256 and importlib.util.find_spec("triton") is not None:
        return device_statistics(view, gamma, pool)
    if view.window_pass is not None and view.window_pass.fits(view):
        scores, dispersion, shift = view.window_pass(view, gamma)
    else:
        scores, dispersion, shift = window_moments(view, gamma)
    indicator = torch.full_like(scores, -math.inf)
    in_order = is_in_order(view)
    for head, length in enumerate(view.columns):
        score, raw, positions = indicator[head, :length], scores[head, :length], view.positions[head, :length]
        if in_order:
            score[: view.window_start] = pool_neighbours(raw[: view.window_start], None, pool)
            score[view.window_start :].fill_(math.inf)
        else:
            score.copy_(pool_neighbours(raw, positions, pool))
            score.masked_fill_(positions >= view.window_start, math.inf)
    return CakeStatistics(indicator, dispersion, shift)


def window_moments(view: LayerView, gamma: float) -> tuple[Tensor, float, float]:
    """Scores before pooling fp32 `[kv_heads, n]`, 0 for window columns; dispersion and shift. In torch, anywhere."""
    kv_heads, n, head_dim = view.keys.shape
    device, rows, step = view.keys.device, view.queries.shape[1], _tile_columns(view)
    queries = view.queries.to(device, torch.float32).mul(view.scale).reshape(kv_heads, -1, head_dim)  # [K, g*r, D]
    attention = torch.empty(queries.shape[1] * n, device=device)
    scratch = torch.empty(queries.shape[1] * min(step, n), device=device)
    scores = torch.zeros(kv_heads, n, device=device)
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # dispersion, shift
    in_order = _tiles_in_order(view, step) if is_in_order(view) else None
    for head, length in enumerate(view.columns):
        tiles = in_order or _tiles_by_position(view, head, step)
        score = scores[head, :length]
        sums += _head_statistics(queries[head], view.keys[head], tiles, rows, gamma, attention, scratch, score)
    dispersion, shift = sums.tolist()
    return scores, dispersion, shift


def device_statistics(view: LayerView, gamma: float, pool: int) -> CakeStatistics:
    """`cake_statistics` by Triton kernels, in any order of columns; the device is waited for once, at the end.

    What is asked of a layer's scores afterwards is worked before that, so that the device need not wait for the host:
    the memo gets their `order` (see `row_order`, of all columns), and `numbers` where they are that.
    """
    from .device_statistics import column_scores

    score, sums = column_scores(view, gamma)
    n, device = score.shape[1], score.device
    positions = view.positions
    ends = None
    if any(length < n for length in view.columns):
        ends = to_device(list(view.columns), device, torch.int64)[:, None]
        absent = torch.arange(n, device=device) >= ends
        positions = positions.masked_fill(absent, torch.iinfo(torch.int32).max)
        score.masked_fill_(absent, 0.0)
    near = None if view.ordered else positions
    indicator = pool_neighbours(score, near, pool).masked_fill_(positions >= view.window_start, math.inf)
    if ends is not None:
        indicator.masked_fill_(absent, -math.inf)
    order = row_order(indicator, view.positions, view.window_start, view.columns, view.columns)
    good = torch.isnan(indicator).logical_not_().all()
    dispersion, shift, numbers = torch.cat([sums, good.double()[None]]).tolist()
    view.memo["order"] = (indicator, order)
    if numbers:
        view.memo["numbers"] = indicator
    return CakeStatistics(indicator, dispersion, shift)


def layer_statistics(view: LayerView, gamma: float | None = None, pool: int = 5) -> CakeStatistics:
    """`cake_statistics`, worked out once for a layer that both indicator and allocation ask about.

    Without `gamma` any pass will do: dispersion and shift do not depend on it.
    """
    known = view.memo.get("cake")
    if known is not None and (gamma is None or known[0] == (gamma, pool)):
        return cast(CakeStatistics, known[1])
    statistics = cake_statistics(view, gamma or 0.0, pool)
    view.memo["cake"] = ((gamma or 0.0, pool), statistics)
    return statistics


def layer_moments(view: LayerView) -> tuple[float, float]:
    """Dispersion and shift alone: what another pass over the window's attention left of them, or `layer_statistics`."""
    known = cast("tuple[float, float] | None", view.memo.get("moments"))
    if known is not None:
        return known
    statistics = layer_statistics(view)
    return statistics.dispersion, statistics.shift


def _tile_columns(view: LayerView) -> int:
    """Columns in a tile. Tiles grow with the threads of a CPU; on other devices few launches matter more."""
    if view.keys.device.type != "cpu":
        return view.keys.shape[1]
    query_rows = view.queries.shape[0] // view.keys.shape[0] * view.queries.shape[1]
    return max(64, _TILE_FLOATS * torch.get_num_threads() // query_rows)


def _hidden(view: LayerView, columns: Tensor) -> Tensor:
    """bool `[r, columns]`: causal, and inside the sliding window, both by position."""
    query_positions = view.query_positions.to(columns.device)[:, None]
    hidden = columns > query_positions
    if view.sliding_window is not None:
        hidden |= columns <= query_positions - view.sliding_window
    return hidden


def _tiles_in_order(view: LayerView, step: int) -> list[_Tile]:
    """Tiles for columns that are positions: only the window and the edge of a sliding window need masks."""
    device, total, rows = view.keys.device, view.total, view.queries.shape[1]
    # With a sliding window: no query sees a column below `first`, and every query sees those from `edge` on.
    reach = total if view.sliding_window is None else view.sliding_window
    first, edge = max(0, total - rows - reach + 1), max(0, total - reach)
    tiles, start = [], min(first, view.window_start)
    while start < total:
        in_window = start >= view.window_start
        tile = _Tile(start, min(start + step, total if in_window else view.window_start), in_window=in_window)
        if in_window or start < edge:
            tile.hidden = _hidden(view, torch.arange(start, tile.stop, device=device))
        tiles.append(tile)
        start = tile.stop
    return tiles


def _tiles_by_position(view: LayerView, head: int, step: int) -> list[_Tile]:
    """Tiles of one head for columns in any order: the slow twin, with masks wherever a tile needs them."""
    tiles = []
    all_see = view.total - view.queries.shape[1]  # the last position that every query sees, up to a sliding window
    for start in range(0, view.columns[head], step):
        tile = _Tile(start, min(start + step, view.columns[head]))
        columns = view.positions[head, start : tile.stop]
        # Looking at the values makes a GPU wait; a CPU saves two passes over most tiles.
        low, high = (0, view.total) if columns.is_cuda else (int(end) for end in torch.aminmax(columns))
        if high > all_see or (view.sliding_window is not None and low < view.total - view.sliding_window):
            tile.hidden = _hidden(view, columns)
        if high >= view.window_start:
            tile.counted = (columns < view.window_start).float()
        tiles.append(tile)
    return tiles


def _head_statistics(
    queries: Tensor,
    keys: Tensor,
    tiles: list[_Tile],
    rows: int,
    gamma: float,
    attention: Tensor,
    scratch: Tensor,
    score: Tensor,
) -> Tensor:
    """One KV head: writes its scores (before pooling, mean over query heads) and returns float64 (dispersion, shift).

    queries: fp32, scaled, `[g*r, D]`. keys: `[n, D]`. attention, scratch: flat work space. score: fp32 `[length]`;
    columns of the window and of no tile get 0.
    """
    height = queries.shape[0]
    weights, tops, totals, masses, dots = [], [], [], [], []
    for tile in tiles:  # softmax relative to the largest logit of the tile; the tiles are joined below
        width = tile.stop - tile.start
        logits = scratch[: height * width].view(height, width)
        torch.mm(queries, keys[tile.start : tile.stop].float().t(), out=logits)
        if tile.hidden is not None:
            logits.view(-1, rows, width).masked_fill_(tile.hidden, _HIDDEN)
        top = logits.amax(1, keepdim=True)
        weight = attention[height * tile.start : height * tile.stop].view(height, width)
        torch.exp(logits.sub_(top), out=weight)
        tops.append(top[:, 0])
        totals.append(weight.sum(1))
        weights.append(weight)
        if tile.in_window:
            masses.append(torch.zeros_like(totals[-1]))
            dots.append(masses[-1])
            continue
        if tile.counted is not None:
            logits.mul_(tile.counted)
        masses.append(totals[-1] if tile.counted is None else weight @ tile.counted)
        dots.append(logits.mul_(weight).sum(1))
    top, total, mass, dot = (torch.stack(parts).double() for parts in (tops, totals, masses, dots))  # [tiles, g*r]
    below = top - top.amax(0)
    share = below.exp()
    norm = (share * total).sum(0)
    share /= norm
    # lse * sum a - sum a z, with z relative to the row's largest logit: both terms have one sign, nothing cancels.
    dispersion = norm.log() * (share * mass).sum(0) - (share * (dot + below * mass)).sum(0)
    sums = torch.zeros(3, height // rows, len(score), device=queries.device)
    for tile, weight, factor in zip(tiles, weights, share.float(), strict=True):
        if not tile.in_window:
            shifted_sums(weight.mul_(factor[:, None]), rows, sums[:, :, tile.start : tile.stop])
    mean, variance = column_moments(sums, rows)
    for tile in tiles:
        if tile.counted is not None:
            variance[:, tile.start : tile.stop] *= tile.counted
            mean[:, tile.start : tile.stop] *= tile.counted
    shift = variance.sum(dtype=torch.float64)
    torch.mean(mean.add_(variance, alpha=gamma), 0, out=score)
    return torch.stack((dispersion.sum(), shift))


def shifted_sums(attention: Tensor, rows: int, sums: Tensor) -> None:
    """Per query head and column, over its `rows` of attention: the first, then the sum of `a - first` and its square.

    attention: `[g*rows, columns]`, destroyed. sums: `[3, g, columns]`, written. The shift makes identical rows give
    exactly 0 and keeps small variances from cancelling.
    """
    by_head = attention.view(-1, rows, attention.shape[1])
    first, rest = by_head[:, :1], by_head[:, 1:]
    sums[0] = first[:, 0]
    rest.sub_(first)
    torch.sum(rest, 1, out=sums[1])
    torch.sum(rest.mul_(rest), 1, out=sums[2])


def column_moments(sums: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance (0 for one row) from `shifted_sums`: two `[g, columns]`. Destroys `sums`."""
    first, total, squares = sums
    if rows < 2:
        return first, torch.zeros_like(first)
    mean = total.div_(rows)
    variance = squares.addcmul_(mean, mean, value=-rows).div_(rows - 1).clamp_min_(0)
    return mean.add_(first), variance


def pool_neighbours(score: Tensor, positions: Tensor | None, pool: int) -> Tensor:
    """Average pooling over neighbouring positions: the scores within `pool // 2` positions of each, divided by `pool`.

    score: fp32 `[..., n]`, 0 where a column does not count. positions: int `[..., n]`, in any order, unique where the
    score is not 0; None for 0 .. n - 1. Positions that are missing count as 0, like the padding at the ends.
    """
    order = None if positions is None else positions.argsort()
    ordered = score if order is None else score.gather(-1, order)
    near = None if positions is None or order is None else positions.gather(-1, order)
    pooled = ordered.clone()
    for offset in range(1, min(pool // 2, score.shape[-1] - 1) + 1):
        before, after = ordered[..., :-offset], ordered[..., offset:]
        if near is not None:
            gap = near[..., offset:] - near[..., :-offset] > pool // 2
            before, after = before.masked_fill(gap, 0), after.masked_fill(gap, 0)
        pooled[..., offset:] += before
        pooled[..., :-offset] += after
    pooled /= pool
    return pooled if order is None else torch.empty_like(pooled).scatter_(-1, order, pooled)
