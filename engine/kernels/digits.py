"""Products of int8 and int4 weights with fp32 activations in integer arithmetic, for CPUs with AVX-512 VNNI.

Widening an int8 weight to fp32 takes more of a core than the memory takes to deliver it. So the activations are written
once per vector in fixed point of 24 bits, relative to the largest, as three signed digits of 8 bits: `x = unit *
(65536 d2 + 256 d1 + d0)`. An instruction then adds four products of a byte of weights and a digit at a time, exactly.
What is lost is less than 2^-24 of the largest activation per product, as much as fp32 loses in the sum.

Scratch of a thread, in bytes: three digits `[3, stride]`; int32 `[3, 16]`, what a weight's offset of 128 adds, negated;
fp32 unit in a line of its own; for int4 the sums of whole groups, fp32 `[stride / 128, 16]`, in every fourth place.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import int8, njit, types, uint8
from numba.core import cgutils
from numba.extending import intrinsic, overload

from .arithmetic import FASTMATH, LINE
from .vectors import BYTE, BYTES, REAL, REALS, WIDTH, WORD, WORDS, Vectors

BLOCK = 4  # rows that share the loads of the digits
AHEAD = 4096  # bytes between what is worked on and what is asked for
LARGEST = 8_355_000  # of the fixed point numbers: three digits of -128 .. 127 reach 8,355,711
PLANES = 3
SPAN = 128  # columns of int4 in a cache line
GROUP = 32  # columns of an int4 group, see int4.py
GROUPS = 4  # int4 groups in a cache line
LINE_BYTES = ir.VectorType(BYTE, LINE)
SUPPORTED = all(binding.get_host_cpu_features().get(name, False) for name in ("avx512f", "avx512bw", "avx512vnni"))


def scratch_bytes(columns: int) -> int:
    """Bytes of scratch for vectors of up to so many numbers."""
    stride = -(-columns // SPAN) * SPAN
    return PLANES * stride + stride // 2 + 4 * LINE


@njit(error_model="numpy")
def stride_of(scratch: Any) -> Any:
    """Numbers of a digit's plane in a scratch."""
    return (scratch.shape[0] - 4 * LINE) * 2 // 7


class Integers(Vectors):
    """Steps that the loops below share."""

    def dot(self, total: Any, unsigned: Any, signed: Any) -> Any:
        """int32 `[16]`: add to each number four products of bytes, the first unsigned."""
        kind = ir.FunctionType(WORDS, [WORDS] * 3)
        function = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.x86.avx512.vpdpbusd.512")
        return self.builder.call(function, [total, self.words(unsigned), self.words(signed)])

    def words(self, line: Any) -> Any:
        return self.builder.bitcast(line, WORDS)

    def line(self, address: Any, offset: Any) -> Any:
        return self.builder.load(self.at(address, offset, LINE_BYTES), align=1)

    def fill(self, byte: int) -> Any:
        return ir.Constant(LINE_BYTES, [byte] * LINE)

    def joined(self, planes: list[Any]) -> Any:
        """fp32 `[16]` of the digits' int32 sums, lowest first: each is exact up to 16,000 columns."""
        low, middle, high = (self.builder.sitofp(plane, REALS) for plane in planes)
        weight = [ir.Constant(REALS, [factor] * WIDTH) for factor in (256.0, 65536.0)]
        return self.fused(high, weight[1], self.fused(middle, weight[0], low))

    def unit(self, digits: Any, stride: Any) -> Any:
        base = self.builder.mul(stride, self.constant(PLANES))
        return self.builder.load(self.at(self.builder.add(digits, base), self.constant(PLANES * LINE), REAL))


@intrinsic
def split(typingctx: Any, vector: Any, scratch: Any, stride: Any, count: Any, like: Any) -> Any:
    """Write the digits of `16 * count` fp32 numbers and their unit; addresses. Columns in the order of `like`'s rows.

    A vector with a number that is not finite gets a unit that is not a number.
    """
    int4 = like.dtype == uint8

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        make, (x, target, step, chunks, _) = Integers(builder), args
        largest, damage = (cgutils.alloca_once_value(builder, ir.Constant(REALS, [0.0] * WIDTH)) for _ in range(2))
        with cgutils.for_range(builder, chunks) as loop:
            numbers = make.load(x, builder.mul(loop.index, make.constant(4 * WIDTH)), 4)
            builder.store(make.of_reals("maxnum", builder.load(largest), make.of_reals("fabs", numbers)), largest)
            builder.store(builder.fadd(builder.load(damage), builder.fsub(numbers, numbers)), damage)
        scalar = ir.FunctionType(REAL, [REALS])
        reduce = cgutils.get_or_insert_function(builder.module, scalar, "llvm.vector.reduce.fmax.v16f32")
        most = builder.call(reduce, [builder.load(largest)])
        some = builder.fcmp_ordered(">", most, ir.Constant(REAL, 0.0))
        scale = builder.select(some, builder.fdiv(ir.Constant(REAL, float(LARGEST)), most), ir.Constant(REAL, 0.0))
        unit = builder.fadd(builder.fdiv(most, ir.Constant(REAL, float(LARGEST))), make.total(builder.load(damage)))
        behind = builder.add(target, builder.mul(step, make.constant(PLANES)))
        builder.store(unit, make.at(behind, make.constant(PLANES * LINE), REAL))
        factor = make.splat(scale)
        with cgutils.for_range(builder, chunks) as loop:
            numbers = make.load(x, builder.mul(loop.index, make.constant(4 * WIDTH)), 4)
            left = builder.fptosi(make.of_reals("rint", builder.fmul(numbers, factor)), WORDS)
            place = builder.mul(loop.index, make.constant(WIDTH))
            if int4:  # 64 columns of low halves, then 64 of high ones, see int4.py
                span = builder.mul(builder.lshr(loop.index, make.constant(3)), make.constant(SPAN))
                high = builder.mul(builder.and_(loop.index, make.constant(1)), make.constant(LINE))
                group = builder.and_(builder.lshr(loop.index, make.constant(1)), make.constant(3))
                # groups that do not fill a line are the last of theirs, see int4_products
                rest = builder.and_(builder.lshr(chunks, make.constant(1)), make.constant(3))
                last = builder.icmp_unsigned(
                    "==", builder.lshr(loop.index, make.constant(3)), builder.lshr(chunks, make.constant(3))
                )
                group = builder.add(
                    group, builder.select(last, builder.sub(make.constant(GROUPS), rest), make.constant(0))
                )
                place = builder.add(builder.add(span, high), builder.mul(group, make.constant(WIDTH)))
            for plane in range(PLANES):
                digit = builder.trunc(left, BYTES)
                offset = builder.add(builder.mul(step, make.constant(plane)), place)
                builder.store(digit, make.at(target, offset, BYTES), align=1)
                difference = builder.sub(left, builder.sext(digit, WORDS))
                left = builder.ashr(difference, ir.Constant(WORDS, [8] * WIDTH))
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 4, like), codegen


@intrinsic
def weigh_offsets(typingctx: Any, scratch: Any, stride: Any, lines: Any) -> Any:
    """Write what the offset of 128 adds to each of the sixteen sums of each digit over `lines` lines, negated."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        make, (digits, step, count) = Integers(builder), args
        totals = [cgutils.alloca_once_value(builder, ir.Constant(WORDS, [0] * WIDTH)) for _ in range(PLANES)]
        with cgutils.for_range(builder, count) as loop:
            for plane, total in enumerate(totals):
                offset = builder.add(
                    builder.mul(step, make.constant(plane)), builder.mul(loop.index, make.constant(LINE))
                )
                builder.store(make.dot(builder.load(total), make.fill(128), make.line(digits, offset)), total)
        behind = builder.add(digits, builder.mul(step, make.constant(PLANES)))
        for plane, total in enumerate(totals):
            builder.store(
                builder.neg(builder.load(total)), make.at(behind, make.constant(plane * LINE), WORDS), align=4
            )
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@njit(fastmath=FASTMATH, error_model="numpy")
def sum_groups(x: Any, sums: Any) -> None:
    """Sums of groups, four to a line of sixteen places; the rest of the places are zeros."""
    groups = x.shape[0] // GROUP
    for place in range(sums.shape[0]):
        sums[place] = np.float32(0)
    missing = -groups % GROUPS  # groups that do not fill a line are the last of theirs
    for group in range(groups):
        total = np.float32(0)
        for number in x[group * GROUP : (group + 1) * GROUP]:
            total += number
        sums[(group if group < groups // GROUPS * GROUPS else group + missing) * GROUPS] = total


def take_one(x: Any, scratch: Any, like: Any) -> Any:
    """Write a vector's digits into a thread's scratch, if the products with weights like these are made from them."""
    raise AssertionError("compiled code only")


@overload(take_one, fastmath=FASTMATH)
def _take(x: Any, scratch: Any, like: Any) -> Any:
    if SUPPORTED and like.dtype == int8:

        def as_stored(x: Any, scratch: Any, like: Any) -> Any:
            if x.shape[0] % WIDTH == 0:
                address, stride = scratch.ctypes.data, stride_of(scratch)
                split(x.ctypes.data, address, stride, x.shape[0] // WIDTH, like)
                weigh_offsets(address, stride, x.shape[0] // LINE)

        return as_stored
    if SUPPORTED and like.dtype == uint8:

        def in_halves(x: Any, scratch: Any, like: Any) -> Any:
            if x.shape[0] < SPAN:
                return
            stride = stride_of(scratch)
            for plane in range(PLANES):
                scratch[plane * stride + x.shape[0] // SPAN * SPAN : (plane + 1) * stride] = 0
            split(x.ctypes.data, scratch.ctypes.data, stride, x.shape[0] // WIDTH, like)
            start, spans = PLANES * stride + 4 * LINE, (x.shape[0] + SPAN - 1) // SPAN
            sum_groups(x, scratch[start : start + spans * LINE].view(np.float32))

        return in_halves

    def nothing(x: Any, scratch: Any, like: Any) -> Any:
        pass

    return nothing


@intrinsic
def int8_products(typingctx: Any, address: Any, row_bytes: Any, digits: Any, stride: Any, lines: Any, out: Any) -> Any:
    """Four int8 rows times a vector over `lines` cache lines of each row; addresses or bytes. Without scales."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        make, (base, step, taken, plane_step, count, target) = Integers(builder), args
        rows = [builder.add(base, builder.mul(step, make.constant(row))) for row in range(BLOCK)]
        planes = [builder.add(taken, builder.mul(plane_step, make.constant(plane))) for plane in range(PLANES)]
        behind = builder.add(taken, builder.mul(plane_step, make.constant(PLANES)))
        # a weight is read as if 128 were added to it, which makes it unsigned: the sums begin with that taken off
        begin = [builder.load(make.at(behind, make.constant(plane * LINE), WORDS), align=4) for plane in range(PLANES)]
        totals = [[cgutils.alloca_once_value(builder, start) for start in begin] for _ in rows]
        with cgutils.for_range(builder, count) as loop:
            line = builder.mul(loop.index, make.constant(LINE))
            parts = [make.line(plane, line) for plane in planes]
            for row, sums in zip(rows, totals, strict=True):
                make.ask(row, builder.add(line, make.constant(AHEAD)))
                weights = builder.xor(make.line(row, line), make.fill(128))
                for part, total in zip(parts, sums, strict=True):
                    builder.store(make.dot(builder.load(total), weights, part), total)
        unit = make.unit(taken, plane_step)
        for row, sums in enumerate(totals):
            whole = make.total(make.joined([builder.load(total) for total in sums]))
            builder.store(builder.fmul(whole, unit), make.at(target, make.constant(4 * row), REAL))
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 6), codegen


@intrinsic
def int4_products(typingctx: Any, data: Any, factors: Any, digits: Any, stride: Any, groups: Any) -> Any:
    """One int4 row times a vector: addresses of bytes `[groups, 16]`, bf16 `[groups, 2]` and a scratch."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        make, (base, pairs, taken, plane_step, count) = Integers(builder), args
        planes = [builder.add(taken, builder.mul(plane_step, make.constant(plane))) for plane in range(PLANES)]
        sums = builder.add(taken, builder.add(builder.mul(plane_step, make.constant(PLANES)), make.constant(4 * LINE)))
        scaled, lows = (cgutils.alloca_once_value(builder, ir.Constant(REALS, [0.0] * WIDTH)) for _ in range(2))
        quad = ir.VectorType(WORD, GROUPS)

        def add(index: Any, line: Any, place: Any) -> None:
            """Add four groups: what their levels give by their scales, what their lowest values give by the sums."""
            column = builder.mul(index, make.constant(SPAN))
            packed, pair = make.line(base, line), builder.load(make.at(pairs, place, quad), align=4)
            halves = builder.and_(packed, make.fill(15)), builder.lshr(packed, make.fill(4))
            total = ir.Constant(WORDS, [0] * WIDTH)
            for plane in reversed(planes):  # 8 products of 15 * 128, shifted twice by 8 bits, stay below 2^31
                if plane is not planes[-1]:
                    total = builder.shl(total, ir.Constant(WORDS, [8] * WIDTH))
                for half, offset in zip(halves, (0, LINE), strict=True):
                    total = make.dot(total, half, make.line(plane, builder.add(column, make.constant(offset))))
            spread = ir.Constant(WORDS, [place // GROUPS for place in range(WIDTH)])
            words = builder.shuffle_vector(pair, ir.Constant(quad, ir.Undefined), spread)
            scale = builder.bitcast(builder.shl(words, ir.Constant(WORDS, [16] * WIDTH)), REALS)
            low = builder.bitcast(builder.and_(words, ir.Constant(WORDS, [0xFFFF0000] * WIDTH)), REALS)
            builder.store(make.fused(scale, builder.sitofp(total, REALS), builder.load(scaled)), scaled)
            group_sums = make.load(sums, builder.mul(index, make.constant(LINE)), 4)
            builder.store(make.fused(low, group_sums, builder.load(lows)), lows)

        whole, rest = builder.lshr(count, make.constant(2)), builder.and_(count, make.constant(3))
        with cgutils.for_range(builder, whole) as loop:
            line = builder.mul(loop.index, make.constant(LINE))
            # one at a time, between the products: a burst would fill the buffers for outstanding lines and stall
            make.ask(base, builder.add(line, make.constant(AHEAD)))
            add(loop.index, line, builder.mul(loop.index, make.constant(4 * GROUPS)))
        with builder.if_then(builder.icmp_unsigned("!=", rest, make.constant(0))):
            # the last four groups once more: the digits of those that have been worked are zeros there
            line, place = (
                builder.mul(builder.sub(count, make.constant(GROUPS)), make.constant(size)) for size in (WIDTH, 4)
            )
            add(whole, line, place)
        return builder.fadd(
            builder.fmul(make.total(builder.load(scaled)), make.unit(taken, plane_step)),
            make.total(builder.load(lows)),
        )

    return types.float32(*(types.int64,) * 5), codegen
