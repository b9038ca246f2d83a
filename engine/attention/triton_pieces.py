"""What split-KV attention kernels have in common: a row cut into pieces, a running softmax over one, and their join.

After Flash-Decoding (Dao et al., 2023): a piece leaves its largest logit, its sum and its weighted values, and a second
kernel joins them. Logits are in base 2. A row of n columns is cut by n alone, whatever its neighbours.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def product(left, right, WIDEN: tl.constexpr):
    """The matrix product in fp32. WIDEN for Triton's interpreter, which cannot multiply bf16: exact either way."""
    if WIDEN:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def piece_columns(count, BLOCK: tl.constexpr, PIECES: tl.constexpr):
    """Columns of one of at most PIECES pieces of a row: whole blocks."""
    blocks = (count + BLOCK - 1) // BLOCK
    return tl.maximum((blocks + PIECES - 1) // PIECES, 1) * BLOCK


@triton.jit
def row_queries(
    queries,
    row,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
):
    """The queries of a row's heads, `[GROUP_PAD, DIM_PAD]`, 0 in what is padded. Rows are (sequence, KV head), so that
    the heads of one follow those of another without a gap."""
    heads, dims = tl.arange(0, GROUP_PAD), tl.arange(0, DIM_PAD)
    return tl.load(
        queries + (row.to(tl.int64) * GROUP + heads[:, None]) * HEAD_DIM + dims[None, :],
        mask=(heads < GROUP)[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
    )


@triton.jit
def weigh(logit, top, norm):
    """One block of a running softmax: the largest logit so far, the sum of weights so far, this block's weights, and
    what those before shrink by."""
    higher = tl.maximum(top, tl.max(logit, 1))
    finite = tl.where(higher == float("-inf"), 0.0, higher)  # nothing visible so far: -inf - -inf is no number
    weight = tl.exp2(logit - finite[:, None])
    decay = tl.exp2(top - finite)
    return higher, norm * decay + tl.sum(weight, 1), weight, decay


@triton.jit
def leave_piece(
    partial,
    peak,
    total,
    row,
    piece,
    pieces,
    top,
    norm,
    result,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
):
    """Write what `join_pieces` reads of one piece of a row."""
    heads, dims = tl.arange(0, GROUP_PAD), tl.arange(0, DIM_PAD)
    inside = heads < GROUP
    place = (row.to(tl.int64) * GROUP + heads) * pieces + piece
    tl.store(peak + place, top, mask=inside)
    tl.store(total + place, norm, mask=inside)
    tl.store(
        partial + place[:, None] * HEAD_DIM + dims[None, :],
        result,
        mask=inside[:, None] & (dims < HEAD_DIM)[None, :],
    )


@triton.jit
def join_pieces(
    partial,
    peak,
    total,
    place,
    count,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PIECES: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """The first `count` pieces of a query head from `place` on: the weighted values `[DIM_PAD]`, the largest logit (0
    where nothing is seen), and the sum of weights. Where a piece's peak is -inf nothing else of it matters."""
    piece, dims = tl.arange(0, PIECES), tl.arange(0, DIM_PAD)
    tops = tl.load(peak + place + piece, mask=piece < count, other=float("-inf"))
    top = tl.max(tops, 0)
    finite = tl.where(top == float("-inf"), 0.0, top)
    sums = tl.load(total + place + piece, mask=piece < count, other=0.0)
    norm = tl.sum(tl.where(tops == float("-inf"), 0.0, sums) * tl.exp2(tops - finite), 0)
    result = tl.zeros([DIM_PAD], tl.float32)
    for first in range(0, count, TOGETHER):
        some = first + tl.arange(0, TOGETHER)
        height = tl.load(peak + place + some, mask=some < count, other=float("-inf"))
        part = tl.load(
            partial + (place + some[:, None]) * HEAD_DIM + dims[None, :],
            mask=(some[:, None] < count) & (dims[None, :] < HEAD_DIM),
            other=0.0,
        )
        part = tl.where(height[:, None] == float("-inf"), 0.0, part)
        result += tl.sum(part * tl.exp2(height - finite)[:, None], 0)
    return result, finite, norm
