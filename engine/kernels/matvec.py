"""Compiled matrix-vector products over rows of a stored weight matrix, read where it lies.

A matrix is [rows, columns] at an address, in the format that the dummy array `like` has: fp32, bf16 (as uint16), int8
with one fp32 scale per row, or int4 (as uint8) in groups (see int4.py and models/quantisation.py).
Rows are worked in blocks of four, so that each load of the vector serves four rows; a row's sum is always made in the
same order by one thread, whatever the number of threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, float32, int8, njit, types, uint8, uint16
from numba.core import cgutils
from numba.extending import intrinsic, overload

from .arithmetic import FASTMATH, LINE, ask_for, pointer, widen
from .digits import SUPPORTED, int8_products, stride_of, take_one
from .int4 import int4_rows
from .tile_rows import in_tiles, take_in_tiles, tile_rows
from .tiles import ROWS
from .tiles import SUPPORTED as TILES
from .vectors import REAL, REALS, WIDTH, Vectors

BLOCK = 4
UNIT = ROWS if TILES else BLOCK  # rows of which a thread's part is a multiple
AHEAD = 4096  # bytes between what is worked on and what is asked for
ITEMS = {float32: 4, uint16: 2, int8: 1}  # bytes of a stored number


@njit(error_model="numpy")
def share(count: int, part: int, parts: int) -> tuple[int, int]:
    """Begin and end of one thread's part of `count` rows; parts begin at whole units: a row's path never changes."""
    units = count // UNIT
    begin = units * part // parts * UNIT
    end = count if part == parts - 1 else units * (part + 1) // parts * UNIT
    return begin, end


def bytes_of(columns: Any, like: Any) -> Any:
    """Bytes of a row of so many columns."""
    raise AssertionError("compiled code only")


@overload(bytes_of)
def _bytes_of(columns: Any, like: Any) -> Any:
    if like.dtype == uint8:

        def packed(columns: Any, like: Any) -> Any:
            return columns // 2

        return packed

    def stored(columns: Any, like: Any) -> Any:
        return columns * like.itemsize

    return stored


@njit(error_model="numpy")
def ask_for_part(address: int, rows: int, columns: int, part: int, parts: int, like: Any) -> None:
    """Ask for the first lines of a thread's part of a matrix that comes next, before it waits for the others."""
    begin, _ = share(rows, part, parts)
    ask_for(address + begin * bytes_of(columns, like), AHEAD)


@njit(error_model="numpy")
def take(x: Any, notes: Any, like: Any) -> None:
    """Make vectors `[n, columns]` ready for products with weights like these.

    notes: a thread's scratch int8 `[n, bytes]`, see digits.py, and its memory for tiles, see tiles.py.
    """
    scratch, memory = notes
    if in_tiles(x.shape[1], like):
        take_in_tiles(x, scratch, memory, like)
    else:
        for s in range(x.shape[0]):
            take_one(x[s], scratch[s], like)


def rows_times(
    address: Any, scales: Any, begin: Any, end: Any, x: Any, notes: Any, out: Any, at: Any, like: Any
) -> Any:
    """`out[s, at + r] = matrix[r] . x[s]` for rows begin..end and every vector; `scales`: address of the factors, or 0.

    `notes` are the thread's, into which `take` has put the vectors. A block of rows meets all of them while it is in
    the core's first cache.
    """
    raise AssertionError("compiled code only")


@overload(rows_times, fastmath=FASTMATH)
def _rows_times(
    address: Any, scales: Any, begin: Any, end: Any, x: Any, notes: Any, out: Any, at: Any, like: Any
) -> Any:
    if TILES and like.dtype in (uint16, int8):
        return rows_in_tiles
    if like.dtype in (float32, uint16):
        return plain_rows
    if like.dtype == int8:
        return scaled_rows
    if like.dtype == uint8:
        return grouped_rows
    return None


@intrinsic
def block_products(typingctx: Any, address: Any, row_bytes: Any, vector: Any, rounds: Any, out: Any, like: Any) -> Any:
    """Four rows times a vector, over `rounds` cache lines of each row; all but `rounds` are addresses or bytes.

    Between the products one line of each row is asked for, some kilobytes ahead: a core's own prefetchers leave a third
    of the bandwidth unused, and a burst of requests would fill the buffers for outstanding lines and stall.
    """
    item = ITEMS[like.dtype]
    vectors = LINE // (WIDTH * item)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        make, (base, step, x, count, target, _) = Vectors(builder), args
        rows = [builder.add(base, builder.mul(step, make.constant(row))) for row in range(BLOCK)]
        # a sum for each part of a line: products that wait for each other would take longer than the memory
        totals = [[cgutils.alloca_once(builder, REALS) for _ in range(vectors)] for _ in rows]
        for total in (total for parts in totals for total in parts):
            builder.store(ir.Constant(REALS, None), total)
        with cgutils.for_range(builder, count) as loop:
            line = builder.mul(loop.index, make.constant(LINE))
            place = builder.add(x, builder.mul(loop.index, make.constant(LINE // item * 4)))
            for row in rows:
                make.ask(row, builder.add(line, make.constant(AHEAD)))
            for part in range(vectors):
                numbers = make.load(place, make.constant(part * WIDTH * 4), 4)
                for row, parts in zip(rows, totals, strict=True):
                    total = parts[part]
                    stored = make.load(row, builder.add(line, make.constant(part * WIDTH * item)), item)
                    builder.store(make.fused(stored, numbers, builder.load(total)), total)
        for row, parts in enumerate(totals):
            whole = builder.load(parts[0])
            for total in parts[1:]:
                whole = builder.fadd(whole, builder.load(total))
            builder.store(make.total(whole), make.at(target, make.constant(4 * row), REAL))
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 5, like), codegen


@njit(fastmath=FASTMATH, error_model="numpy")
def stored_rows(address: int, begin: int, end: int, x: Any, out: Any, at: int, like: Any) -> None:
    """The numbers as they are stored, widened in registers."""
    columns = x.shape[1]
    matrix = carray(pointer(address, like), (end, columns))
    row_bytes = columns * like.itemsize
    rounds = row_bytes // LINE
    whole = rounds * LINE // like.itemsize
    # addresses, not views: a view in the inner loop costs as much as a short row
    vector, target = x.ctypes.data, out.ctypes.data + 4 * at
    row = begin
    while row + BLOCK <= end:
        start = address + row * row_bytes
        for s in range(x.shape[0]):
            place = target + s * out.strides[0] + 4 * row
            block_products(start, row_bytes, vector + s * x.strides[0], rounds, place, like)
            if whole < columns:
                for r in range(BLOCK):
                    out[s, at + row + r] += scalar_product(x[s], matrix[row + r], whole)
        row += BLOCK
    while row < end:
        for s in range(x.shape[0]):
            out[s, at + row] = scalar_product(x[s], matrix[row], 0)
        row += 1


@njit(fastmath=FASTMATH, error_model="numpy")
def integer_rows(address: int, begin: int, end: int, x: Any, scratch: Any, out: Any, at: int) -> None:
    """int8 rows by the digits of the vectors, scales not applied."""
    columns = x.shape[1]
    lines, stride = columns // LINE, stride_of(scratch[0])
    matrix = carray(pointer(address, np.empty(0, np.int8)), (end, columns))
    taken, target = scratch.ctypes.data, out.ctypes.data + 4 * at
    row = begin
    while row + BLOCK <= end:
        for s in range(x.shape[0]):
            place = target + s * out.strides[0] + 4 * row
            int8_products(address + row * columns, columns, taken + s * scratch.strides[0], stride, lines, place)
            if lines * LINE < columns:
                for r in range(BLOCK):
                    out[s, at + row + r] += scalar_product(x[s], matrix[row + r], lines * LINE)
        row += BLOCK
    while row < end:
        for s in range(x.shape[0]):
            out[s, at + row] = scalar_product(x[s], matrix[row], 0)
        row += 1


@njit(fastmath=FASTMATH, error_model="numpy")
def scalar_product(x: Any, stored: Any, first: int) -> Any:
    """Of the columns from `first` on."""
    total = np.float32(0)
    for i in range(first, x.shape[0]):
        total += x[i] * widen(stored[i])
    return total


def rows_in_tiles(
    address: Any, scales: Any, begin: Any, end: Any, x: Any, notes: Any, out: Any, at: Any, like: Any
) -> Any:
    """bf16, and int8 with one scale per row; what a block of tiles does not cover is widened."""
    columns = x.shape[1]
    if not in_tiles(columns, like) or end - begin < ROWS:
        stored_rows(address, begin, end, x, out, at, like)
        scale_rows(scales, begin, end, out, at)
        return
    scratch, memory = notes
    tile_rows(address, scales, begin, end, x, scratch, memory, out, at, like)
    whole = columns * like.itemsize // LINE * LINE // like.itemsize
    if whole < columns:
        matrix = carray(pointer(address, like), (end, columns))
        scale = carray(pointer(scales, x), (end if scales else 0,))
        for s in range(x.shape[0]):
            for row in range(begin, end):
                rest = scalar_product(x[s], matrix[row], whole)
                out[s, at + row] += rest * scale[row] if scales else rest


@njit(fastmath=FASTMATH, error_model="numpy")
def scale_rows(scales: int, begin: int, end: int, out: Any, at: int) -> None:
    """Multiply rows by the fp32 scales at an address, if there is one."""
    if scales:
        scale = carray(pointer(scales, out), (end,))
        for s in range(out.shape[0]):
            line, factors = out[s, at + begin : at + end], scale[begin:end]
            for row in range(line.shape[0]):
                line[row] *= factors[row]


def plain_rows(
    address: Any, scales: Any, begin: Any, end: Any, x: Any, notes: Any, out: Any, at: Any, like: Any
) -> Any:
    """fp32 and bf16, which need no scale."""
    stored_rows(address, begin, end, x, out, at, like)


def scaled_rows(
    address: Any, scales: Any, begin: Any, end: Any, x: Any, notes: Any, out: Any, at: Any, like: Any
) -> Any:
    """int8 with one scale per row."""
    if SUPPORTED and x.shape[1] % WIDTH == 0:
        integer_rows(address, begin, end, x, notes[0], out, at)
    else:
        stored_rows(address, begin, end, x, out, at, like)
    scale_rows(scales, begin, end, out, at)


def grouped_rows(
    address: Any, scales: Any, begin: Any, end: Any, x: Any, notes: Any, out: Any, at: Any, like: Any
) -> Any:
    """int4 with a scale and a lowest value per group of columns."""
    int4_rows(address, scales, begin, end, x, notes[0], out, at)
