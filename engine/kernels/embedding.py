"""Compiled look-up of a token's embedding in a table of any format of weights."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, uint8
from numba.extending import overload

from .arithmetic import FASTMATH, pointer, widen
from .digits import GROUP


def embed_row(token: Any, table: Any, factors: Any, factor: Any, hidden: Any, like: Any) -> Any:
    """The token's embedding, widened, times the family's factor; addresses of the table and of its factors."""
    raise AssertionError("compiled code only")


@overload(embed_row, fastmath=FASTMATH)
def _embed_row(token: Any, table: Any, factors: Any, factor: Any, hidden: Any, like: Any) -> Any:
    if like.dtype == uint8:
        return embed_int4
    return embed_stored


def embed_stored(token: Any, table: Any, factors: Any, factor: Any, hidden: Any, like: Any) -> Any:
    width = hidden.shape[0]
    row = carray(pointer(table, like), (token + 1, width))[token]
    scale = factor
    if factors:
        scale = factor * carray(pointer(factors, hidden), (token + 1,))[token]
    for i in range(width):
        hidden[i] = widen(row[i]) * scale


def embed_int4(token: Any, table: Any, factors: Any, factor: Any, hidden: Any, like: Any) -> Any:
    groups = hidden.shape[0] // GROUP
    packed = carray(pointer(table, like), (token + 1, groups, GROUP // 2))[token]
    pairs = carray(pointer(factors, np.empty(0, np.uint16)), (token + 1, groups, 2))[token]
    for group in range(groups):
        scale, low = widen(pairs[group, 0]), widen(pairs[group, 1])
        for j in range(GROUP // 2):
            first, second = packed[group, j] & 15, packed[group, j] >> 4
            hidden[group * GROUP + j] = (np.float32(first) * scale + low) * factor
            hidden[group * GROUP + GROUP // 2 + j] = (np.float32(second) * scale + low) * factor
