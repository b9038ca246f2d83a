"""Compiled matrix-vector products over rows of a stored weight matrix, read where it lies.

A matrix is [rows, columns] at an address, in the format that the dummy array `like` has: fp32, bf16 (as uint16), int8
with one fp32 scale per row, or int4 (as uint8) in groups (see int4.py and models/quantisation.py).
Rows are worked in blocks of four, so that each load of the vector serves four rows; a row's sum is always made in the
same order by one thread, whatever the number of threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, float32, int8, njit, uint8, uint16
from numba.extending import overload

from .arithmetic import FASTMATH, ask_for, pointer, widen
from .int4 import int4_rows

BLOCK = 4
AHEAD = 4096  # bytes between what is worked on and what is asked for
SEGMENT = 2048  # columns between two looks ahead in long rows


@njit(error_model="numpy")
def share(count: int, part: int, parts: int) -> tuple[int, int]:
    """Begin and end of one thread's part of `count` rows; parts begin at whole blocks: a row's path never changes."""
    blocks = count // BLOCK
    begin = blocks * part // parts * BLOCK
    end = count if part == parts - 1 else blocks * (part + 1) // parts * BLOCK
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


def rows_times(address: Any, scales: Any, begin: Any, end: Any, x: Any, out: Any, at: Any, like: Any) -> Any:
    """`out[at + r] = matrix[r] . x` for rows begin..end; `scales` is the address of the factors, 0 without."""
    raise AssertionError("compiled code only")


@overload(rows_times, fastmath=FASTMATH)
def _rows_times(address: Any, scales: Any, begin: Any, end: Any, x: Any, out: Any, at: Any, like: Any) -> Any:
    if like.dtype in (float32, uint16):
        return plain_rows
    if like.dtype == int8:
        return scaled_rows
    if like.dtype == uint8:
        return grouped_rows
    return None


@njit(fastmath=FASTMATH, error_model="numpy")
def four_products(w0: Any, w1: Any, w2: Any, w3: Any, x: Any) -> Any:
    """Four rows times one vector (a loop over a part of an array is not vectorised: its index might be negative)."""
    s0, s1, s2, s3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
    for i in range(x.shape[0]):
        v = x[i]
        s0 += v * widen(w0[i])
        s1 += v * widen(w1[i])
        s2 += v * widen(w2[i])
        s3 += v * widen(w3[i])
    return s0, s1, s2, s3


@njit(fastmath=FASTMATH, error_model="numpy")
def stored_rows(address: int, begin: int, end: int, x: Any, out: Any, at: int, like: Any) -> None:
    """The numbers as they are stored, widened in registers.

    Lines are asked for some kilobytes ahead: one core's own prefetchers leave a third of the bandwidth unused.
    """
    columns = x.shape[0]
    matrix = carray(pointer(address, like), (end, columns))
    row_bytes = columns * like.itemsize
    long_rows = BLOCK * row_bytes > 4 * AHEAD
    row = begin
    while row + BLOCK <= end:
        start = address + row * row_bytes
        if not long_rows:
            ask_for(start + AHEAD, BLOCK * row_bytes)
        w0, w1, w2, w3 = matrix[row], matrix[row + 1], matrix[row + 2], matrix[row + 3]
        s0, s1, s2, s3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
        if long_rows:
            for first in range(0, columns, SEGMENT):
                last = min(first + SEGMENT, columns)
                for r in range(BLOCK):
                    ask_for(start + r * row_bytes + last * like.itemsize, SEGMENT * like.itemsize)
                d0, d1, d2, d3 = four_products(
                    w0[first:last], w1[first:last], w2[first:last], w3[first:last], x[first:last]
                )
                s0, s1, s2, s3 = s0 + d0, s1 + d1, s2 + d2, s3 + d3
        else:
            s0, s1, s2, s3 = four_products(w0, w1, w2, w3, x)
        out[at + row], out[at + row + 1], out[at + row + 2], out[at + row + 3] = s0, s1, s2, s3
        row += BLOCK
    while row < end:
        w0, s0 = matrix[row], np.float32(0)
        for i in range(columns):
            s0 += x[i] * widen(w0[i])
        out[at + row] = s0
        row += 1


def plain_rows(address: Any, scales: Any, begin: Any, end: Any, x: Any, out: Any, at: Any, like: Any) -> Any:
    """fp32 and bf16, which need no scale."""
    stored_rows(address, begin, end, x, out, at, like)


def scaled_rows(address: Any, scales: Any, begin: Any, end: Any, x: Any, out: Any, at: Any, like: Any) -> Any:
    """int8 with one scale per row."""
    stored_rows(address, begin, end, x, out, at, like)
    scale = carray(pointer(scales, x), (end,))
    for row in range(begin, end):
        out[at + row] *= scale[row]


def grouped_rows(address: Any, scales: Any, begin: Any, end: Any, x: Any, out: Any, at: Any, like: Any) -> Any:
    """int4 with a scale and a lowest value per group of columns."""
    int4_rows(address, scales, begin, end, x, out, at)
