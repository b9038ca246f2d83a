"""One decode step of n sequences as one compiled call: embedding to logits, weights and rows read where they lie.

Five phases a layer, between which the threads of the team meet; norms are worked by every thread instead of costing a
phase. In a phase a thread owns whole blocks of output rows, or whole (KV head, piece of columns) tasks, so nothing is
summed across threads and the number of threads changes no bit of the result.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit, uint8
from numba.extending import overload

from .arithmetic import FASTMATH, activate_and_gate, narrow, pointer, widen
from .attention import attend_piece, combine, least_attended, piece_columns, pieces_of
from .digits import GROUP
from .matvec import ask_for_part, rows_times, share, take
from .team import meet
from .tile_rows import begin_tiles, end_tiles

# the order of a layer's matrices in the table of addresses
Q, K, V, OUT, GATE, UP, DOWN = range(7)


@njit(fastmath=FASTMATH, error_model="numpy")
def normed_into(x: Any, weight: Any, eps: float, out: Any) -> None:
    """`out = x / rms(x) * weight` in fp32."""
    square = np.float32(0)
    for i in range(x.shape[0]):
        square += x[i] * x[i]
    factor = np.float32(1.0) / np.sqrt(square / np.float32(x.shape[0]) + eps)
    for i in range(x.shape[0]):
        out[i] = x[i] * factor * weight[i]


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
def add_bias(out: Any, bias: Any, begin: int, end: int, at: int) -> None:
    """`out[s, at + r] += bias[r]` for rows begin..end; an empty bias adds nothing."""
    if bias.shape[0]:
        for s in range(out.shape[0]):
            for row in range(begin, end):
                out[s, at + row] += bias[row]


@njit(fastmath=FASTMATH, error_model="numpy")
def exchange(store: Any, slot: int, other: int) -> None:
    """Let two slots of a store `[slots, head_dim]` change places."""
    for d in range(store.shape[1]):
        store[slot, d], store[other, d] = store[other, d], store[slot, d]


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


@njit(nogil=True, fastmath=FASTMATH, error_model="numpy", cache=True)
def decode_step(
    thread: int,
    counter: Any,  # int64 [2], zeros at the start: see kernels/team.py
    tokens: Any,  # int64 [n], one of each sequence
    places: Any,  # int64 [n]: true positions of the tokens
    threads: int,
    shape: Any,  # int64: hidden, intermediate, heads, kv_heads, head_dim, vocab, layers, activation, window
    constants: Any,  # fp32: eps, query scale, embedding scale
    matrices: Any,  # int64 [layers, 7, 2]: address and address of scales
    ends: Any,  # int64 [2, 2]: embedding and head, likewise
    norms: Any,  # fp32 [layers + 1, 2, hidden], the offset added; the final norm last
    head_norms: Any,  # fp32 [layers, 2, head_dim or 0]: of queries and keys
    qkv_bias: Any,  # fp32 [layers, rows or 0]
    o_bias: Any,
    mlp_bias: Any,  # fp32 [layers, 2 * intermediate + hidden or 0]
    cos: Any,  # fp32 [n, head_dim / 2]
    sin: Any,
    keys: Any,  # the store [slots, head_dim] that the sequences share, fp32 or bf16 as uint16
    values: Any,
    position: Any,  # int32 [slots]
    offset: Any,  # int64 [n, layers, kv_heads]
    length: Any,  # int64 [n, layers, kv_heads], counted up
    limit: Any,  # int64 [n, layers, kv_heads]
    sliding: Any,  # int64 [layers], 0 without a window
    rings: Any,  # int64 [n]: addresses of fp32 [layers, window, heads, head_dim], 0 without
    hidden: Any,  # fp32 [n, hidden] and the rest of the work space
    local: Any,  # fp32 [threads, n, max(hidden, heads * head_dim)]
    scratch: Any,  # int8 [threads, n, bytes]: see kernels/digits.py
    memory: Any,  # int8 [threads, bytes], at whole cache lines: see kernels/tile_rows.py
    turned: Any,  # fp32 [threads, group, head_dim]
    weights: Any,  # fp32 [threads, group, the longest piece]
    qkv: Any,  # fp32 [n, (heads + 2 kv_heads) * head_dim]
    logits: Any,  # fp32 [n, kv_heads, group, columns]
    top: Any,  # fp32 [n, kv_heads, pieces, group]
    total: Any,
    parts: Any,  # fp32 [n, kv_heads, pieces, group, head_dim]
    joined: Any,  # fp32 [n, 2, kv_heads, group]: largest logit and sum of exponentials of whole rows
    middle: Any,  # fp32 [2, n, max(hidden, intermediate)]
    out: Any,  # fp32 [n, vocab]
    like_weight: Any,
    lanes: Any,  # tuples whose lengths are head_dim / 16 (or 0) and the query heads of a KV head
    group_like: Any,
) -> None:
    """Feed one token to each of n sequences: writes its keys and values behind every row of its own, counts rows up (or
    lets a slot go), fills `out`. A weight is read once for all of them.

    Every thread of the team makes this call, each with its own number, and all return when the step is done.
    """
    width, intermediate, heads, kv_heads, dim = shape[0], shape[1], shape[2], shape[3], shape[4]
    vocab, layers, kind, window = shape[5], shape[6], shape[7], shape[8]
    eps, query_scale = constants[0], constants[1]
    group, n = heads // kv_heads, tokens.shape[0]
    q_rows, kv_rows = heads * dim, kv_heads * dim
    met = 0
    notes = scratch[thread], memory[thread]
    begin_tiles(memory[thread], n, like_weight)
    for s in range(thread, n, threads):
        embed_row(tokens[s], ends[0, 0], ends[0, 1], constants[2], hidden[s], like_weight)
    if layers:
        ask_for_part(matrices[0, Q, 0], q_rows, width, thread, threads, like_weight)
    met += 1
    meet(counter, met, threads)
    for layer in range(layers):
        tasks = 0
        for s in range(n):
            for head in range(kv_heads):
                tasks += pieces_of(length[s, layer, head] + 1)
        x = local[thread, :, :width]
        ask_for_part(matrices[layer, K, 0], kv_rows, width, thread, threads, like_weight)
        ask_for_part(matrices[layer, V, 0], kv_rows, width, thread, threads, like_weight)
        for s in range(n):
            normed_into(hidden[s], norms[layer, 0], eps, x[s])
        take(x, notes, like_weight)
        begin, end = share(q_rows, thread, threads)
        rows_times(matrices[layer, Q, 0], matrices[layer, Q, 1], begin, end, x, notes, qkv, 0, like_weight)
        add_bias(qkv, qkv_bias[layer], begin, end, 0)
        begin, end = share(kv_rows, thread, threads)
        rows_times(matrices[layer, K, 0], matrices[layer, K, 1], begin, end, x, notes, qkv, q_rows, like_weight)
        add_bias(qkv, qkv_bias[layer, q_rows:], begin, end, q_rows)
        at = q_rows + kv_rows
        rows_times(matrices[layer, V, 0], matrices[layer, V, 1], begin, end, x, notes, qkv, at, like_weight)
        add_bias(qkv, qkv_bias[layer, at:], begin, end, at)
        met += 1
        meet(counter, met, threads)
        turned_for = -1  # pieces of one head follow each other
        for task in range(tasks * thread // threads, tasks * (thread + 1) // threads):
            s, head, piece = 0, 0, task
            while piece >= pieces_of(length[s, layer, head] + 1):
                piece -= pieces_of(length[s, layer, head] + 1)
                head += 1
                if head == kv_heads:
                    s, head = s + 1, 0
            columns = length[s, layer, head] + 1
            first = offset[s, layer, head]
            queries = turned[thread]
            for g in range(group if turned_for != s * kv_heads + head else 0):
                query = qkv[s, (head * group + g) * dim : (head * group + g + 1) * dim]
                rotated_into(query, head_norms[layer, 0], eps, cos[s], sin[s], np.float32(1.0), queries[g])
                # a head whose pieces two threads share is written twice, alike
                if rings[s]:
                    ring = carray(pointer(rings[s], hidden), (layers, window, heads, dim))
                    ring[layer, places[s] % window, head * group + g] = queries[g]
                for d in range(dim):
                    queries[g, d] *= query_scale
            turned_for = s * kv_heads + head
            size = piece_columns(columns)
            at = piece * size
            if at + size >= columns:
                newcomer = first + columns - 1
                key_norm = head_norms[layer, 1]
                start = q_rows + head * dim
                key, value = qkv[s, start : start + dim], qkv[s, start + kv_rows : start + kv_rows + dim]
                write_newcomer(key, value, key_norm, eps, cos[s], sin[s], keys[newcomer], values[newcomer])
                position[newcomer] = places[s]
            attend_piece(
                queries,
                keys,
                values,
                position,
                first + at,
                min(size, columns - at),
                places[s] - sliding[layer] if sliding[layer] else -1,
                logits[s, head],
                at,
                top[s, head, piece],
                total[s, head, piece],
                parts[s, head, piece],
                weights[thread],
                lanes,
                group_like,
            )
        ask_for_part(matrices[layer, OUT, 0], width, q_rows, thread, threads, like_weight)
        met += 1
        meet(counter, met, threads)
        x = local[thread, :, :q_rows]
        for s in range(n):
            for head in range(kv_heads):
                pieces = pieces_of(length[s, layer, head] + 1)
                for g in range(group):
                    start = (head * group + g) * dim
                    best, mass = combine(
                        top[s, head, :pieces, g],
                        total[s, head, :pieces, g],
                        parts[s, head, :pieces, g],
                        x[s, start : start + dim],
                    )
                    if thread == 0:
                        joined[s, 0, head, g], joined[s, 1, head, g] = best, mass
        take(x, notes, like_weight)
        begin, end = share(width, thread, threads)
        update = middle[0]
        rows_times(matrices[layer, OUT, 0], matrices[layer, OUT, 1], begin, end, x, notes, update, 0, like_weight)
        add_bias(update, o_bias[layer], begin, end, 0)
        for s in range(n):
            for row in range(begin, end):
                hidden[s, row] += update[s, row]
        ask_for_part(matrices[layer, GATE, 0], intermediate, width, thread, threads, like_weight)
        met += 1
        meet(counter, met, threads)
        for row in range(thread, n * kv_heads, threads):
            s, head = row // kv_heads, row % kv_heads
            newest = places[s] - window
            rows = offset[s], length[s], limit[s]
            make_room(layer, head, newest, *rows, keys, values, position, logits[s], joined[s])
        x = local[thread, :, :width]
        ask_for_part(matrices[layer, UP, 0], intermediate, width, thread, threads, like_weight)
        for s in range(n):
            normed_into(hidden[s], norms[layer, 1], eps, x[s])
        take(x, notes, like_weight)
        begin, end = share(intermediate, thread, threads)
        gate, up = middle[0], middle[1]
        rows_times(matrices[layer, GATE, 0], matrices[layer, GATE, 1], begin, end, x, notes, gate, 0, like_weight)
        rows_times(matrices[layer, UP, 0], matrices[layer, UP, 1], begin, end, x, notes, up, 0, like_weight)
        add_bias(gate, mlp_bias[layer], begin, end, 0)
        add_bias(up, mlp_bias[layer, intermediate:], begin, end, 0)
        for s in range(n):
            activate_and_gate(gate[s, begin:end], up[s, begin:end], kind)
        ask_for_part(matrices[layer, DOWN, 0], width, intermediate, thread, threads, like_weight)
        met += 1
        meet(counter, met, threads)
        begin, end = share(width, thread, threads)
        gated, x = middle[0, :, :intermediate], local[thread, :, :width]
        take(gated, notes, like_weight)
        rows_times(matrices[layer, DOWN, 0], matrices[layer, DOWN, 1], begin, end, gated, notes, x, 0, like_weight)
        add_bias(x, mlp_bias[layer, 2 * intermediate :], begin, end, 0)
        for s in range(n):
            for row in range(begin, end):
                hidden[s, row] += x[s, row]
        if layer + 1 < layers:
            ask_for_part(matrices[layer + 1, Q, 0], q_rows, width, thread, threads, like_weight)
        else:
            ask_for_part(ends[1, 0], vocab, width, thread, threads, like_weight)
        met += 1
        meet(counter, met, threads)
    x = local[thread, :, :width]
    for s in range(n):
        normed_into(hidden[s], norms[layers, 0], eps, x[s])
    take(x, notes, like_weight)
    begin, end = share(vocab, thread, threads)
    rows_times(ends[1, 0], ends[1, 1], begin, end, x, notes, out, 0, like_weight)
    end_tiles(like_weight)
