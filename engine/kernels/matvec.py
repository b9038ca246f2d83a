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

from .arithmetic import FASTMATH, pointer, prefetch, widen
from .int4 import int4_rows

BLOCK = 4
LINE = 64  # bytes of a cache line
AHEAD = 4096  # bytes between what is worked on and what is asked for
SEGMENT = 2048  # columns between two looks ahead in long rows


@njit(error_model="numpy")
def share(count: int, part: int, parts: int) -> tuple[int, int]:
    """Begin and end of one thread's part of `count` rows; parts begin at whole blocks: a row's path never changes."""
    blocks = count // BLOCK
    begin = blocks * part // parts * BLOCK
    end = count if part == parts - 1 else blocks * (part + 1) // parts * BLOCK
    return begin, end


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
            for line in range(start + AHEAD, start + AHEAD + BLOCK * row_bytes, LINE):
                prefetch(line)
        w0, w1, w2, w3 = matrix[row], matrix[row + 1], matrix[row + 2], matrix[row + 3]
        s0, s1, s2, s3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
        for first in range(0, columns, SEGMENT):
            last = min(first + SEGMENT, columns)
            if long_rows:
                for r in range(BLOCK):
                    ahead = start + r * row_bytes + last * like.itemsize
                    for line in range(ahead, ahead + SEGMENT * like.itemsize, LINE):
                        prefetch(line)
            for i in range(first, last):
                v = x[i]
                s0 += v * widen(w0[i])
                s1 += v * widen(w1[i])
                s2 += v * widen(w2[i])
                s3 += v * widen(w3[i])
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
