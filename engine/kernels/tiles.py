"""A CPU's matrix tiles (AMX): steps of products of bf16 and int8 weights with fp32 activations, as exact as fp32.

A tile instruction adds 16 rows of weights times up to 16 vectors over 64 bytes of each row, so that a batch costs the
core little more than one vector. Weights are read where they lie, row-major as they are. A vector is written as three
planes: for bf16 weights x = high + middle + low, three bf16 that hold its 24 bits exactly; for int8 weights the three
digits of `digits.py`. Each plane has sums of its own, joined at the end in fp32. A column of a tile never meets another
one: a vector's products do not depend, bit for bit, on how many vectors there are.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import int8, types, uint16
from numba.core import cgutils
from numba.extending import intrinsic

from .arithmetic import LINE
from .digits import PLANES, Integers
from .processor import has_tiles
from .vectors import BYTE, REAL, REALS, WIDTH, WORDS, Vectors

ROWS = 16  # of weights in a tile
TILE = ROWS * LINE  # bytes
SUPPORTED = has_tiles()


class Tiles(Integers):
    """The tile instructions; tiles are named by number."""

    def _call(self, name: str, *arguments: Any) -> None:
        kinds = [argument.type for argument in arguments]
        kind = ir.FunctionType(ir.VoidType(), kinds)
        self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, f"llvm.x86.{name}"), arguments)

    def _number(self, tile: int) -> Any:
        return ir.Constant(BYTE, tile)

    def _pointer(self, address: Any) -> Any:
        return self.builder.inttoptr(address, BYTE.as_pointer())

    def configure(self, address: Any) -> None:
        self._call("ldtilecfg", self._pointer(address))

    def release(self) -> None:
        self._call("tilerelease")

    def zero(self, tile: int) -> None:
        self._call("tilezero", self._number(tile))

    def read(self, tile: int, address: Any, stride: Any) -> None:
        self._call("tileloadd64", self._number(tile), self._pointer(address), stride)

    def write(self, tile: int, address: Any, stride: Any) -> None:
        self._call("tilestored64", self._number(tile), self._pointer(address), stride)

    def multiply(self, name: str, total: int, weights: int, vectors: int) -> None:
        self._call(name, *(self._number(tile) for tile in (total, weights, vectors)))

    def transposed(self, lines: list[Any]) -> list[Any]:
        """Sixteen vectors of sixteen words, transposed: four perfect shuffles of the lines."""
        for _ in range(4):
            mixed = []
            for low, high in zip(lines[: WIDTH // 2], lines[WIDTH // 2 :], strict=True):
                for start in (0, WIDTH // 2):
                    order = [start + i // 2 + i % 2 * WIDTH for i in range(WIDTH)]
                    mixed.append(self.builder.shuffle_vector(low, high, ir.Constant(WORDS, order)))
            lines = mixed
        return lines


@intrinsic
def configure(typingctx: Any, address: Any) -> Any:
    """Give the tiles the shape that 64 bytes at an address say."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        Tiles(builder).configure(args[0])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def release(typingctx: Any) -> Any:
    """Forget what is in the tiles, and their shape."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        Tiles(builder).release()
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def split_bf16(typingctx: Any, vector: Any, planes: Any, stride: Any, rounds: Any) -> Any:
    """Write 32 * `rounds` fp32 numbers as three bf16 each, planes `stride` bytes apart; addresses.

    Each part is cut off, not rounded, so that their sum is the number itself; of one that is not finite it is NaN.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        make, (x, target, step, count) = Vectors(builder), args
        upper = ir.Constant(WORDS, [0xFFFF0000] * WIDTH)
        half = ir.Constant(WORDS, [16] * WIDTH)
        with cgutils.for_range(builder, count) as loop:
            place = builder.mul(loop.index, make.constant(2 * LINE))
            numbers = [make.load(x, builder.add(place, make.constant(offset)), 4) for offset in (0, LINE)]
            left = [
                builder.shuffle_vector(*numbers, ir.Constant(WORDS, list(range(start, 2 * WIDTH, 2))))
                for start in (0, 1)
            ]
            for plane in range(PLANES):
                even, odd = (builder.and_(builder.bitcast(part, WORDS), upper) for part in left)
                words = builder.or_(builder.lshr(even, half), odd)
                offset = builder.add(
                    builder.mul(step, make.constant(plane)), builder.mul(loop.index, make.constant(LINE))
                )
                builder.store(words, make.at(target, offset, WORDS), align=4)
                left = [
                    builder.fsub(part, builder.bitcast(cut, REALS)) for part, cut in zip(left, (even, odd), strict=True)
                ]
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 4), codegen


@intrinsic
def spread(typingctx: Any, planes: Any, apart: Any, step: Any, vectors: Any, rounds: Any, out: Any) -> Any:
    """Write a plane of up to 16 vectors, `apart` bytes apart, into tiles `step` bytes apart; addresses.

    Vectors from `vectors` on are zeros.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        make, (source, stride, step, count, rounds, target) = Tiles(builder), args
        zeros = ir.Constant(WORDS, [0] * WIDTH)
        with cgutils.for_range(builder, rounds) as loop:
            start = builder.add(source, builder.mul(loop.index, make.constant(LINE)))
            lines = []
            for vector in range(WIDTH):
                there = builder.icmp_signed(">", count, make.constant(vector))
                # where there is none, the first one's line is read and dropped: no branch
                offset = builder.select(there, builder.mul(stride, make.constant(vector)), make.constant(0))
                line = builder.load(make.at(start, offset, WORDS), align=4)
                lines.append(builder.select(there, line, zeros))
            tile = builder.add(target, builder.mul(loop.index, step))
            for row, line in enumerate(make.transposed(lines)):
                builder.store(line, make.at(tile, make.constant(row * LINE), WORDS), align=4)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 6), codegen


@intrinsic
def tile_products(
    typingctx: Any,
    weights: Any,
    row_bytes: Any,
    planes: Any,
    plane_step: Any,
    round_step: Any,
    stride: Any,
    rounds: Any,
    sums: Any,
    ahead: Any,
    like: Any,
) -> Any:
    """Sixteen rows times up to 16 vectors over `rounds` cache lines of each row; addresses and bytes.

    The sums of a plane are fp32 or int32 `[16, vectors]`, rows `stride` bytes apart as those of the planes' tiles are.
    A round asks for one line of each row, `ahead` bytes further on.
    """
    name = "tdpbf16ps" if like.dtype == uint16 else "tdpbssd"

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        make, (base, step, taken, plane_step, round_step, stride, count, target, ahead, _) = Tiles(builder), args
        for plane in range(PLANES):
            make.zero(plane)
        with cgutils.for_range(builder, count) as loop:
            line = builder.add(base, builder.mul(loop.index, make.constant(LINE)))
            make.read(PLANES, line, step)
            tile = builder.add(taken, builder.mul(loop.index, round_step))
            asked = builder.add(line, ahead)
            for plane in range(PLANES):
                place = builder.add(tile, builder.mul(plane_step, make.constant(plane)))
                make.read(PLANES + 1 + plane, place, stride)
                make.multiply(name, plane, PLANES, PLANES + 1 + plane)
                for row in range(ROWS * plane // PLANES, ROWS * (plane + 1) // PLANES):
                    make.ask(asked, builder.mul(step, make.constant(row)))
        for plane in range(PLANES):
            make.write(plane, builder.add(target, make.constant(plane * TILE)), stride)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 9, like), codegen


@intrinsic
def pair_products(
    typingctx: Any,
    weights: Any,
    row_bytes: Any,
    planes: Any,
    plane_step: Any,
    rounds: Any,
    sums: Any,
    ahead: Any,
    like: Any,
) -> Any:
    """Thirty-two rows times up to 16 vectors: `tile_products` of two blocks at once, which load the planes once.

    Asks for lines `ahead` only where that is not 0: whoever has asked for the rows need not ask again. The sums of the
    second block lie behind those of the first.
    """
    name = "tdpbf16ps" if like.dtype == uint16 else "tdpbssd"
    row_tile, plane_tile = 2 * PLANES, 2 * PLANES + 1

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        make, (base, step, taken, plane_step, count, target, ahead, _) = Tiles(builder), args
        stride, block = make.constant(LINE), builder.mul(step, make.constant(ROWS))
        for total in range(2 * PLANES):
            make.zero(total)

        def work(*, asking: bool) -> None:
            with cgutils.for_range(builder, count) as loop:
                line = builder.add(base, builder.mul(loop.index, make.constant(LINE)))
                blocks = [line, builder.add(line, block)]
                tile = builder.add(taken, builder.mul(loop.index, make.constant(TILE)))
                held = None
                for plane in range(PLANES):
                    make.read(plane_tile, builder.add(tile, builder.mul(plane_step, make.constant(plane))), stride)
                    for which in (0, 1) if plane % 2 == 0 else (1, 0):  # the rows in the tile meet the next plane too
                        if which != held:
                            make.read(row_tile, blocks[which], step)
                        held = which
                        make.multiply(name, which * PLANES + plane, row_tile, plane_tile)
                    for row in range(2 * ROWS * plane // PLANES, 2 * ROWS * (plane + 1) // PLANES) if asking else ():
                        make.ask(builder.add(line, ahead), builder.mul(step, make.constant(row)), 2)

        with builder.if_else(builder.icmp_signed("!=", ahead, make.constant(0))) as (first, later):
            with first:
                work(asking=True)
            with later:
                work(asking=False)
        for total in range(2 * PLANES):
            make.write(total, builder.add(target, make.constant(total * TILE)), stride)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 7, like), codegen


@intrinsic
def join_one(typingctx: Any, sums: Any, unit: Any, scales: Any, out: Any, like: Any) -> Any:
    """One vector's sums of sixteen rows, its planes joined; of int8 times its unit and the rows' scales; addresses."""
    narrow = like.dtype == int8

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        make, (source, unit, scales, target, _) = Tiles(builder), args
        line = _joined(make, source, 0, narrow)
        if narrow:
            factor = make.splat(builder.load(make.at(unit, make.constant(0), REAL)))
            line = builder.fmul(builder.fmul(line, factor), make.load(scales, make.constant(0), 4))
        builder.store(line, make.at(target, make.constant(0), REALS), align=4)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 4, like), codegen


@intrinsic
def join_many(typingctx: Any, sums: Any, units: Any, scales: Any, vectors: Any, out: Any, apart: Any, like: Any) -> Any:
    """The same for up to 16 vectors, whose results lie `apart` bytes apart."""
    narrow = like.dtype == int8

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        make, (source, units, scales, count, target, apart, _) = Tiles(builder), args
        lines = [_joined(make, source, row, narrow) for row in range(ROWS)]
        if narrow:
            factors = make.load(units, make.constant(0), 4)
            lines = [builder.fmul(line, factors) for line in lines]
        lines = make.transposed(lines)
        if narrow:
            factors = make.load(scales, make.constant(0), 4)
            lines = [builder.fmul(line, factors) for line in lines]
        for vector, line in enumerate(lines):
            with builder.if_then(builder.icmp_signed(">", count, make.constant(vector))):
                offset = builder.mul(apart, make.constant(vector))
                builder.store(line, make.at(target, offset, REALS), align=4)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 6, like), codegen


def _joined(make: Tiles, sums: Any, row: int, narrow: bool) -> Any:
    """Sixteen sums of a row as fp32, from those of the planes."""
    offsets = [make.constant(plane * TILE + row * LINE) for plane in range(PLANES)]
    if narrow:
        return make.joined([make.builder.load(make.at(sums, offset, WORDS), align=4) for offset in offsets])
    high, middle, low = (make.load(sums, offset, 4) for offset in offsets)
    return make.builder.fadd(high, make.builder.fadd(middle, low))
