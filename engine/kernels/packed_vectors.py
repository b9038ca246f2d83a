"""Products with packed keys and sums of packed values in explicit vectors: codes are widened in registers.

Scale and minimum stay out of the inner loops. For keys, which share both over 32 slots of a channel, the query takes
the scale and its product with the minimum is made once: `q . k = sum_d (q_d scale_d) code_d + sum_d q_d minimum_d`. For
values, which share both over 32 channels of a slot, the weight takes the scale. The format stands in
`cache/quantise.py`; bits and channels are known when the code is made, as the lengths of tuples (see rows.py).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .rows import merged
from .vectors import BYTE, BYTES, REAL, REALS, WIDTH, WORDS, Vectors

GROUP = 32  # slots that share a key's scale, and channels that share a value's
AHEAD = 2048  # bytes between what is worked on and what is asked for
HALF_REALS = ir.VectorType(ir.HalfType(), WIDTH)


def value_groups(vectors: int) -> int:
    """Groups of a value's channels, of which there are 16 times `vectors`: one where they are no multiple of 32."""
    return vectors // 2 if vectors % 2 == 0 else 1


def channel_order(vectors: int, bits: int) -> list[list[int]]:
    """The channels of each vector that `Packed.codes` gives; those of a pair of vectors are the same 32."""
    if bits == 4 and vectors % 2 == 0:
        return [[32 * (i // 2) + 2 * lane + i % 2 for lane in range(WIDTH)] for i in range(vectors)]
    each, size = 8 // bits, 2 * bits
    return [[WIDTH * i + lane % size * each + lane // size for lane in range(WIDTH)] for i in range(vectors)]


class Packed(Vectors):
    """Steps that the two loops share."""

    def codes(self, address: Any, vectors: int, bits: int) -> list[Any]:
        """A slot's codes as fp32 vectors, in the order of `channel_order`."""
        builder = self.builder
        mask = ir.Constant(WORDS, [2**bits - 1] * WIDTH)
        parts = []
        if bits == 4 and vectors % 2 == 0:  # a byte holds two neighbours: 16 bytes give the even and the odd ones
            for i in range(0, vectors, 2):
                joined = builder.load(self.at(address, self.constant(i * 8), BYTES), align=1)
                words = builder.zext(joined, WORDS)
                parts.append(builder.and_(words, mask))
                parts.append(builder.lshr(words, ir.Constant(WORDS, [4] * WIDTH)))
        else:
            size = 2 * bits  # bytes of 16 channels; each is laid into as many lanes as it has codes
            small = ir.VectorType(BYTE, size)
            shifts = ir.Constant(WORDS, [lane // size * bits for lane in range(WIDTH)])
            lanes = ir.Constant(WORDS, [lane % size for lane in range(WIDTH)])
            for i in range(vectors):
                joined = builder.load(self.at(address, self.constant(i * size), small), align=1)
                laid = builder.shuffle_vector(joined, ir.Constant(small, ir.Undefined), lanes)
                words = builder.zext(laid, WORDS)
                parts.append(words if bits == 8 else builder.and_(builder.lshr(words, shifts), mask))
        return [builder.sitofp(part, REALS) for part in parts]

    def halves(self, address: Any, offset: Any) -> Any:
        """Sixteen fp16 as fp32."""
        return self.builder.fpext(self.builder.load(self.at(address, offset, HALF_REALS), align=2), REALS)

    def picked(self, lines: list[Any], wanted: list[int]) -> Any:
        """A vector of the numbers at these places of the lines, one behind the other."""
        builder, result = self.builder, ir.Constant(REALS, ir.Undefined)
        for source in sorted({place // WIDTH for place in wanted}):
            order = [WIDTH + place % WIDTH if place // WIDTH == source else lane for lane, place in enumerate(wanted)]
            result = builder.shuffle_vector(result, lines[source], ir.Constant(WORDS, order))
        return result


@intrinsic
def packed_products(
    typingctx: Any,
    queries: Any,
    codes: Any,
    scale: Any,
    minimum: Any,
    groups: Any,
    logits: Any,
    stride: Any,
    lanes: Any,
    heads: Any,
    bits: Any,
) -> Any:
    """`logits[h * stride + c] = queries[h] . keys[c]` of 32 * `groups` slots; addresses of the first group."""
    count, vectors, width = len(heads), len(lanes), len(bits)
    slot_bytes, order = vectors * 2 * width, channel_order(vectors, width)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        make, (query, code, scale, minimum, groups, out, step, *_) = Packed(builder), args
        plain = [
            [make.load(query, make.constant((h * vectors + i) * WIDTH * 4), 4) for i in range(vectors)]
            for h in range(count)
        ]
        held = [[cgutils.alloca_once(builder, REALS) for _ in range(vectors)] for _ in range(count)]
        bases = [cgutils.alloca_once(builder, REALS) for _ in range(count)]
        with cgutils.for_range(builder, groups) as group:
            at = builder.mul(group.index, make.constant(vectors * WIDTH * 2))
            offsets = [builder.add(at, make.constant(i * WIDTH * 2)) for i in range(vectors)]
            factors = [make.halves(scale, offset) for offset in offsets]
            lows = [make.halves(minimum, offset) for offset in offsets]
            for h in range(count):
                scaled = [builder.fmul(part, factor) for part, factor in zip(plain[h], factors, strict=True)]
                for i in range(vectors):
                    builder.store(make.picked(scaled, order[i]), held[h][i])
                low = builder.fmul(plain[h][0], lows[0])
                for i in range(1, vectors):
                    low = make.fused(plain[h][i], lows[i], low)
                builder.store(make.splat(make.total(low)), bases[h])
            with cgutils.for_range(builder, make.constant(GROUP // WIDTH)) as half:
                column = builder.add(
                    builder.mul(group.index, make.constant(GROUP)), builder.mul(half.index, make.constant(WIDTH))
                )
                block = builder.add(code, builder.mul(column, make.constant(slot_bytes)))
                waiting: list[list[tuple[int, Any]]] = [[] for _ in range(count)]  # columns that each stands for
                for slot in range(WIDTH):
                    row = builder.add(block, make.constant(slot * slot_bytes))
                    if slot * slot_bytes % 64 < slot_bytes:
                        make.ask(row, make.constant(AHEAD))
                    parts = make.codes(row, vectors, width)
                    for h in range(count):
                        total = builder.fmul(builder.load(held[h][0]), parts[0])
                        for i in range(1, vectors):
                            total = make.fused(builder.load(held[h][i]), parts[i], total)
                        size = 1
                        while waiting[h] and waiting[h][-1][0] == size:
                            total = merged(make, waiting[h].pop()[1], total)
                            size *= 2
                        waiting[h].append((size, total))
                for h in range(count):
                    line = builder.fadd(waiting[h][0][1], builder.load(bases[h]))
                    place = builder.add(builder.mul(make.constant(h), step), column)
                    builder.store(line, make.at(out, builder.mul(place, make.constant(4)), REALS), align=4)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 7, lanes, heads, bits), codegen


@intrinsic
def packed_sums(
    typingctx: Any,
    weights: Any,
    stride: Any,
    codes: Any,
    scale: Any,
    minimum: Any,
    count: Any,
    shares: Any,
    out: Any,
    lanes: Any,
    heads: Any,
    bits: Any,
) -> Any:
    """`out[h] = sum_c weights[h * stride + c] * values[c]` for `count` columns; addresses of the first slot's numbers.

    `shares`: work space, fp32 `[heads, value groups, stride]`. Scales behind the last column are read, never used.
    """
    size, vectors, width = len(heads), len(lanes), len(bits)
    slot_bytes, order, groups = vectors * 2 * width, channel_order(vectors, width), value_groups(vectors)
    group_of = [i // 2 if groups > 1 or vectors == 2 else 0 for i in range(vectors)]

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        make, (weight, step, code, scale, minimum, columns, share, target, *_) = Packed(builder), args
        zeros = ir.Constant(REALS, None)
        lows = [[cgutils.alloca_once_value(builder, zeros) for _ in range(groups)] for _ in range(size)]
        totals = [[cgutils.alloca_once_value(builder, zeros) for _ in range(vectors)] for _ in range(size)]
        blocks = builder.lshr(builder.add(columns, make.constant(WIDTH - 1)), make.constant(4))
        numbers = ir.Constant(WORDS, list(range(WIDTH)))

        def line_of(h: int, group: int) -> Any:
            """Where a head's shares of a group of channels begin, in bytes."""
            return builder.mul(step, make.constant(4 * (h * groups + group)))

        with cgutils.for_range(builder, blocks) as loop:
            first = builder.shl(loop.index, make.constant(4))
            left = builder.trunc(builder.sub(columns, first), ir.IntType(32))
            limit = builder.shuffle_vector(
                builder.insert_element(ir.Constant(WORDS, ir.Undefined), left, ir.Constant(ir.IntType(32), 0)),
                ir.Constant(WORDS, ir.Undefined),
                ir.Constant(WORDS, [0] * WIDTH),
            )
            there = builder.icmp_signed("<", numbers, limit)
            at = builder.mul(first, make.constant(2 * groups))
            read = [
                [make.halves(table, builder.add(at, make.constant(2 * WIDTH * i))) for i in range(groups)]
                for table in (scale, minimum)
            ]
            places = [[lane * groups + group for lane in range(WIDTH)] for group in range(groups)]
            factors, least = (
                [builder.select(there, make.picked(lines, places[group]), zeros) for group in range(groups)]
                for lines in read
            )
            for h in range(size):
                offset = builder.mul(builder.add(builder.mul(make.constant(h), step), first), make.constant(4))
                part = builder.select(there, make.load(weight, offset, 4), zeros)
                for group in range(groups):
                    place = builder.add(line_of(h, group), builder.mul(first, make.constant(4)))
                    builder.store(builder.fmul(part, factors[group]), make.at(share, place, REALS), align=4)
                    builder.store(make.fused(part, least[group], builder.load(lows[h][group])), lows[h][group])
        with cgutils.for_range(builder, columns) as loop:
            row = builder.add(code, builder.mul(loop.index, make.constant(slot_bytes)))
            make.ask(row, make.constant(AHEAD))
            parts = make.codes(row, vectors, width)
            four = builder.mul(loop.index, make.constant(4))
            for h in range(size):
                each = [
                    make.splat(builder.load(make.at(share, builder.add(line_of(h, group), four), REAL)))
                    for group in range(groups)
                ]
                for i in range(vectors):
                    total = totals[h][i]
                    builder.store(make.fused(each[group_of[i]], parts[i], builder.load(total)), total)
        back = {channel: i * WIDTH + lane for i, line in enumerate(order) for lane, channel in enumerate(line)}
        for h in range(size):
            found = [builder.load(total) for total in totals[h]]
            base = [make.splat(make.total(builder.load(low))) for low in lows[h]]
            for i in range(vectors):
                line = make.picked(found, [back[i * WIDTH + lane] for lane in range(WIDTH)])
                line = builder.fadd(line, base[group_of[i]])
                builder.store(line, make.at(target, make.constant((h * vectors + i) * WIDTH * 4), REALS), align=4)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 8, lanes, heads, bits), codegen
