"""Compiled attention of one new token over ragged rows, in fixed pieces of columns that are combined in fixed order.

Pieces depend on a row's length alone, so the number of threads changes nothing, bit for bit. Columns outside a sliding
window are hidden by position. Logits of every column stay in `logits` for whoever needs the attention row (`hold`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from .arithmetic import FASTMATH, exp32, widen

NEVER = np.float32(-np.inf)
SHORT_PIECE, LONG_PIECE = 64, 256


@njit(error_model="numpy")
def piece_columns(columns: Any) -> Any:
    """Columns in a piece of a row with so many columns."""
    return SHORT_PIECE if columns <= 1024 else LONG_PIECE


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
) -> None:
    """One KV head, one piece: logits, softmax relative to the piece's largest logit, weighted sum of values."""
    group, dim = queries.shape
    for column in range(count):
        row = keys[first + column]
        for g in range(group):
            query, dot = queries[g], np.float32(0)
            for d in range(dim):
                dot += query[d] * widen(row[d])
            logits[g, at + column] = dot
    if oldest >= 0:
        for column in range(count):
            if position[first + column] <= oldest:
                for g in range(group):
                    logits[g, at + column] = NEVER
    weight = np.empty(count, np.float32)
    for g in range(group):
        line = logits[g, at : at + count]
        best = NEVER
        for column in range(count):
            best = max(best, line[column])
        top[g], total[g] = best, np.float32(0)
        for d in range(dim):
            output[g, d] = np.float32(0)
        if best == NEVER:
            continue
        mass = np.float32(0)
        for column in range(count):
            weight[column] = exp32(line[column] - best)
        for column in range(count):
            mass += weight[column]
        total[g] = mass
        weighted_values(weight, values, first, count, output[g])


@njit(fastmath=FASTMATH, error_model="numpy")
def weighted_values(weight: Any, value: Any, first: int, count: int, out: Any) -> None:
    """`out += sum_c weight[c] * value[first + c]`, four columns at a time."""
    dim = out.shape[0]
    column = 0
    while column + 4 <= count:
        v0, v1, v2, v3 = (
            value[first + column],
            value[first + column + 1],
            value[first + column + 2],
            value[first + column + 3],
        )
        p0, p1, p2, p3 = weight[column], weight[column + 1], weight[column + 2], weight[column + 3]
        for d in range(dim):
            out[d] += p0 * widen(v0[d]) + p1 * widen(v1[d]) + p2 * widen(v2[d]) + p3 * widen(v3[d])
        column += 4
    while column < count:
        v0, p0 = value[first + column], weight[column]
        for d in range(dim):
            out[d] += p0 * widen(v0[d])
        column += 1


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
