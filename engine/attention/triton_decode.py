"""Triton kernels of a decode step over ragged rows: write the newcomers, attend, combine, and let full rows give up.

Every row (sequence, KV head) has its own offset and length, read from device memory, so that no launch depends on a
length: a grid is (rows, pieces), and a row of n columns is cut into pieces by n alone, whatever its neighbours. Slots
are widened to 64 bits before they are multiplied. Nothing outside a row's valid columns is ever read. A row whose
length is negative does nothing.

How a row is cut and its pieces are joined is in `triton_pieces`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_pieces import join_pieces, leave_piece, piece_columns, product, row_queries, weigh


@triton.jit
def row_columns(length, row, NEWCOMERS: tl.constexpr):
    """How many columns a row attends to: its length and the newcomers behind it, 0 for a row that does nothing."""
    count = tl.load(length + row)
    return tl.where(count < 0, 0, count + NEWCOMERS)


@triton.jit
def store_kernel(
    new_keys,  # [batch, kv_heads, head_dim], any strides over batch and heads
    new_values,
    keys,  # [slots, head_dim]
    values,
    position,  # int32 [slots]
    offset,  # int32 [batch, kv_heads]
    length,
    query_position,  # int [batch]
    key_batch_stride,
    key_head_stride,
    value_batch_stride,
    value_head_stride,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
):
    """Write each row's newcomer into the slot behind its length. Grid (rows,)."""
    row = tl.program_id(0)
    batch, head = (row // KV_HEADS).to(tl.int64), (row % KV_HEADS).to(tl.int64)
    count = tl.load(length + row)
    if count >= 0:
        slot = tl.load(offset + row).to(tl.int64) + count
        dims = tl.arange(0, DIM_PAD)
        inside = dims < HEAD_DIM
        key = tl.load(new_keys + batch * key_batch_stride + head * key_head_stride + dims, mask=inside)
        value = tl.load(new_values + batch * value_batch_stride + head * value_head_stride + dims, mask=inside)
        tl.store(keys + slot * HEAD_DIM + dims, key.to(keys.dtype.element_ty), mask=inside)
        tl.store(values + slot * HEAD_DIM + dims, value.to(values.dtype.element_ty), mask=inside)
        tl.store(position + slot, tl.load(query_position + batch).to(tl.int32))


@triton.jit
def split_kernel(
    queries,  # [batch, heads, head_dim]
    keys,  # [slots, head_dim]
    values,
    position,  # int32 [slots]
    offset,  # int32 [batch, kv_heads]
    length,
    query_position,  # int [batch]
    partial,  # fp32 [batch * heads, pieces, head_dim], written
    peak,  # fp32 [batch * heads, pieces], written
    total,
    logits,  # fp32 [batch * heads, columns], written if KEEP_LOGITS
    scale,  # times log2(e)
    sliding,
    columns,
    pieces,
    NEWCOMERS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECES: tl.constexpr,
    SLIDING: tl.constexpr,
    KEEP_LOGITS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Attention of a row's query heads over one piece of its columns. Grid (rows, pieces)."""
    row, piece = tl.program_id(0), tl.program_id(1)
    count = row_columns(length, row, NEWCOMERS)
    span = piece_columns(count, BLOCK, PIECES)
    start = piece * span
    stop = tl.minimum(start + span, count)
    if start < stop:
        base = tl.load(offset + row).to(tl.int64)
        heads, dims = tl.arange(0, GROUP_PAD), tl.arange(0, DIM_PAD)
        first_head = row.to(tl.int64) * GROUP
        inside_head, inside_dim = heads < GROUP, dims < HEAD_DIM
        query = row_queries(queries, row, GROUP, GROUP_PAD, HEAD_DIM, DIM_PAD)
        if SLIDING:
            oldest = tl.load(query_position + row // KV_HEADS).to(tl.int32) - sliding  # and those before it are hidden
        top = tl.full([GROUP_PAD], float("-inf"), tl.float32)
        norm = tl.zeros([GROUP_PAD], tl.float32)
        result = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
        for first in range(start, stop, BLOCK):
            column = first + tl.arange(0, BLOCK)
            inside = column < stop
            slot = base + column
            key = tl.load(
                keys + slot[None, :] * HEAD_DIM + dims[:, None], mask=inside[None, :] & inside_dim[:, None], other=0.0
            )  # [DIM_PAD, BLOCK]
            logit = product(query, key.to(query.dtype), WIDEN) * scale  # [GROUP_PAD, BLOCK]
            visible = inside
            if SLIDING:
                visible = inside & (tl.load(position + slot, mask=inside, other=0) > oldest)
            logit = tl.where(visible[None, :], logit, float("-inf"))
            if KEEP_LOGITS:
                tl.store(
                    logits + (first_head + heads[:, None]) * columns + column[None, :],
                    logit,
                    mask=inside_head[:, None] & inside[None, :],
                )
            top, norm, weight, decay = weigh(logit, top, norm)
            value = tl.load(
                values + slot[:, None] * HEAD_DIM + dims[None, :], mask=inside[:, None] & inside_dim[None, :], other=0.0
            )  # [BLOCK, DIM_PAD]
            result = result * decay[:, None] + product(weight.to(query.dtype), value.to(query.dtype), WIDEN)
        leave_piece(partial, peak, total, row, piece, pieces, top, norm, result, GROUP, GROUP_PAD, HEAD_DIM, DIM_PAD)


@triton.jit
def combine_kernel(
    partial,  # as written by split_kernel
    peak,
    total,
    length,  # int32 [batch, kv_heads]
    out,  # [batch * heads, head_dim], written
    lse,  # fp32 [batch * heads], written: log2 of the sum of 2^logit
    pieces,
    NEWCOMERS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECES: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Join the pieces of one query head; a row without columns gives zeros. Grid (batch * heads,)."""
    head = tl.program_id(0)
    count = row_columns(length, head // GROUP, NEWCOMERS)
    there = (count + piece_columns(count, BLOCK, PIECES) - 1) // piece_columns(count, BLOCK, PIECES)
    result, finite, norm = join_pieces(
        partial, peak, total, head.to(tl.int64) * pieces, there, HEAD_DIM, DIM_PAD, PIECES, TOGETHER
    )
    dims = tl.arange(0, DIM_PAD)
    positive = tl.where(norm > 0.0, norm, 1.0)
    tl.store(
        out + head.to(tl.int64) * HEAD_DIM + dims,
        (result / positive).to(out.dtype.element_ty),
        mask=dims < HEAD_DIM,
    )
    tl.store(lse + head, tl.where(norm > 0.0, finite + tl.log2(positive), 0.0))


@triton.jit
def weights_kernel(
    logits,  # fp32 [batch * heads, columns], of split_kernel
    lse,  # fp32 [batch * heads], of combine_kernel
    length,  # int32 [batch, kv_heads]
    weights,  # fp32 [batch * kv_heads, columns], written up to each row's columns
    columns,
    NEWCOMERS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECES: tl.constexpr,
):
    """The new query's attention to each column, the mean over the query heads of a row. Grid (rows, pieces)."""
    row, piece = tl.program_id(0), tl.program_id(1)
    count = row_columns(length, row, NEWCOMERS)
    span = piece_columns(count, BLOCK, PIECES)
    start = piece * span
    stop = tl.minimum(start + span, count)
    heads = tl.arange(0, GROUP_PAD)
    place = row.to(tl.int64) * GROUP + heads
    norm = tl.load(lse + place, mask=heads < GROUP, other=0.0)
    for first in range(start, stop, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < stop
        logit = tl.load(
            logits + place[:, None] * columns + column[None, :],
            mask=(heads[:, None] < GROUP) & inside[None, :],
            other=float("-inf"),
        )
        mean = tl.sum(tl.exp2(logit - norm[:, None]), 0) / GROUP
        tl.store(weights + row.to(tl.int64) * columns + column, mean, mask=inside)


@triton.jit
def exchange_kernel(
    keys,  # [slots, head_dim]
    values,
    position,  # int32 [slots]
    weights,  # fp32 [batch * kv_heads, columns]
    offset,  # int32 [batch, kv_heads]
    length,  # int32 [batch, kv_heads], raised by 1 where a row is not full
    limit,  # int32 [batch, kv_heads]
    query_position,  # int [batch]
    columns,
    window,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The newcomer of a full row changes places with the least attended slot outside the window. Grid (rows,)."""
    row = tl.program_id(0)
    count = tl.load(length + row)
    most = tl.load(limit + row)
    tl.debug_barrier()  # all threads have read the length before one raises it
    if count >= 0 and count < most:
        tl.store(length + row, count + 1)
    if count >= 0 and count >= most:
        base = tl.load(offset + row).to(tl.int64)
        youngest = tl.load(query_position + row // KV_HEADS).to(tl.int32) - window  # that may go
        lanes = tl.arange(0, BLOCK)
        lowest = tl.full([BLOCK], float("inf"), tl.float32)
        oldest = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
        where = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
        for first in range(0, count + 1, BLOCK):
            column = first + lanes
            inside = column < count + 1
            age = tl.load(position + base + column, mask=inside, other=0x7FFFFFFF)
            score = tl.load(weights + row.to(tl.int64) * columns + column, mask=inside, other=float("inf"))
            score = tl.where(age > youngest, float("inf"), score)
            better = (score < lowest) | ((score == lowest) & (age < oldest))  # of equals the oldest goes
            lowest = tl.where(better, score, lowest)
            oldest = tl.where(better, age, oldest)
            where = tl.where(better, column, where)
        least = tl.min(lowest, 0)
        first_age = tl.min(tl.where(lowest == least, oldest, 0x7FFFFFFF), 0)
        loser = tl.min(tl.where((lowest == least) & (oldest == first_age), where, 0x7FFFFFFF), 0)
        if loser <= count:  # not so only where the attention is not a number
            dims = tl.arange(0, DIM_PAD)
            inside_dim = dims < HEAD_DIM
            old, new = base + loser, base + count
            old_key = tl.load(keys + old * HEAD_DIM + dims, mask=inside_dim)
            new_key = tl.load(keys + new * HEAD_DIM + dims, mask=inside_dim)
            old_value = tl.load(values + old * HEAD_DIM + dims, mask=inside_dim)
            new_value = tl.load(values + new * HEAD_DIM + dims, mask=inside_dim)
            old_position, new_position = tl.load(position + old), tl.load(position + new)
            tl.debug_barrier()  # all threads have read before one writes
            tl.store(keys + old * HEAD_DIM + dims, new_key, mask=inside_dim)
            tl.store(keys + new * HEAD_DIM + dims, old_key, mask=inside_dim)
            tl.store(values + old * HEAD_DIM + dims, new_value, mask=inside_dim)
            tl.store(values + new * HEAD_DIM + dims, old_value, mask=inside_dim)
            tl.store(position + old, new_position)
            tl.store(position + new, old_position)
