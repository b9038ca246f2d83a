"""Compiled products of a group's queries with a stretch of keys, and weighted sums of values, in explicit vectors.

How many vectors a head has and how many query heads share it are known when the code is made: they are the lengths of
two tuples, `lanes` (head_dim / 16 entries, none where that is no whole number) and `group`. Queries and sums stay in
registers. The sums are made in one fixed order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types, uint16
from numba.core import cgutils
from numba.extending import intrinsic, overload

from .arithmetic import FASTMATH, widen
from .vectors import REAL, REALS, WIDTH, Vectors


@intrinsic
def products_in_vectors(
    typingctx: Any, queries: Any, keys: Any, count: Any, logits: Any, stride: Any, lanes: Any, group: Any, like: Any
) -> Any:
    """`logits[g * stride + c] = queries[g] . keys[c]`; addresses, and `count` columns."""
    heads, vectors, item = len(group), len(lanes), 2 if like.dtype == uint16 else 4
    row_bytes = vectors * WIDTH * item

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        make, (query, key, columns, out, step, *_) = Vectors(builder), args
        held = [
            [make.load(query, make.constant((g * vectors + i) * WIDTH * 4), 4) for i in range(vectors)]
            for g in range(heads)
        ]
        with cgutils.for_range(builder, columns) as loop:
            row = builder.add(key, builder.mul(loop.index, make.constant(row_bytes)))
            parts = [make.load(row, make.constant(i * WIDTH * item), item) for i in range(vectors)]
            for g in range(heads):
                total = builder.fmul(held[g][0], parts[0])
                for i in range(1, vectors):
                    total = make.fused(held[g][i], parts[i], total)
                place = builder.add(builder.mul(make.constant(g), step), loop.index)
                builder.store(make.total(total), make.at(out, builder.mul(place, make.constant(4)), REAL))
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 5, lanes, group, like), codegen


@intrinsic
def sums_in_vectors(
    typingctx: Any, weights: Any, stride: Any, values: Any, count: Any, out: Any, lanes: Any, group: Any, like: Any
) -> Any:
    """`out[g] = sum_c weights[g * stride + c] * values[c]`; addresses, and `count` columns."""
    heads, vectors, item = len(group), len(lanes), 2 if like.dtype == uint16 else 4
    row_bytes = vectors * WIDTH * item

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        make, (weight, step, value, columns, target, *_) = Vectors(builder), args
        totals = [[cgutils.alloca_once(builder, REALS) for _ in range(vectors)] for _ in range(heads)]
        for row in totals:
            for place in row:
                builder.store(ir.Constant(REALS, None), place)
        with cgutils.for_range(builder, columns) as loop:
            line = builder.add(value, builder.mul(loop.index, make.constant(row_bytes)))
            parts = [make.load(line, make.constant(i * WIDTH * item), item) for i in range(vectors)]
            for g in range(heads):
                index = builder.add(builder.mul(make.constant(g), step), loop.index)
                scalar = builder.load(make.at(weight, builder.mul(index, make.constant(4)), REAL))
                share = make.splat(scalar)
                for i in range(vectors):
                    builder.store(make.fused(share, parts[i], builder.load(totals[g][i])), totals[g][i])
        for g in range(heads):
            for i in range(vectors):
                offset = make.constant((g * vectors + i) * WIDTH * 4)
                builder.store(builder.load(totals[g][i]), make.at(target, offset, REALS), align=4)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 5, lanes, group, like), codegen


def key_products(queries: Any, keys: Any, first: Any, count: Any, logits: Any, at: Any, lanes: Any, group: Any) -> Any:
    """`logits[g, at + c] = queries[g] . keys[first + c]` for `count` columns."""
    raise AssertionError("compiled code only")


@overload(key_products, fastmath=FASTMATH)
def _key_products(queries: Any, keys: Any, first: Any, count: Any, logits: Any, at: Any, lanes: Any, group: Any) -> Any:
    return products if len(lanes) else plain_products


def products(queries: Any, keys: Any, first: Any, count: Any, logits: Any, at: Any, lanes: Any, group: Any) -> Any:
    products_in_vectors(
        queries.ctypes.data,
        keys[first].ctypes.data,
        count,
        logits.ctypes.data + 4 * at,
        logits.shape[1],
        lanes,
        group,
        keys,
    )


def plain_products(
    queries: Any, keys: Any, first: Any, count: Any, logits: Any, at: Any, lanes: Any, group: Any
) -> Any:
    for column in range(count):
        row = keys[first + column]
        for g in range(queries.shape[0]):
            query, dot = queries[g], np.float32(0)
            for d in range(queries.shape[1]):
                dot += query[d] * widen(row[d])
            logits[g, at + column] = dot


def weighted_values(weights: Any, values: Any, first: Any, count: Any, out: Any, lanes: Any, group: Any) -> Any:
    """`out[g] = sum_c weights[g, c] * values[first + c]` for `count` columns."""
    raise AssertionError("compiled code only")


@overload(weighted_values, fastmath=FASTMATH)
def _weighted_values(weights: Any, values: Any, first: Any, count: Any, out: Any, lanes: Any, group: Any) -> Any:
    return sums if len(lanes) else plain_sums


def sums(weights: Any, values: Any, first: Any, count: Any, out: Any, lanes: Any, group: Any) -> Any:
    sums_in_vectors(
        weights.ctypes.data,
        weights.shape[1],
        values[first].ctypes.data,
        count,
        out.ctypes.data,
        lanes,
        group,
        values,
    )


def plain_sums(weights: Any, values: Any, first: Any, count: Any, out: Any, lanes: Any, group: Any) -> Any:
    for g in range(out.shape[0]):
        for d in range(out.shape[1]):
            out[g, d] = np.float32(0)
        for column in range(count):
            weight, row = weights[g, column], values[first + column]
            for d in range(out.shape[1]):
                out[g, d] += weight * widen(row[d])
