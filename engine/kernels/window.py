"""Compiled pass over the attention of a layer's last queries: row sums for dispersion, column moments for scores.

The twin of `cache.scores` in torch; the formulas are there. Per KV head: torch multiplies, here each row becomes its
softmax with the sums that dispersion needs, and then columns their moments, each number touched twice in all.
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
from .vectors import REAL, REALS, WIDTH, WORDS, Vectors

COLUMNS = 64  # worked at a time: rows of attention lie far apart, a line alone is not worth the way
TOP, TOTAL, MASS, DOT = range(4)
_HIDDEN = -1e30  # as in cache/scores.py


class Masks(Vectors):
    """Vectors compared by position."""

    def every(self, number: Any) -> Any:
        """An int32 sixteen times."""
        builder = self.builder
        undefined = ir.Constant(WORDS, ir.Undefined)
        word = builder.trunc(number, ir.IntType(32))
        single = builder.insert_element(undefined, word, ir.Constant(ir.IntType(32), 0))
        return builder.shuffle_vector(single, undefined, ir.Constant(WORDS, [0] * WIDTH))

    def words(self, address: Any, offset: Any) -> Any:
        return self.builder.load(self.at(address, offset, WORDS), align=4)


def emit_row(make: Masks, args: Any, links: Any = None) -> None:
    """The code of `row_moments`. With `links`, an address of fp32 `[count]`, the line keeps only the weights of columns
    below `counted`, zeros elsewhere, and `out` gets the sum of these times their links besides."""
    builder = make.builder
    line, where, columns, newest, oldest, counted, target = args
    newest, oldest, counted = make.every(newest), make.every(oldest), make.every(counted)
    zeros, hidden_logit = ir.Constant(REALS, None), ir.Constant(REALS, [_HIDDEN] * WIDTH)
    best = cgutils.alloca_once_value(builder, hidden_logit)
    blocks = builder.lshr(columns, make.constant(4))
    with cgutils.for_range(builder, blocks) as loop:
        at = builder.shl(loop.index, make.constant(6))
        position = make.words(where, at)
        hidden = builder.or_(builder.icmp_signed(">", position, newest), builder.icmp_signed("<=", position, oldest))
        logit = builder.select(hidden, hidden_logit, make.load(line, at, 4))
        builder.store(logit, make.at(line, at, REALS), align=4)
        builder.store(make.of_reals("maxnum", builder.load(best), logit), best)
    kind = ir.FunctionType(REAL, [REALS])
    reduce = cgutils.get_or_insert_function(builder.module, kind, "llvm.vector.reduce.fmax.v16f32")
    top = builder.call(reduce, [builder.load(best)])
    base = make.splat(top)
    total, mass, dot, linked = (cgutils.alloca_once_value(builder, zeros) for _ in range(4))
    with cgutils.for_range(builder, blocks) as loop:
        at = builder.shl(loop.index, make.constant(6))
        below = builder.fsub(make.load(line, at, 4), base)
        weight = make.exponential(below)
        counts = builder.icmp_signed("<", make.words(where, at), counted)
        own = builder.select(counts, weight, zeros)
        builder.store(weight if links is None else own, make.at(line, at, REALS), align=4)
        builder.store(builder.fadd(builder.load(total), weight), total)
        builder.store(builder.fadd(builder.load(mass), own), mass)
        builder.store(make.fused(own, below, builder.load(dot)), dot)
        if links is not None:
            builder.store(make.fused(own, make.load(links, at, 4), builder.load(linked)), linked)
    sums = [total, mass, dot] if links is None else [total, mass, dot, linked]
    for place, number in enumerate([top, *(make.total(builder.load(part)) for part in sums)]):
        builder.store(number, make.at(target, make.constant(4 * place), REAL))


@intrinsic
def row_moments(
    typingctx: Any, logits: Any, positions: Any, count: Any, newest: Any, oldest: Any, counted: Any, out: Any
) -> Any:
    """One query: `logits` fp32 `[count]` become `exp(logit - top)`, and `out` fp32 gets top, total, mass and dot.

    Addresses, and `count` columns, a multiple of 16. Columns at positions above `newest` or at `oldest` and below are
    hidden. total: of all; mass, and dot of weights with `logit - top`: of columns at positions below `counted`.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit_row(Masks(builder), args)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 7), codegen


@intrinsic
def column_moments(
    typingctx: Any,
    attention: Any,
    stride: Any,
    factors: Any,
    rows: Any,
    group: Any,
    gamma: Any,
    positions: Any,
    counted: Any,
    score: Any,
) -> Any:
    """COLUMNS columns: `score` = mean over the group's heads of `mean + gamma * variance`, 0 at `counted` and above.

    Addresses; attention `[group * rows]` lines `stride` bytes apart, each times its factor; the variance is unbiased,
    worked from differences to the head's first row, so that identical rows give exactly 0. Returns the sum of the
    variances of counted columns over the heads.
    """
    vectors = COLUMNS // WIDTH

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        make = Masks(builder)
        base, step, scale, count, heads, gamma, where, counted, target = args
        zeros = ir.Constant(REALS, None)
        size = builder.sitofp(count, REAL)
        one = ir.Constant(REAL, 1.0)
        few = builder.icmp_signed("<", count, make.constant(2))
        share = make.splat(builder.fdiv(one, size))
        spread = make.splat(builder.select(few, ir.Constant(REAL, 0.0), builder.fdiv(one, builder.fsub(size, one))))
        gammas, part = make.splat(gamma), make.splat(builder.fdiv(one, builder.sitofp(heads, REAL)))
        scores, variances = ([cgutils.alloca_once_value(builder, zeros) for _ in range(vectors)] for _ in range(2))
        sums, squares = ([cgutils.alloca_once(builder, REALS) for _ in range(vectors)] for _ in range(2))
        offsets = [make.constant(i * WIDTH * 4) for i in range(vectors)]
        with cgutils.for_range(builder, heads) as head:
            start = builder.mul(head.index, count)
            line = builder.add(base, builder.mul(start, step))
            factor = make.splat(builder.load(make.at(scale, builder.shl(start, make.constant(2)), REAL)))
            first = [builder.fmul(make.load(line, offset, 4), factor) for offset in offsets]
            for place in (*sums, *squares):
                builder.store(zeros, place)
            with cgutils.for_range(builder, builder.sub(count, make.constant(1))) as row:
                index = builder.add(start, builder.add(row.index, make.constant(1)))
                line = builder.add(base, builder.mul(index, step))
                factor = make.splat(builder.load(make.at(scale, builder.shl(index, make.constant(2)), REAL)))
                for i, offset in enumerate(offsets):
                    difference = builder.fsub(builder.fmul(make.load(line, offset, 4), factor), first[i])
                    builder.store(builder.fadd(builder.load(sums[i]), difference), sums[i])
                    builder.store(make.fused(difference, difference, builder.load(squares[i])), squares[i])
            for i in range(vectors):
                total = builder.load(sums[i])
                mean = builder.fmul(total, share)
                rest = builder.fsub(builder.load(squares[i]), builder.fmul(mean, total))
                variance = builder.fmul(make.of_reals("maxnum", rest, zeros), spread)
                builder.store(builder.fadd(builder.load(variances[i]), variance), variances[i])
                own = builder.fadd(builder.fadd(mean, first[i]), builder.fmul(gammas, variance))
                builder.store(builder.fadd(builder.load(scores[i]), own), scores[i])
        limit, shift = make.every(counted), zeros
        for i, offset in enumerate(offsets):
            counts = builder.icmp_signed("<", make.words(where, offset), limit)
            own = builder.select(counts, builder.fmul(builder.load(scores[i]), part), zeros)
            builder.store(own, make.at(target, offset, REALS), align=4)
            shift = builder.fadd(shift, builder.select(counts, builder.load(variances[i]), zeros))
        return make.total(shift)

    integers = (types.int64,) * 5
    return types.float32(*integers, types.float32, *(types.int64,) * 3), codegen


@njit(nogil=True, fastmath=FASTMATH, error_model="numpy", cache=True)
def window_pass(
    thread: int,
    counter: Any,  # int64 [2], zeros at the start: see kernels/team.py
    threads: int,
    length: int,  # valid columns
    positions: Any,  # int32 [padded], the largest int32 behind the valid ones
    query_positions: Any,  # int64 [rows]
    sliding: int,  # 0 without a window
    counted: int,  # columns at this position and above are the window: never counted
    gamma: Any,  # fp32
    attention: Any,  # fp32 [group * rows, padded]: logits, then work space
    moments: Any,  # fp32 [group * rows, 4], written: see row_moments
    scores: Any,  # fp32 [padded], written
    shifts: Any,  # fp32 [padded / COLUMNS], written
) -> None:
    """One KV head. Every thread of a team makes this call; their number changes no bit of what is written."""
    height, rows = moments.shape[0], query_positions.shape[0]
    blocks, where = (length + COLUMNS - 1) // COLUMNS, positions.ctypes.data
    for row in range(height * thread // threads, height * (thread + 1) // threads):
        newest = query_positions[row % rows]
        oldest = newest - sliding if sliding else -1
        out = moments[row].ctypes.data
        row_moments(attention[row].ctypes.data, where, blocks * COLUMNS, newest, oldest, counted, out)
    meet(counter, 1, threads)
    factors = np.empty(height, np.float32)
    for row in range(height):
        factors[row] = np.float32(1) / moments[row, TOTAL]
    for block in range(blocks * thread // threads, blocks * (thread + 1) // threads):
        at = block * COLUMNS
        shifts[block] = column_moments(
            attention.ctypes.data + 4 * at,
            4 * attention.shape[1],
            factors.ctypes.data,
            rows,
            height // rows,
            gamma,
            where + 4 * at,
            counted,
            scores.ctypes.data + 4 * at,
        )
