"""Triton kernels of attention over rows in two parts: packed in 8, 4 or 2 bits, and as they are.

See cache/packed_arena.py for the parts. The packed one is cut into pieces like any row (see triton_pieces.py); codes
are widened in registers, in the queries' dtype. The other part's pieces come from `triton_decode.split_kernel`, behind
them in the same buffers, and one kernel joins both: one softmax. A row whose length is negative does nothing, a packed
row may be empty.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_pieces import join_pieces, leave_piece, piece_columns, product, row_queries, weigh


@triton.jit
def widened(codes, scale, minimum, slot, dims, inside, group, CODE_BYTES: tl.constexpr, BITS: tl.constexpr):
    """fp32 numbers at slots and channels, any shape; `group`: where the pair of a number stands in its table."""
    byte = tl.load(codes + slot * CODE_BYTES + dims * BITS // 8, mask=inside, other=0).to(tl.int32)
    code = (byte >> (dims * BITS % 8)) & ((1 << BITS) - 1)
    factor = tl.load(scale + group, mask=inside, other=0.0).to(tl.float32)
    return code.to(tl.float32) * factor + tl.load(minimum + group, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def packed_split_kernel(
    queries,  # [batch, heads, head_dim]
    key_codes,  # uint8 [slots, CODE_BYTES]
    value_codes,
    key_scale,  # fp16 [slots / 32, head_dim]
    key_minimum,
    value_scale,  # fp16 [slots, VALUE_GROUPS]
    value_minimum,
    position,  # int32 [slots]
    offset,  # int32 [batch, kv_heads], whole groups of 32 slots
    length,
    query_position,  # int [batch]
    partial,  # fp32 [batch * heads, pieces, head_dim], written
    peak,  # fp32 [batch * heads, pieces], written where there are columns
    total,
    scale,  # times log2(e)
    sliding,
    pieces,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    CODE_BYTES: tl.constexpr,
    BITS: tl.constexpr,
    VALUE_GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECES: tl.constexpr,
    SLIDING: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Attention of a row's query heads over one piece of its packed columns. Grid (rows, pieces)."""
    row, piece = tl.program_id(0), tl.program_id(1)
    count = tl.maximum(tl.load(length + row), 0)
    span = piece_columns(count, BLOCK, PIECES)
    start = piece * span
    stop = tl.minimum(start + span, count)
    if start < stop:
        base = tl.load(offset + row).to(tl.int64)
        dims = tl.arange(0, DIM_PAD)
        inside_dim = dims < HEAD_DIM
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
            key = widened(
                key_codes,
                key_scale,
                key_minimum,
                slot[None, :],
                dims[:, None],
                inside[None, :] & inside_dim[:, None],
                slot[None, :] // 32 * HEAD_DIM + dims[:, None],
                CODE_BYTES,
                BITS,
            )  # [DIM_PAD, BLOCK]
            logit = product(query, key.to(query.dtype), WIDEN) * scale  # [GROUP_PAD, BLOCK]
            visible = inside
            if SLIDING:
                visible = inside & (tl.load(position + slot, mask=inside, other=0) > oldest)
            logit = tl.where(visible[None, :], logit, float("-inf"))
            top, norm, weight, decay = weigh(logit, top, norm)
            value = widened(
                value_codes,
                value_scale,
                value_minimum,
                slot[:, None],
                dims[None, :],
                inside[:, None] & inside_dim[None, :],
                slot[:, None] * VALUE_GROUPS + dims[None, :] * VALUE_GROUPS // HEAD_DIM,
                CODE_BYTES,
                BITS,
            )  # [BLOCK, DIM_PAD]
            result = result * decay[:, None] + product(weight.to(query.dtype), value.to(query.dtype), WIDEN)
        leave_piece(partial, peak, total, row, piece, pieces, top, norm, result, GROUP, GROUP_PAD, HEAD_DIM, DIM_PAD)


@triton.jit
def join_kernel(
    partial,  # fp32 [batch * heads, pieces, head_dim]
    peak,  # fp32 [batch * heads, pieces]: -inf where a piece has nothing, and then nothing else of it matters
    total,
    out,  # [batch * heads, head_dim], written
    pieces,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PIECES: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Join the pieces of both parts of one query head; a row without columns gives zeros. Grid (batch * heads,)."""
    head = tl.program_id(0)
    result, _, norm = join_pieces(
        partial, peak, total, head.to(tl.int64) * pieces, pieces, HEAD_DIM, DIM_PAD, PIECES, TOGETHER
    )
    dims = tl.arange(0, DIM_PAD)
    positive = tl.where(norm > 0.0, norm, 1.0)
    tl.store(
        out + head.to(tl.int64) * HEAD_DIM + dims,
        (result / positive).to(out.dtype.element_ty),
        mask=dims < HEAD_DIM,
    )
