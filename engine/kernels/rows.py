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

from .arithmetic import FASTMATH, LINE, widen
from .vectors import REAL, REALS, WIDTH, WORDS, Vectors

AHEAD = 4096  # bytes between what is worked on and what is asked for


def _wide(make: Vectors, address: Any, vectors: int, item: int, in_pairs: bool) -> list[Any]:
    """A row of `vectors * 16` numbers as fp32 vectors. In pairs: of 32 bf16 the even ones, then the odd ones, which
    takes half the instructions, since a pair is one word."""
    if not in_pairs:
        return [make.load(address, make.constant(i * WIDTH * item), item) for i in range(vectors)]
    builder, parts = make.builder, []
    for i in range(vectors // 2):
        words = builder.load(make.at(address, make.constant(i * LINE), WORDS), align=2)
        parts.append(builder.bitcast(builder.shl(words, ir.Constant(WORDS, [16] * WIDTH)), REALS))
        parts.append(builder.bitcast(builder.and_(words, ir.Constant(WORDS, [0xFFFF0000] * WIDTH)), REALS))
    return parts


def merged(make: Vectors, first: Any, second: Any) -> Any:
    """Sums of neighbours within two vectors, those of the first in the lower half."""
    builder = make.builder
    even, odd = (
        builder.shuffle_vector(first, second, ir.Constant(WORDS, list(range(start, 2 * WIDTH, 2)))) for start in (0, 1)
    )
    return builder.fadd(even, odd)


def _ask_ahead(make: Vectors, row: Any, row_bytes: int) -> None:
    for offset in range(0, row_bytes, LINE):
        make.ask(row, make.constant(AHEAD + offset))


@intrinsic
def products_in_vectors(
    typingctx: Any, queries: Any, keys: Any, count: Any, logits: Any, stride: Any, lanes: Any, group: Any, like: Any
) -> Any:
    """`logits[g * stride + c] = queries[g] . keys[c]`; addresses, and `count` columns, a multiple of 16."""
    heads, vectors, item = len(group), len(lanes), 2 if like.dtype == uint16 else 4
    row_bytes, in_pairs = vectors * WIDTH * item, item == 2 and vectors % 2 == 0

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        make, (query, key, columns, out, step, *_) = Vectors(builder), args
        held = []
        for g in range(heads):
            plain = [make.load(query, make.constant((g * vectors + i) * WIDTH * 4), 4) for i in range(vectors)]
            if in_pairs:
                plain = [
                    builder.shuffle_vector(*plain[i : i + 2], ir.Constant(WORDS, list(range(start, 2 * WIDTH, 2))))
                    for i in range(0, vectors, 2)
                    for start in (0, 1)
                ]
            held.append(plain)
        with cgutils.for_range(builder, builder.lshr(columns, make.constant(4))) as loop:
            block = builder.add(key, builder.mul(loop.index, make.constant(row_bytes * WIDTH)))
            waiting: list[list[tuple[int, Any]]] = [[] for _ in range(heads)]  # how many columns each stands for
            for column in range(WIDTH):
                row = builder.add(block, make.constant(column * row_bytes))
                # between the products: a burst would fill the buffers for outstanding lines and stall
                _ask_ahead(make, row, row_bytes)
                parts = _wide(make, row, vectors, item, in_pairs)
                for g in range(heads):
                    total = builder.fmul(held[g][0], parts[0])
                    for i in range(1, vectors):
                        total = make.fused(held[g][i], parts[i], total)
                    size = 1
                    while waiting[g] and waiting[g][-1][0] == size:
                        total = merged(make, waiting[g].pop()[1], total)
                        size *= 2
                    waiting[g].append((size, total))
            for g in range(heads):
                place = builder.add(builder.mul(make.constant(g), step), builder.shl(loop.index, make.constant(4)))
                builder.store(waiting[g][0][1], make.at(out, builder.mul(place, make.constant(4)), REALS), align=4)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 5, lanes, group, like), codegen


@intrinsic
def sums_in_vectors(
    typingctx: Any, weights: Any, stride: Any, values: Any, count: Any, out: Any, lanes: Any, group: Any, like: Any
) -> Any:
    """`out[g] = sum_c weights[g * stride + c] * values[c]`; addresses, and `count` columns."""
    heads, vectors, item = len(group), len(lanes), 2 if like.dtype == uint16 else 4
    row_bytes, in_pairs = vectors * WIDTH * item, item == 2 and vectors % 2 == 0

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        make, (weight, step, value, columns, target, *_) = Vectors(builder), args
        zeros = ir.Constant(REALS, None)
        totals = [[cgutils.alloca_once_value(builder, zeros) for _ in range(vectors)] for _ in range(heads)]
        with cgutils.for_range(builder, columns) as loop:
            row = builder.add(value, builder.mul(loop.index, make.constant(row_bytes)))
            _ask_ahead(make, row, row_bytes)
            parts = _wide(make, row, vectors, item, in_pairs)
            for g in range(heads):
                index = builder.add(builder.mul(make.constant(g), step), loop.index)
                scalar = builder.load(make.at(weight, builder.mul(index, make.constant(4)), REAL))
                share = make.splat(scalar)
                for i in range(vectors):
                    builder.store(make.fused(share, parts[i], builder.load(totals[g][i])), totals[g][i])
        for g in range(heads):
            whole = [builder.load(total) for total in totals[g]]
            if in_pairs:  # back to the order of the numbers
                order = [i // 2 + i % 2 * WIDTH for i in range(2 * WIDTH)]
                whole = [
                    builder.shuffle_vector(*whole[i : i + 2], ir.Constant(WORDS, order[start : start + WIDTH]))
                    for i in range(0, vectors, 2)
                    for start in (0, WIDTH)
                ]
            for i, vector in enumerate(whole):
                builder.store(vector, make.at(target, make.constant((g * vectors + i) * WIDTH * 4), REALS), align=4)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 5, lanes, group, like), codegen


def key_products(queries: Any, keys: Any, first: Any, count: Any, logits: Any, at: Any, lanes: Any, group: Any) -> Any:
    """`logits[g, at + c] = queries[g] . keys[first + c]` for `count` columns."""
    raise AssertionError("compiled code only")


@overload(key_products, fastmath=FASTMATH)
def _key_products(queries: Any, keys: Any, first: Any, count: Any, logits: Any, at: Any, lanes: Any, group: Any) -> Any:
    return products if len(lanes) else plain_products


def products(queries: Any, keys: Any, first: Any, count: Any, logits: Any, at: Any, lanes: Any, group: Any) -> Any:
    whole = count // WIDTH * WIDTH
    products_in_vectors(
        queries.ctypes.data,
        keys[first].ctypes.data,
        whole,
        logits.ctypes.data + 4 * at,
        logits.shape[1],
        lanes,
        group,
        keys,
    )
    for column in range(whole, count):
        row = keys[first + column]
        for g in range(queries.shape[0]):
            query, dot = queries[g], np.float32(0)
            for d in range(queries.shape[1]):
                dot += query[d] * widen(row[d])
            logits[g, at + column] = dot


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
