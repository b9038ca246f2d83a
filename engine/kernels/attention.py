"""Compiled attention of one new token over ragged rows, in fixed pieces of columns that are combined in fixed order.

Pieces depend on a row's length alone, so the number of threads changes nothing, bit for bit. Columns outside a sliding
window are hidden by position. Logits of every column stay in `logits` for whoever needs the attention row (`hold`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from .arithmetic import FASTMATH, ask_for, exp32
from .rows import AHEAD, key_products, weighted_values
from .vectors import WIDTH, exponentials, largest

NEVER = np.float32(-np.inf)
PIECES = (64, 128, 256)  # columns of a piece, of rows up to 256, up to 1,024, and longer


@njit(error_model="numpy")
def piece_columns(columns: Any) -> Any:
    """Columns in a piece of a row with so many columns."""
    return PIECES[0] if columns <= 256 else PIECES[1] if columns <= 1024 else PIECES[2]


@njit(error_model="numpy")
def pieces_of(columns: Any) -> Any:
    size = piece_columns(columns)
    return (columns + size - 1) // size


@njit(fastmath=FASTMATH, error_model="numpy")
def attend_piece(
    queries: Any,  # fp32 [group, head_dim], rotated and scaled
    keys: Any,  # the arena's stores [slots, head_dim], fp32 or bf16
    values: Any,
    position: Any,  # int32 [slots]
    first: int,  # slot of the piece's first column
    count: int,
    oldest: int,  # columns at this position or before are hidden; -1 hides nothing
    logits: Any,  # fp32 [group, columns of the row], written at `at`
    at: int,
    top: Any,  # fp32 [group], written: largest logit (-inf if nothing is seen), sum of exponentials, weighted values
    total: Any,
    output: Any,  # fp32 [group, head_dim]
    weights: Any,  # fp32 [group, the longest piece], work space
    lanes: Any,  # tuples whose lengths are head_dim / 16 (or 0) and the group: see rows.py
    heads: Any,
) -> None:
    """One KV head, one piece: logits, softmax relative to the piece's largest logit, weighted sum of values."""
    group, dim = queries.shape
    ask_for(values[first].ctypes.data, min(count * dim * values.itemsize, AHEAD))
    key_products(queries, keys, first, count, logits, at, lanes, heads)
    if oldest >= 0:
        for column in range(count):
            if position[first + column] <= oldest:
                for g in range(group):
                    logits[g, at + column] = NEVER
    whole = count // WIDTH * WIDTH
    for g in range(group):
        line, weight = logits[g, at : at + count], weights[g]
        best = largest(line.ctypes.data, whole)
        for column in range(whole, count):
            best = max(best, line[column])
        base = np.float32(0) if best == NEVER else best  # -inf - -inf is not a number; -inf - 0 weighs nothing
        mass = exponentials(line.ctypes.data, weight.ctypes.data, whole, base)
        for column in range(whole, count):
            weight[column] = exp32(line[column] - base)
            mass += weight[column]
        top[g], total[g] = best, mass
    weighted_values(weights, values, first, count, output, lanes, heads)


@njit(fastmath=FASTMATH, error_model="numpy")
def combine(top: Any, total: Any, parts: Any, out: Any) -> Any:
    """Join pieces of one query head: `top`, `total` [pieces], `parts` [pieces, head_dim] -> `out` [head_dim].

    Returns the largest logit and the sum of exponentials over the whole row.
    """
    pieces, dim = parts.shape
    best = NEVER
    for piece in range(pieces):
        best = max(best, top[piece])
    mass = np.float32(0)
    for d in range(dim):
        out[d] = np.float32(0)
    for piece in range(pieces):
        if top[piece] != NEVER:
            share = exp32(top[piece] - best)
            mass += share * total[piece]
            for d in range(dim):
                out[d] += share * parts[piece, d]
    for d in range(dim):
        out[d] /= mass
    return best, mass


@njit(fastmath=FASTMATH, error_model="numpy")
def least_attended(
    logits: Any,  # fp32 [group, columns]
    columns: int,
    best: Any,  # fp32 [group]: largest logit and sum of exponentials of each query head's whole row
    mass: Any,
    where: Any,  # int32 [columns]: positions
    newest_allowed: int,  # columns at later positions stay
) -> int:
    """The column whose attention, mean over the group, is least; of equals the one of lowest position."""
    group = logits.shape[0]
    lowest, chosen, oldest = np.float32(np.inf), -1, 0
    for column in range(columns):
        if where[column] > newest_allowed:
            continue
        weight = np.float32(0)
        for g in range(group):
            if logits[g, column] != NEVER:
                weight += exp32(logits[g, column] - best[g]) / mass[g]
        if chosen < 0 or weight < lowest or (weight == lowest and where[column] < oldest):
            lowest, chosen, oldest = weight, column, where[column]
    return chosen
