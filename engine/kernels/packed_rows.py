"""Compiled attention of one new token over a piece of packed rows: keys and values in 8, 4 or 2 bits.

A piece leaves what a piece of an unpacked row leaves (see attention.py), and both are joined alike: one softmax over
the packed and the other part of a row. Pieces begin at whole groups of 32 slots.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.extending import overload

from .arithmetic import FASTMATH
from .packed_vectors import GROUP, packed_products, packed_sums, value_groups
from .vectors import WIDTH, exponentials, largest

NEVER = np.float32(-np.inf)


def share_lines(heads: int, head_dim: int) -> int:
    """Lines of work space, as long as the longest piece, that `attend_packed` needs beside the weights'."""
    return heads * value_groups(head_dim // WIDTH)


def attend_packed(
    queries: Any,  # fp32 [group, head_dim], rotated and scaled
    packed: Any,  # tables of cache/packed_store.py but the last, in their order, fp16 as uint16
    first: Any,  # slot of the piece's first column, the first of a group
    count: Any,
    oldest: Any,  # columns at this position or before are hidden; -1 hides nothing
    top: Any,  # fp32 [group], written: largest logit (-inf if nothing is seen), sum of exponentials, weighted values
    total: Any,
    output: Any,  # fp32 [group, head_dim]
    weights: Any,  # fp32 [group, the longest piece], work space
    shares: Any,  # fp32 [share_lines, the longest piece], work space
    lanes: Any,  # tuples whose lengths are head_dim / 16, the group, and the bits of a number
    heads: Any,
    bits: Any,
) -> Any:
    """One KV head, one piece of a packed row: logits, softmax relative to the largest, weighted sum of values."""
    raise AssertionError("compiled code only")


@overload(attend_packed, fastmath=FASTMATH)
def _attend_packed(
    queries: Any,
    packed: Any,
    first: Any,
    count: Any,
    oldest: Any,
    top: Any,
    total: Any,
    output: Any,
    weights: Any,
    shares: Any,
    lanes: Any,
    heads: Any,
    bits: Any,
) -> Any:
    return attend_in_vectors if len(bits) and len(lanes) else nothing


def attend_in_vectors(
    queries: Any,
    packed: Any,
    first: Any,
    count: Any,
    oldest: Any,
    top: Any,
    total: Any,
    output: Any,
    weights: Any,
    shares: Any,
    lanes: Any,
    heads: Any,
    bits: Any,
) -> Any:
    key_codes, value_codes, key_scale, key_minimum, value_scale, value_minimum, position = packed
    group, block, stride = queries.shape[0], first // GROUP, weights.shape[1]
    padded = (count + WIDTH - 1) // WIDTH * WIDTH
    packed_products(
        queries.ctypes.data,
        key_codes.ctypes.data + first * key_codes.strides[0],
        key_scale.ctypes.data + block * key_scale.strides[0],
        key_minimum.ctypes.data + block * key_minimum.strides[0],
        (count + GROUP - 1) // GROUP,
        weights.ctypes.data,
        stride,
        lanes,
        heads,
        bits,
    )
    if oldest >= 0:
        for column in range(count):
            if position[first + column] <= oldest:
                for g in range(group):
                    weights[g, column] = NEVER
    for g in range(group):
        line = weights[g]
        for column in range(count, padded):
            line[column] = NEVER
        best = largest(line.ctypes.data, padded)
        base = np.float32(0) if best == NEVER else best  # -inf - -inf is not a number; -inf - 0 weighs nothing
        top[g], total[g] = best, exponentials(line.ctypes.data, line.ctypes.data, padded, base)
    packed_sums(
        weights.ctypes.data,
        stride,
        value_codes.ctypes.data + first * value_codes.strides[0],
        value_scale.ctypes.data + first * value_scale.strides[0],
        value_minimum.ctypes.data + first * value_minimum.strides[0],
        count,
        shares.ctypes.data,
        output.ctypes.data,
        lanes,
        heads,
        bits,
    )


def nothing(
    queries: Any,
    packed: Any,
    first: Any,
    count: Any,
    oldest: Any,
    top: Any,
    total: Any,
    output: Any,
    weights: Any,
    shares: Any,
    lanes: Any,
    heads: Any,
    bits: Any,
) -> Any:
    pass
