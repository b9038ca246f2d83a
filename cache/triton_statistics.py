"""Triton kernels of the window's statistics: two passes over the keys, and no array `[H, w, S]` between them.

The first pass leaves each query's log-sum-exp, in parts, with what the dispersion needs; the second works the attention
again from it, block by block, and reduces it over the window's queries at once. Masks are by position. The formulas are
those of `scores.cake_statistics`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def hidden_from(column_position, query_position, sliding, SLIDING: tl.constexpr):
    """bool `[rows, columns]`: what a query cannot see."""
    hidden = column_position[None, :] > query_position[:, None]
    if SLIDING:
        hidden = hidden | (column_position[None, :] <= query_position[:, None] - sliding)
    return hidden


@triton.jit
def logits_of(query, key, scale, WIDEN: tl.constexpr):
    """fp32 `[rows, columns]`. Products of two bf16 or fp16 numbers are exact in fp32; WIDEN for unequal dtypes, and for
    the interpreter, which cannot multiply bf16."""
    if WIDEN:
        query, key = query.to(tl.float32), key.to(tl.float32)
    return tl.dot(query, key, input_precision="ieee") * scale


@triton.jit
def partial_kernel(
    queries,  # [kv_heads, height, head_dim], contiguous; height = group * rows
    keys,  # [kv_heads, n, head_dim], strided
    positions,  # int32 [kv_heads, n], strided
    query_position,  # int [rows]
    lengths,  # int32 [kv_heads]
    parts,  # fp32 [4, pieces, kv_heads, height], written: largest logit, sum, sum of counted, sum of counted * logit
    scale,
    window_start,
    sliding,
    key_stride,
    column_stride,
    position_stride,
    height,
    rows,
    pieces,
    span,  # columns of a piece
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SLIDING: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """One piece of one KV head's columns, for ROWS of its queries. Grid (pieces, row blocks, kv_heads)."""
    piece, head = tl.program_id(0), tl.program_id(2)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    dims, inside_row = tl.arange(0, DIM_PAD), row < height
    query = tl.load(
        queries + (head.to(tl.int64) * height + row[:, None]) * HEAD_DIM + dims[None, :],
        mask=inside_row[:, None] & (dims[None, :] < HEAD_DIM),
        other=0.0,
    )
    at = tl.load(query_position + row % rows).to(tl.int32)
    top = tl.full([ROWS], -1e30, tl.float32)
    total, mass, dot = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    start = piece * span
    stop = tl.minimum(start + span, tl.load(lengths + head))
    for first in range(start, stop, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < stop
        key = tl.load(
            keys + head.to(tl.int64) * key_stride + column[None, :].to(tl.int64) * column_stride + dims[:, None],
            mask=inside[None, :] & (dims[:, None] < HEAD_DIM),
            other=0.0,
        )
        place = tl.load(positions + head.to(tl.int64) * position_stride + column, mask=inside, other=0x7FFFFFFF)
        logit = logits_of(query, key, scale, WIDEN)
        hidden = hidden_from(place, at, sliding, SLIDING)  # columns that are not there lie behind every query
        logit = tl.where(hidden, -1e30, logit)  # finite: 0 * inf is no number, and all of a block may be hidden
        higher = tl.maximum(top, tl.max(logit, 1))
        below = logit - higher[:, None]
        weight = tl.exp(below)
        counted = tl.where(place[None, :] < window_start, weight, 0.0)
        decay = tl.exp(top - higher)
        dot = decay * (dot + (top - higher) * mass) + tl.sum(counted * below, 1)
        mass = decay * mass + tl.sum(counted, 1)
        total = decay * total + tl.sum(weight, 1)
        top = higher
    kv_heads = tl.num_programs(2).to(tl.int64)  # what is 1 in a launch, as `pieces` may be, is a constant without types
    here = (piece * kv_heads + head) * height + row
    whole = kv_heads * pieces * height
    tl.store(parts + here, top, mask=inside_row)
    tl.store(parts + whole + here, total, mask=inside_row)
    tl.store(parts + 2 * whole + here, mass, mask=inside_row)
    tl.store(parts + 3 * whole + here, dot, mask=inside_row)


@triton.jit
def moments_kernel(
    queries,  # as above
    keys,
    positions,
    query_position,
    lengths,
    lse,  # fp32 [kv_heads, height]: log-sum-exp of every query's logits
    score,  # fp32 [kv_heads, n], written: mean + gamma * variance, the mean over the group; 0 in the window
    shift,  # fp32 [kv_heads, blocks], written: sum of the variances of a block's columns
    scale,
    gamma,
    window_start,
    sliding,
    key_stride,
    column_stride,
    position_stride,
    n,
    rows,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SLIDING: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Mean and variance over the window's queries of one block of columns. Grid (blocks, kv_heads).

    Sums and sums of squares are shifted by the first row: identical rows give exactly 0, small variances do not cancel.
    """
    block, head = tl.program_id(0), tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < tl.load(lengths + head)
    dims = tl.arange(0, DIM_PAD)
    key = tl.load(
        keys + head.to(tl.int64) * key_stride + column[None, :].to(tl.int64) * column_stride + dims[:, None],
        mask=inside[None, :] & (dims[:, None] < HEAD_DIM),
        other=0.0,
    )
    place = tl.load(positions + head.to(tl.int64) * position_stride + column, mask=inside, other=0x7FFFFFFF)
    scores, variances = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for member in range(GROUP):
        line = (head.to(tl.int64) * GROUP + member) * rows
        base, total, squares = (
            tl.zeros([BLOCK], tl.float32),
            tl.zeros([BLOCK], tl.float32),
            tl.zeros([BLOCK], tl.float32),
        )
        for first in range(0, rows, ROWS):
            row = first + tl.arange(0, ROWS)
            inside_row = row < rows
            query = tl.load(
                queries + (line + row[:, None]) * HEAD_DIM + dims[None, :],
                mask=inside_row[:, None] & (dims[None, :] < HEAD_DIM),
                other=0.0,
            )
            at = tl.load(query_position + row, mask=inside_row, other=0).to(tl.int32)
            norm = tl.load(lse + line + row, mask=inside_row, other=0.0)
            logit = logits_of(query, key, scale, WIDEN)
            hidden = hidden_from(place, at, sliding, SLIDING)
            attention = tl.where(hidden, 0.0, tl.exp(logit - norm[:, None]))
            base = tl.where(first == 0, tl.sum(tl.where(row[:, None] == 0, attention, 0.0), 0), base)
            moved = tl.where(inside_row[:, None], attention - base[None, :], 0.0)
            total += tl.sum(moved, 0)
            squares += tl.sum(moved * moved, 0)
        mean = total / rows
        variance = tl.maximum(squares - rows * mean * mean, 0.0) / tl.maximum(rows - 1, 1)
        scores += base + mean + gamma * variance
        variances += variance
    counted = place < window_start
    tl.store(score + head.to(tl.int64) * n + column, tl.where(counted, scores / GROUP, 0.0), mask=inside)
    tl.store(shift + head * tl.num_programs(0) + block, tl.sum(tl.where(counted, variances, 0.0), 0))
