"""Compiled lengths of projected values: the square root of `v^T (W^T W) v` for each token, with half of the products.

The twin of `cache.projection.projected_lengths` in torch. `v^T G v` of a symmetric G is `v^T U v` with U the lower
triangle of G, doubled beside the diagonal. Tokens lie side by side in the vectors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from .arithmetic import FASTMATH, widen
from .team import meet
from .vectors import REAL, REALS, WIDTH, WORD, Vectors

LINES, LANES = 8, 2 * WIDTH  # of a form, worked at a time
OUTPUTS, VECTORS = 4, 6  # sums at a time: as many as there are registers for, so that each load serves several
TOKENS = VECTORS * WIDTH


@intrinsic
def part_of_form(
    typingctx: Any, weights: Any, step: Any, hidden: Any, line: Any, lane: Any, out: Any, stride: Any
) -> Any:
    """LINES lines and LANES columns of `W^T W`, from `line` and `lane` on, fp32, to `out`, lines `stride` bytes apart.

    Addresses; weights fp32 `[hidden, dim]`, rows `step` bytes apart.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        make = Vectors(builder)
        weights, step, hidden, line, lane, out, stride = args
        offsets = [make.constant(4 * WIDTH * i) for i in range(LANES // WIDTH)]
        sums = [[cgutils.alloca_once_value(builder, ir.Constant(REALS, None)) for _ in offsets] for _ in range(LINES)]
        four = make.constant(4)
        with cgutils.for_range(builder, hidden) as row:
            base = builder.add(weights, builder.mul(row.index, step))
            own, beside = builder.add(base, builder.mul(line, four)), builder.add(base, builder.mul(lane, four))
            numbers = [make.load(beside, offset, 4) for offset in offsets]
            for i, places in enumerate(sums):
                factor = make.splat(builder.load(make.at(own, make.constant(4 * i), REAL)))
                for number, place in zip(numbers, places, strict=True):
                    builder.store(make.fused(number, factor, builder.load(place)), place)
        for i, places in enumerate(sums):
            target = builder.add(out, builder.mul(stride, make.constant(i)))
            for offset, place in zip(offsets, places, strict=True):
                builder.store(builder.load(place), make.at(target, offset, REALS), align=4)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 7), codegen


@intrinsic
def turn(typingctx: Any, values: Any, step: Any, first: Any, last: Any, out: Any, stride: Any) -> Any:
    """Sixteen numbers of each of the tokens `first` to `first + 15` (no further than `last`, which is repeated) become
    sixteen lines of `out`, fp32 `stride` bytes apart: a token in each column. Addresses; tokens `step` bytes apart."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        make = Vectors(builder)
        values, step, first, last, out, stride = args
        lines = []
        for token in range(WIDTH):
            index = builder.add(first, make.constant(token))
            index = builder.select(builder.icmp_signed("<", index, last), index, last)
            lines.append(make.load(values, builder.mul(index, step), 4))
        width = WIDTH
        while width > 1:  # blocks beside the diagonal change places, smaller ones at each turn
            width //= 2
            low = [lane if not lane & width else WIDTH + lane - width for lane in range(WIDTH)]
            high = [lane + width if not lane & width else WIDTH + lane for lane in range(WIDTH)]
            masks = [ir.Constant(ir.VectorType(WORD, WIDTH), mask) for mask in (low, high)]
            for i in (i for i in range(WIDTH) if not i & width):
                pair = lines[i], lines[i + width]
                lines[i], lines[i + width] = (builder.shuffle_vector(*pair, mask) for mask in masks)
        for i, line in enumerate(lines):
            builder.store(line, make.at(out, builder.mul(stride, make.constant(i)), REALS), align=4)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 6), codegen


@intrinsic
def add_lengths(typingctx: Any, values: Any, stride: Any, dim: Any, form: Any, out: Any) -> Any:
    """`out` fp32 `[TOKENS]` += `sqrt(v^T form v)`, of values fp32 `[dim, TOKENS]`, lines `stride` bytes apart.

    Addresses; form fp32 `[dim, dim]`, of which only the lower triangle is read, by blocks of OUTPUTS; dim a multiple of
    OUTPUTS.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        make = Vectors(builder)
        lines, stride, dim, form, out = args
        zeros, step = ir.Constant(REALS, None), builder.shl(dim, make.constant(2))
        offsets = [make.constant(4 * WIDTH * i) for i in range(VECTORS)]
        squares = [cgutils.alloca_once_value(builder, zeros) for _ in offsets]
        sums = [[cgutils.alloca_once(builder, REALS) for _ in offsets] for _ in range(OUTPUTS)]
        with cgutils.for_range(builder, builder.udiv(dim, make.constant(OUTPUTS))) as block:
            first = builder.mul(block.index, make.constant(OUTPUTS))
            for place in (place for row in sums for place in row):
                builder.store(zeros, place)
            at = builder.add(form, builder.shl(first, make.constant(2)))
            with cgutils.for_range(builder, builder.sub(dim, first)) as column:
                index = builder.add(first, column.index)
                line = builder.add(lines, builder.mul(index, stride))
                numbers = [make.load(line, offset, 4) for offset in offsets]
                here = builder.add(at, builder.mul(index, step))
                for output, row in enumerate(sums):
                    factor = make.splat(builder.load(make.at(here, make.constant(4 * output), REAL)))
                    for number, place in zip(numbers, row, strict=True):
                        builder.store(make.fused(number, factor, builder.load(place)), place)
            line = builder.add(lines, builder.mul(first, stride))
            for row in sums:
                for offset, place, square in zip(offsets, row, squares, strict=True):
                    own = make.load(line, offset, 4)
                    builder.store(make.fused(own, builder.load(place), builder.load(square)), square)
                line = builder.add(line, stride)
        for offset, place in zip(offsets, squares, strict=True):
            square = builder.load(place)
            below = builder.fcmp_ordered("<", square, zeros)  # by rounding; what is not a number stays so
            length = make.of_reals("sqrt", builder.select(below, zeros, square))
            target = make.at(out, offset, REALS)
            builder.store(builder.fadd(builder.load(target, align=4), length), target, align=4)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 5), codegen


@njit(nogil=True, fastmath=FASTMATH, error_model="numpy", cache=True)
def lengths_pass(
    thread: int,
    counter: Any,  # int64 [2], zeros at the start: see kernels/team.py
    threads: int,
    values: Any,  # fp32 [length, dim]
    weights: Any,  # fp32 or bf16 as uint16 [hidden, heads * dim]: the output projection
    column: int,  # of it, where the KV head's query heads begin
    wide: Any,  # fp32 [hidden, group * dim]: work space
    forms: Any,  # fp32 [group, dim, dim]: work space
    out: Any,  # fp32 [padded], written: the mean over the query heads
) -> None:
    """One KV head; `padded` is a multiple of TOKENS, dim of LANES. Every thread of a team makes this call."""
    length, dim = values.shape
    group, tiles = forms.shape[0], out.shape[0] // TOKENS
    hidden, width = wide.shape
    for row in range(hidden * thread // threads, hidden * (thread + 1) // threads):
        for i in range(width):
            wide[row, i] = widen(weights[row, column + i])
    meet(counter, 1, threads)
    parts = dim // LINES
    for part in range(group * parts * thread // threads, group * parts * (thread + 1) // threads):
        head, line = part // parts, part % parts * LINES
        form, columns = forms[head], wide.ctypes.data + 4 * head * dim
        for lane in range(0, line + LINES, LANES):
            place = form.ctypes.data + 4 * (line * dim + lane)
            part_of_form(columns, 4 * width, hidden, line, lane, place, 4 * dim)
        for index in range(line, line + LINES):  # the lower triangle, doubled beside the diagonal
            for i in range(dim):
                if i > index:
                    form[index, i] = 0
                elif i < index:
                    form[index, i] *= np.float32(2)
    meet(counter, 2, threads)
    turned = np.empty((dim, TOKENS), np.float32)
    lines, share = turned.ctypes.data, np.float32(1) / np.float32(group)
    for tile in range(tiles * thread // threads, tiles * (thread + 1) // threads):
        first = tile * TOKENS
        for token in range(0, TOKENS, WIDTH):
            for number in range(0, dim, WIDTH):
                place = lines + 4 * (number * TOKENS + token)
                turn(values.ctypes.data + 4 * number, 4 * dim, first + token, length - 1, place, 4 * TOKENS)
        for token in range(first, first + TOKENS):
            out[token] = 0
        target = out.ctypes.data + 4 * first
        for head in range(group):
            add_lengths(lines, 4 * TOKENS, dim, forms.ctypes.data + 4 * head * dim * dim, target)
        for token in range(first, first + TOKENS):
            out[token] *= share
