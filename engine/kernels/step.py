"""One decode step of n sequences as one compiled call: embedding to logits, weights and rows read where they lie.

Five phases a layer, between which the threads of the team meet; norms are worked by every thread instead of costing a
phase. In a phase a thread owns whole blocks of output rows, or whole (KV head, piece of columns) tasks, so nothing is
summed across threads and the number of threads changes no bit of the result.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from .arithmetic import FASTMATH, activate_and_gate, pointer
from .attention import attend_piece, combine, piece_columns, pieces_of
from .embedding import embed_row
from .matvec import ask_for_part, rows_times, share, take
from .newcomers import make_room, rotated_into, write_newcomer
from .packed_rows import attend_packed
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
def add_bias(out: Any, bias: Any, begin: int, end: int, at: int) -> None:
    """`out[s, at + r] += bias[r]` for rows begin..end; an empty bias adds nothing."""
    if bias.shape[0]:
        for s in range(out.shape[0]):
            for row in range(begin, end):
                out[s, at + row] += bias[row]


@njit(error_model="numpy")
def row_pieces(length: Any, packed: Any) -> Any:
    """Pieces of a row with its newcomer: those that are packed come first."""
    return pieces_of(packed) + pieces_of(length + 1)


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
    packed: Any,  # the store of packed rows, see kernels/packed_rows.py; empty tables where nothing is packed
    packed_offset: Any,  # int64 [n, layers, kv_heads]: rows that a query attends to besides
    packed_length: Any,
    sliding: Any,  # int64 [layers], 0 without a window
    rings: Any,  # int64 [n]: addresses of fp32 [layers, window, heads, head_dim], 0 without
    hidden: Any,  # fp32 [n, hidden] and the rest of the work space
    local: Any,  # fp32 [threads, n, max(hidden, heads * head_dim)]
    scratch: Any,  # int8 [threads, n, bytes]: see kernels/digits.py
    memory: Any,  # int8 [threads, bytes], at whole cache lines: see kernels/tile_rows.py
    turned: Any,  # fp32 [threads, group, head_dim]
    weights: Any,  # fp32 [threads, group, the longest piece]
    shares: Any,  # fp32 [threads, lines, the longest piece]: see kernels/packed_rows.py
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
    bits: Any,  # a tuple whose length is the bits of a packed number, 0 where nothing is packed
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
                tasks += row_pieces(length[s, layer, head], packed_length[s, layer, head])
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
            here = row_pieces(length[s, layer, head], packed_length[s, layer, head])
            while piece >= here:
                piece -= here
                head += 1
                if head == kv_heads:
                    s, head = s + 1, 0
                here = row_pieces(length[s, layer, head], packed_length[s, layer, head])
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
            oldest = places[s] - sliding[layer] if sliding[layer] else -1
            behind = packed_length[s, layer, head]
            if piece < pieces_of(behind):
                size = piece_columns(behind)
                attend_packed(
                    queries,
                    packed,
                    packed_offset[s, layer, head] + piece * size,
                    min(size, behind - piece * size),
                    oldest,
                    top[s, head, piece],
                    total[s, head, piece],
                    parts[s, head, piece],
                    weights[thread],
                    shares[thread],
                    lanes,
                    group_like,
                    bits,
                )
                continue
            size = piece_columns(columns)
            at = (piece - pieces_of(behind)) * size
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
                oldest,
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
                pieces = row_pieces(length[s, layer, head], packed_length[s, layer, head])
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
