"""Compiled products of int4 rows with a vector, in explicit vectors: a compiler does not find these by itself.

A row of C columns is C / 32 groups of 16 bytes; byte j of a group holds column j in its low and column 16 + j in its
high half. A group's numbers are `scale * q + low` with q = 0 .. 15, both factors bf16, side by side. So a group adds
`scale * (q . x) + low * sum(x)`, and the sums of x over groups are made once for all rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from .arithmetic import FASTMATH, ask_for
from .digits import GROUP, SPAN, SUPPORTED, int4_products, stride_of
from .vectors import Vectors

AHEAD = 2048


@intrinsic
def group_products(typingctx: Any, data: Any, factors: Any, vector: Any, sums: Any, groups: Any) -> Any:
    """One row times a vector: addresses of bytes `[groups, 16]`, bf16 `[groups, 2]`, the fp32 vector and its sums."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte, half, word, real = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()
        bytes16, words16, reals16 = (ir.VectorType(kind, 16) for kind in (byte, word, real))

        def at(address: Any, kind: Any) -> Any:
            return builder.inttoptr(address, kind.as_pointer())

        def splat(scalar: Any) -> Any:
            undefined = ir.Constant(reals16, ir.Undefined)
            single = builder.insert_element(undefined, scalar, ir.Constant(word, 0))
            return builder.shuffle_vector(single, undefined, ir.Constant(ir.VectorType(word, 16), [0] * 16))

        def widened(address: Any) -> Any:
            bits = builder.zext(builder.load(at(address, half)), word)
            return builder.bitcast(builder.shl(bits, ir.Constant(word, 16)), real)

        def plus(address: Any, offset: int) -> Any:
            return builder.add(address, ir.Constant(address.type, offset))

        kind = ir.FunctionType(reals16, [reals16] * 3)
        multiply_add = cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.v16f32")

        def fused(a: Any, b: Any, c: Any) -> Any:
            return builder.call(multiply_add, [a, b, c])

        make = Vectors(builder)
        base, pairs, x, totals, count = args
        total = cgutils.alloca_once(builder, reals16)
        builder.store(ir.Constant(reals16, None), total)
        lows = cgutils.alloca_once(builder, real)
        builder.store(ir.Constant(real, 0.0), lows)
        with cgutils.for_range(builder, count) as loop:
            index = loop.index
            # one at a time, between the products: a burst would fill the buffers for outstanding lines and stall
            make.ask(base, builder.add(builder.shl(index, ir.Constant(index.type, 4)), make.constant(AHEAD)))
            packed = builder.load(
                at(builder.add(base, builder.shl(index, ir.Constant(index.type, 4))), bytes16), align=1
            )
            low = builder.and_(packed, ir.Constant(bytes16, [15] * 16))
            high = builder.lshr(packed, ir.Constant(bytes16, [4] * 16))
            first, second = (builder.sitofp(builder.zext(part, words16), reals16) for part in (low, high))
            place = builder.add(x, builder.shl(index, ir.Constant(index.type, 7)))
            left = builder.load(at(place, reals16), align=4)
            right = builder.load(at(plus(place, 64), reals16), align=4)
            product = fused(second, right, builder.fmul(first, left))
            pair = builder.add(pairs, builder.shl(index, ir.Constant(index.type, 2)))
            builder.store(fused(splat(widened(pair)), product, builder.load(total)), total)
            part = builder.load(at(builder.add(totals, builder.shl(index, ir.Constant(index.type, 2))), real))
            builder.store(builder.fma(widened(plus(pair, 2)), part, builder.load(lows)), lows)
        # a fixed tree: halves are added until one number is left
        vector_sum, width = builder.load(total), 16
        while width > 1:
            width //= 2
            undefined = ir.Constant(vector_sum.type, ir.Undefined)
            parts = [
                builder.shuffle_vector(
                    vector_sum, undefined, ir.Constant(ir.VectorType(word, width), list(range(start, start + width)))
                )
                for start in (0, width)
            ]
            vector_sum = builder.fadd(*parts)
        whole = builder.extract_element(vector_sum, ir.Constant(word, 0))
        return builder.fadd(whole, builder.load(lows))

    return types.float32(*(types.int64,) * 5), codegen


@njit(fastmath=FASTMATH, error_model="numpy")
def int4_rows(address: int, factors: int, begin: int, end: int, x: Any, scratch: Any, out: Any, at: int) -> None:
    """`out[s, at + r] = matrix[r] . x[s]` for rows begin..end of an int4 matrix and every vector; see digits.take."""
    if SUPPORTED and x.shape[1] >= SPAN:
        groups, stride, taken = x.shape[1] // GROUP, stride_of(scratch[0]), scratch.ctypes.data
        for row in range(begin, end):
            data, pairs = address + row * groups * 16, factors + row * groups * 4
            ask_for(pairs + AHEAD // 4, groups * 4)
            for s in range(x.shape[0]):
                out[s, at + row] = int4_products(data, pairs, taken + s * scratch.strides[0], stride, groups)
    else:
        widened_rows(address, factors, begin, end, x, out, at)


@njit(fastmath=FASTMATH, error_model="numpy")
def widened_rows(address: int, factors: int, begin: int, end: int, x: Any, out: Any, at: int) -> None:
    """The same with levels widened to fp32 in registers, on any CPU."""
    vectors, groups = x.shape[0], x.shape[1] // GROUP
    sums = np.empty((vectors, groups), np.float32)
    for s in range(vectors):
        for group in range(groups):
            total = np.float32(0)
            for number in x[s, group * GROUP : (group + 1) * GROUP]:
                total += number
            sums[s, group] = total
    vector, added = x.ctypes.data, sums.ctypes.data
    for row in range(begin, end):
        data, pairs = address + row * groups * 16, factors + row * groups * 4
        ask_for(pairs + AHEAD // 4, groups * 4)
        for s in range(vectors):
            place = vector + s * x.strides[0]
            out[s, at + row] = group_products(data, pairs, place, added + s * sums.strides[0], groups)
