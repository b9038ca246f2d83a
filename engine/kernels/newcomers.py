"""Compiled bookkeeping of a new token in its rows: rotated, written behind a row, and what it takes the place of."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from .arithmetic import FASTMATH, narrow
from .attention import least_attended


@njit(fastmath=FASTMATH, error_model="numpy")
def rotated_into(x: Any, norm: Any, eps: float, cos: Any, sin: Any, factor: float, out: Any) -> None:
    """One head's query or key `[head_dim]`: normed if `norm` is not empty, rotated (half split), times `factor`."""
    dim = x.shape[0]
    half = dim // 2
    scale = np.float32(1.0)
    if norm.shape[0]:
        square = np.float32(0)
        for d in range(dim):
            square += x[d] * x[d]
        scale = np.float32(1.0) / np.sqrt(square / np.float32(dim) + eps)
    for d in range(half):
        first, second = x[d] * scale, x[d + half] * scale
        if norm.shape[0]:
            first, second = first * norm[d], second * norm[d + half]
        out[d] = (first * cos[d] - second * sin[d]) * factor
        out[d + half] = (second * cos[d] + first * sin[d]) * factor


@njit(fastmath=FASTMATH, error_model="numpy")
def exchange(store: Any, slot: int, other: int) -> None:
    """Let two slots of a store `[slots, head_dim]` change places."""
    for d in range(store.shape[1]):
        store[slot, d], store[other, d] = store[other, d], store[slot, d]


@njit(fastmath=FASTMATH, error_model="numpy")
def write_newcomer(
    key: Any, value: Any, norm: Any, eps: float, cos: Any, sin: Any, key_slot: Any, value_slot: Any
) -> None:
    """Rotate the new token's key of one KV head, and write key and value `[head_dim]` into their slots."""
    turned = np.empty(key.shape[0], np.float32)
    rotated_into(key, norm, eps, cos, sin, np.float32(1.0), turned)
    for d in range(key.shape[0]):
        key_slot[d] = narrow(turned[d], key_slot)
        value_slot[d] = narrow(value[d], value_slot)


@njit(fastmath=FASTMATH, error_model="numpy")
def make_room(
    layer: int,
    head: int,
    newest_allowed: int,
    offset: Any,
    length: Any,
    limit: Any,
    keys: Any,
    values: Any,
    position: Any,
    logits: Any,
    joined: Any,
) -> None:
    """Count a row up, or at its limit let the newcomer change places with the least attended slot."""
    columns = length[layer, head] + 1
    if columns <= limit[layer, head]:
        length[layer, head] = columns
        return
    first = offset[layer, head]
    where = position[first : first + columns]
    loser = least_attended(logits[head], columns, joined[0, head], joined[1, head], where, newest_allowed)
    spare = first + columns - 1
    exchange(keys, first + loser, spare)
    exchange(values, first + loser, spare)
    where[loser], where[columns - 1] = where[columns - 1], where[loser]
