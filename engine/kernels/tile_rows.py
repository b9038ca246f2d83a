"""Compiled products of rows of bf16 or int8 weights with one vector or several, in the tiles of `tiles.py`.

Memory of a thread, see `tile_bytes`: the tiles' shape, sums of three planes, and where there are several vectors, for
every 16 of them, their units fp32 `[16]` and the planes in tiles of 16 words (of 2 bf16 or 4 digits) of 16 vectors. A
single vector's tiles are one word wide: its planes are used as they lie in its scratch, see digits.py.
"""

from __future__ import annotations

from typing import Any

from numba import carray, int8, njit, uint16
from numba.extending import overload

from .arithmetic import FASTMATH, LINE, pointer
from .digits import PLANES, split, stride_of
from .tiles import (
    ROWS,
    SUPPORTED,
    TILE,
    configure,
    join_many,
    join_one,
    pair_products,
    release,
    split_bf16,
    spread,
    tile_products,
)
from .vectors import WIDTH

AHEAD = 4096  # bytes of a long row between what is worked on and what is asked for
NEAR = 1 << 16  # a block of 16 rows up to this size asks for the next one instead
SUMS = LINE  # where the sums lie in a thread's memory, and the planes of several vectors
SPREAD = SUMS + 2 * PLANES * TILE


def tile_bytes(columns: int, vectors: int) -> int:
    """Bytes of a thread's memory for so many vectors of up to so many numbers."""
    blocks = -(-vectors // WIDTH)
    return SPREAD + blocks * (LINE + PLANES * -(-columns * 2 // LINE) * TILE)


def in_tiles(columns: Any, like: Any) -> Any:
    """Whether products with rows of so many weights like these are made in tiles."""
    raise AssertionError("compiled code only")


@overload(in_tiles)
def _in_tiles(columns: Any, like: Any) -> Any:
    # numba wants the arguments of the chosen form written exactly as here, annotations included
    if SUPPORTED and like.dtype == uint16:

        def of_parts(columns: Any, like: Any) -> Any:
            return columns >= LINE // 2

        return of_parts
    if SUPPORTED and like.dtype == int8:

        def of_digits(columns: Any, like: Any) -> Any:
            return columns >= LINE and columns % WIDTH == 0

        return of_digits

    def never(columns: Any, like: Any) -> Any:
        return False

    return never


def begin_tiles(memory: Any, vectors: Any, like: Any) -> Any:
    """Shape a thread's tiles for so many vectors, where products with weights like these are made in tiles."""
    raise AssertionError("compiled code only")


@overload(begin_tiles)
def _begin_tiles(memory: Any, vectors: Any, like: Any) -> Any:
    if SUPPORTED and like.dtype in (uint16, int8):

        def begin(memory: Any, vectors: Any, like: Any) -> Any:
            shape = memory[:LINE]
            shape[:] = 0
            shape[0] = 1
            for tile in range(8):  # 16 rows, of one word for a single vector, else of sixteen
                shape[16 + 2 * tile] = 4 if vectors == 1 and tile != PLANES else LINE
                shape[48 + tile] = ROWS
            configure(shape.ctypes.data)

        return begin

    def nothing(memory: Any, vectors: Any, like: Any) -> Any:
        pass

    return nothing


def end_tiles(like: Any) -> Any:
    """Give the tiles back, so that nobody has to save them."""
    raise AssertionError("compiled code only")


@overload(end_tiles)
def _end_tiles(like: Any) -> Any:
    if SUPPORTED and like.dtype in (uint16, int8):

        def end(like: Any) -> Any:
            release()

        return end

    def nothing(like: Any) -> Any:
        pass

    return nothing


def write_planes(x: Any, scratch: Any, like: Any) -> Any:
    """The planes of one vector, into its part of the scratch."""
    raise AssertionError("compiled code only")


@overload(write_planes, fastmath=FASTMATH)
def _write_planes(x: Any, scratch: Any, like: Any) -> Any:
    if like.dtype == int8:

        def write_digits(x: Any, scratch: Any, like: Any) -> Any:
            split(x.ctypes.data, scratch.ctypes.data, stride_of(scratch), x.shape[0] // WIDTH, like)

        return write_digits

    def write_parts(x: Any, scratch: Any, like: Any) -> Any:
        split_bf16(x.ctypes.data, scratch.ctypes.data, stride_of(scratch), x.shape[0] * 2 // LINE)

    return write_parts


# Where fastmath is not set, numba takes it from the first caller. With it a vector's sums and factors are joined in
# another order than those of several, and a unit that is no number is lost.
@njit(error_model="numpy", fastmath=False)
def take_in_tiles(x: Any, scratch: Any, memory: Any, like: Any) -> None:
    """Write the planes of vectors `[n, columns]` into their scratch `[n, bytes]`, several also into the memory."""
    vectors, rounds = x.shape[0], x.shape[1] * like.itemsize // LINE
    for s in range(vectors):
        write_planes(x[s], scratch[s], like)
    if vectors == 1:
        return
    target = memory.ctypes.data + SPREAD
    for first in range(0, vectors, WIDTH):
        spread_block(min(vectors - first, WIDTH), scratch[first:], rounds, target, x)
        target += block_bytes(rounds)


@njit(error_model="numpy")
def block_bytes(rounds: int) -> int:
    """Bytes of the units and the planes of up to 16 vectors of so many cache lines of weights."""
    return LINE + PLANES * rounds * TILE


@njit(error_model="numpy", fastmath=False)
def spread_block(count: int, scratch: Any, rounds: int, target: int, like: Any) -> None:
    """Units and planes of up to 16 vectors, from their scratch to an address; `like` is any fp32 array."""
    stride, source = stride_of(scratch[0]), scratch.ctypes.data
    units = carray(pointer(target, like), (WIDTH,))
    for s in range(count):
        units[s] = carray(pointer(source + s * scratch.strides[0] + unit_at(stride), like), (1,))[0]
    target += LINE
    for plane in range(PLANES):
        spread(source + plane * stride, scratch.strides[0], TILE, count, rounds, target)
        target += rounds * TILE


@njit(error_model="numpy")
def unit_at(stride: int) -> int:
    """Where a vector's scratch holds its unit, see digits.py."""
    return PLANES * (stride + LINE)


@njit(error_model="numpy", fastmath=False)
def tile_rows(
    address: int, scales: int, begin: int, end: int, x: Any, scratch: Any, memory: Any, out: Any, at: int, like: Any
) -> None:
    """`out[s, at + r] = matrix[r] . x[s]` for rows begin..end, at least 16, and every vector; see `take_in_tiles`.

    Rows that do not fill a block are worked with the ones before them, whose products come out the same once more.
    """
    vectors, columns = x.shape
    row_bytes, stride = columns * like.itemsize, stride_of(scratch[0])
    rounds = row_bytes // LINE
    sums, planes = memory.ctypes.data + SUMS, scratch.ctypes.data
    target, apart = out.ctypes.data + 4 * at, out.strides[0]
    if vectors > 1:
        spreads = memory.ctypes.data + SPREAD
        tile_blocks(address, scales, begin, end, row_bytes, vectors, spreads, sums, target, apart, like)
        return
    for block in range(begin, end, ROWS):
        row = min(block, end - ROWS)
        tile_products(
            address + row * row_bytes, row_bytes, planes, stride, LINE, 4, rounds, sums, ahead_of(row_bytes), like
        )
        join_one(sums, planes + unit_at(stride), scales + 4 * row, target + 4 * row, like)


@njit(error_model="numpy")
def ahead_of(row_bytes: int) -> int:
    """Bytes between what is worked on and what is asked for, of rows of so many."""
    return ROWS * row_bytes if ROWS * row_bytes <= NEAR else AHEAD


@njit(error_model="numpy", fastmath=False)
def tile_blocks(
    address: int,
    scales: int,
    begin: int,
    end: int,
    row_bytes: int,
    vectors: int,
    spreads: int,
    sums: int,
    target: int,
    apart: int,
    like: Any,
) -> None:
    """`tile_rows` of vectors that lie as `spread_block` writes them; addresses, of thread's own `sums` too.

    target: of the first vector's product with row 0, the next one's is `apart` bytes further on.
    """
    rounds = row_bytes // LINE
    pairs = (end - begin) // (2 * ROWS)
    for pair in range(pairs):
        row = begin + 2 * ROWS * pair
        start, factors, taken, ahead = address + row * row_bytes, scales + 4 * row, spreads, ahead_of(2 * row_bytes)
        for first in range(0, vectors, WIDTH):
            pair_products(start, row_bytes, taken + LINE, rounds * TILE, rounds, sums, ahead, like)
            place = target + first * apart + 4 * row
            join_many(sums, taken, factors, vectors - first, place, apart, like)
            second, place = sums + PLANES * TILE, place + 4 * ROWS
            join_many(second, taken, factors + 4 * ROWS, vectors - first, place, apart, like)
            taken += block_bytes(rounds)
            ahead = 0
    for block in range(begin + 2 * ROWS * pairs, end, ROWS):
        row = min(block, end - ROWS)
        start, factors, taken, ahead = address + row * row_bytes, scales + 4 * row, spreads, ahead_of(row_bytes)
        for first in range(0, vectors, WIDTH):
            tile_products(start, row_bytes, taken + LINE, rounds * TILE, TILE, LINE, rounds, sums, ahead, like)
            join_many(sums, taken, factors, vectors - first, target + first * apart + 4 * row, apart, like)
            taken += block_bytes(rounds)
