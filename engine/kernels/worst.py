"""Compiled pass over the attention of a layer's last queries: the worst case over rows, and their mean.

The twin of `cache/worst.py` in torch; the formulas are there. Per KV head: torch multiplies, here each row becomes its
softmax with the sums that scale it after pooling, and then columns their largest pooled number, their mean and their
variance. Columns lie in order of position.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from .arithmetic import FASTMATH
from .team import meet
from .vectors import BYTES, REAL, REALS, WIDTH
from .window import COLUMNS, MASS, TOTAL, Masks, emit_row

BESIDE = (-2, -1, 1, 2)
ALL_BESIDE = 15
MARGIN = WIDTH  # floats that may be read, and count for nothing, before and behind each line
LINKED = 4  # behind TOP, TOTAL, MASS and DOT
_LEAST = np.float32(1e-30)


@intrinsic
def linked_row(
    typingctx: Any,
    logits: Any,
    positions: Any,
    count: Any,
    newest: Any,
    oldest: Any,
    counted: Any,
    out: Any,
    links: Any,
) -> Any:
    """`row_moments` that leaves zeros where a column does not count, and also adds up weights times `links`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit_row(Masks(builder), args[:7], args[7])
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 8), codegen


def emit_columns(pooled_with_all: bool) -> Any:
    """`worst_columns` in its two forms: most columns have all their neighbours, and masks take as long as sums."""

    @intrinsic
    def worst_columns(
        typingctx: Any,
        attention: Any,
        stride: Any,
        shares: Any,
        scales: Any,
        rows: Any,
        group: Any,
        near: Any,
        worst: Any,
        mean: Any,
    ) -> Any:
        """COLUMNS columns: `worst` = the largest over all rows of a column and its neighbours, times the row's scale;
        `mean` over all rows, each times its share.

        Addresses; attention `[group * rows]` lines `stride` bytes apart. near: a byte for each column, bit `i` for the
        column at `BESIDE[i]` from it. Returns the sum over heads and columns of the unbiased variance over a head's
        rows, worked from differences to the first one.
        """

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return emit_worst(Masks(builder), args, pooled_with_all)

        return types.float32(*(types.int64,) * 9), codegen

    return worst_columns


def emit_worst(make: Masks, args: Any, pooled_with_all: bool) -> Any:
    """The code of `worst_columns`."""
    builder, vectors = make.builder, COLUMNS // WIDTH
    base, step, share_of, scale_of, count, heads, neighbours, out, means = args
    zeros = ir.Constant(REALS, None)
    size, one = builder.sitofp(count, REAL), ir.Constant(REAL, 1.0)
    few = builder.icmp_signed("<", count, make.constant(2))
    part = make.splat(builder.fdiv(one, size))
    spread = make.splat(builder.select(few, ir.Constant(REAL, 0.0), builder.fdiv(one, builder.fsub(size, one))))
    offsets = [make.constant(i * WIDTH * 4) for i in range(vectors)]
    links: list[list[Any]] = []
    for i in range(0 if pooled_with_all else vectors):
        bits = builder.load(make.at(neighbours, make.constant(i * WIDTH), BYTES), align=1)
        places = (builder.and_(bits, ir.Constant(BYTES, [1 << place] * WIDTH)) for place in range(len(BESIDE)))
        links.append([builder.icmp_signed("!=", place, ir.Constant(BYTES, None)) for place in places])
    best, total, variances = ([cgutils.alloca_once_value(builder, zeros) for _ in range(vectors)] for _ in range(3))
    sums, squares = ([cgutils.alloca_once(builder, REALS) for _ in range(vectors)] for _ in range(2))
    with cgutils.for_range(builder, heads) as head:
        start = builder.mul(head.index, count)
        line = builder.add(base, builder.mul(start, step))
        share = make.splat(builder.load(make.at(share_of, builder.shl(start, make.constant(2)), REAL)))
        first = [builder.fmul(make.load(line, offset, 4), share) for offset in offsets]
        for place in (*sums, *squares):
            builder.store(zeros, place)
        with cgutils.for_range(builder, count) as row:
            index = builder.add(start, row.index)
            line = builder.add(base, builder.mul(index, step))
            where = builder.shl(index, make.constant(2))
            share = make.splat(builder.load(make.at(share_of, where, REAL)))
            scale = make.splat(builder.load(make.at(scale_of, where, REAL)))
            for i, offset in enumerate(offsets):
                weight = make.load(line, offset, 4)
                difference = builder.fsub(builder.fmul(weight, share), first[i])
                builder.store(builder.fadd(builder.load(sums[i]), difference), sums[i])
                builder.store(make.fused(difference, difference, builder.load(squares[i])), squares[i])
                pooled = weight
                for place, away in enumerate(BESIDE):
                    beside = make.load(line, builder.add(offset, make.constant(4 * away)), 4)
                    more = builder.fadd(pooled, beside)
                    pooled = more if pooled_with_all else builder.select(links[i][place], more, pooled)
                pooled, most = builder.fmul(pooled, scale), builder.load(best[i])
                builder.store(builder.select(builder.fcmp_ordered(">", pooled, most), pooled, most), best[i])
        for i in range(vectors):
            apart = builder.load(sums[i])
            average = builder.fmul(apart, part)
            rest = builder.fsub(builder.load(squares[i]), builder.fmul(average, apart))
            variance = builder.fmul(make.of_reals("maxnum", rest, zeros), spread)
            builder.store(builder.fadd(builder.load(variances[i]), variance), variances[i])
            builder.store(builder.fadd(builder.load(total[i]), builder.fadd(average, first[i])), total[i])
    of_heads, shift = make.splat(builder.fdiv(one, builder.sitofp(heads, REAL))), zeros
    for i, offset in enumerate(offsets):
        average = builder.fmul(builder.load(total[i]), of_heads)
        builder.store(average, make.at(means, offset, REALS), align=4)
        # the largest passes over what is not a number, and the mean does not
        lost = builder.fcmp_unordered("uno", average, average)
        builder.store(builder.select(lost, average, builder.load(best[i])), make.at(out, offset, REALS), align=4)
        shift = builder.fadd(shift, builder.load(variances[i]))
    return make.total(shift)


any_columns, linked_columns = emit_columns(False), emit_columns(True)


@njit(nogil=True, fastmath=FASTMATH, error_model="numpy", cache=True)
def worst_pass(
    thread: int,
    counter: Any,  # int64 [2], zeros at the start: see kernels/team.py
    threads: int,
    length: int,  # valid columns
    positions: Any,  # int32 [padded], rising, the largest int32 behind the valid ones
    near: Any,  # uint8 [padded]: see worst_columns
    links: Any,  # fp32 [padded]: how many columns each is pooled with, itself included
    query_positions: Any,  # int64 [rows]
    sliding: int,  # 0 without a window
    counted: int,  # columns at this position and above are the window: never counted
    attention: Any,  # fp32 [group * rows, MARGIN + padded + MARGIN]: logits, then work space
    moments: Any,  # fp32 [group * rows, 5], written: see row_moments and linked_row
    worst: Any,  # fp32 [padded], written
    means: Any,  # fp32 [padded], written
    shifts: Any,  # fp32 [padded / COLUMNS], written
) -> None:
    """One KV head. Every thread of a team makes this call; their number changes no bit of what is written."""
    height, rows = moments.shape[0], query_positions.shape[0]
    group = height // rows
    blocks, where = (length + COLUMNS - 1) // COLUMNS, positions.ctypes.data
    stride = 4 * attention.shape[1]
    base = attention.ctypes.data + 4 * MARGIN
    for row in range(height * thread // threads, height * (thread + 1) // threads):
        newest = query_positions[row % rows]
        oldest = newest - sliding if sliding else -1
        out = moments[row].ctypes.data
        line = base + row * stride
        linked_row(line, where, blocks * COLUMNS, newest, oldest, counted, out, links.ctypes.data)
    meet(counter, 1, threads)
    shares, scales = np.empty(height, np.float32), np.empty(height, np.float32)
    for row in range(height):
        share = np.float32(1) / moments[row, TOTAL]
        shares[row] = share
        # back to the row's own mass: of its softmax, so that a least sum means the same as in torch
        scales[row] = moments[row, MASS] * share / max(moments[row, LINKED] * share, _LEAST) * share
    for block in range(blocks * thread // threads, blocks * (thread + 1) // threads):
        at = block * COLUMNS
        whole = True
        for column in range(at, at + COLUMNS):
            whole &= near[column] == ALL_BESIDE
        line, near_by = base + 4 * at, near.ctypes.data + at
        out, mean = worst.ctypes.data + 4 * at, means.ctypes.data + 4 * at
        share_of, scale_of = shares.ctypes.data, scales.ctypes.data
        if whole:
            shift = linked_columns(line, stride, share_of, scale_of, rows, group, near_by, out, mean)
        else:
            shift = any_columns(line, stride, share_of, scale_of, rows, group, near_by, out, mean)
        shifts[block] = shift
