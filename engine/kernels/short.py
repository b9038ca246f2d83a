"""A layer over a short piece of text as one compiled call, its products in the matrix tiles of `tiles.py`.

Weights are read where they lie, once for all tokens, which are worked in blocks of 16: a block is normed and split by
one thread, for all to read, and then every thread has rows of its own of each matrix. Sums of int8 weights are exact,
and a token's results do not depend on how many tokens or threads there are, bit for bit. Attention is that of a decode
step, for one token and KV head after another; where that is much, another one's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from .arithmetic import FASTMATH, LINE, activate_and_gate, pointer
from .attention import attend_piece, combine, piece_columns
from .matvec import share
from .newcomers import rotated_into, write_newcomer
from .step import DOWN, GATE, OUT, UP, K, Q, V, add_bias, normed_into
from .team import meet
from .tile_rows import SUMS, begin_tiles, block_bytes, end_tiles, spread_block, tile_blocks, write_planes
from .vectors import WIDTH

ALL, BEFORE, AFTER = range(3)


@njit(error_model="numpy")
def take_block(rows: Any, count: int, first: int, width: int, scratch: Any, planes: Any, like: Any) -> None:
    """Write the planes of tokens first..first + count, of which `rows` holds `width` numbers each."""
    for s in range(count):
        write_planes(rows[s, :width], scratch[s], like)
    rounds = width * like.itemsize // LINE
    spread_block(count, scratch, rounds, planes.ctypes.data + first // WIDTH * block_bytes(rounds), rows)


@njit(error_model="numpy")
def times(table: Any, begin: int, end: int, width: int, planes: Any, memory: Any, out: Any, at: int, like: Any) -> None:
    """`out[s, at + r] = matrix[r] . x[s]` for rows begin..end of a matrix and the tokens whose planes are there."""
    if end > begin:
        target, sums = out.ctypes.data + 4 * at, memory.ctypes.data + SUMS
        row_bytes, planes_at = width * like.itemsize, planes.ctypes.data
        n, apart = out.shape[0], out.strides[0]
        tile_blocks(table[0], table[1], begin, end, row_bytes, n, planes_at, sums, target, apart, like)


@njit(error_model="numpy")
def take_normed(
    thread: int, threads: int, hidden: Any, norm: Any, eps: Any, rows: Any, scratch: Any, planes: Any, like: Any
) -> None:
    """The planes of the normed hidden states, of every `threads`-th block."""
    n, width = hidden.shape
    for first in range(WIDTH * thread, n, WIDTH * threads):
        count = min(WIDTH, n - first)
        for s in range(count):
            normed_into(hidden[first + s], norm, eps, rows[s, :width])
        take_block(rows, count, first, width, scratch, planes, like)


@njit(error_model="numpy")
def take_blocks(thread: int, threads: int, x: Any, width: int, scratch: Any, planes: Any, like: Any) -> None:
    """The planes of vectors fp32 `[n, width]`, of every `threads`-th block."""
    for first in range(WIDTH * thread, x.shape[0], WIDTH * threads):
        take_block(x[first:], min(WIDTH, x.shape[0] - first), first, width, scratch, planes, like)


@njit(fastmath=FASTMATH, error_model="numpy")
def add_update(hidden: Any, update: Any, begin: int, end: int) -> None:
    for s in range(hidden.shape[0]):
        line, more = hidden[s, begin:end], update[s, begin:end]
        for row in range(line.shape[0]):
            line[row] += more[row]


@njit(fastmath=FASTMATH, error_model="numpy")
def attend_token(
    queries: Any,  # fp32 [group, head_dim], rotated and scaled
    keys: Any,  # [columns, head_dim] of a KV head, fp32 or bf16
    values: Any,
    position: Any,  # int32 [columns]
    columns: int,  # that the token sees: what is held, and the new ones up to itself
    oldest: int,
    space: Any,  # fp32 [group, ...] each: logits, largest, sums, weighted values and weights of a thread
    out: Any,  # fp32 [group * head_dim], written
    lse: Any,  # fp32 [group], written: log-sum-exp of the logits
    lanes: Any,
    heads: Any,
) -> None:
    """Attention of one token's queries of one KV head."""
    logits, top, total, parts, weights = space
    group, dim = queries.shape
    size = piece_columns(columns)
    pieces = (columns + size - 1) // size
    for piece in range(pieces):
        at = piece * size
        count = min(size, columns - at)
        found = top[piece], total[piece], parts[piece]
        attend_piece(queries, keys, values, position, at, count, oldest, logits, at, *found, weights, lanes, heads)
    for g in range(group):
        line = out[g * dim : (g + 1) * dim]
        best, mass = combine(top[:pieces, g], total[:pieces, g], parts[:pieces, g], line)
        lse[g] = best + np.log(mass)


@njit(nogil=True, fastmath=FASTMATH, error_model="numpy", cache=True)
def read_layer(
    thread: int,
    counter: Any,  # int64 [2], zeros at the start: see kernels/team.py
    threads: int,
    layer: int,
    part: int,  # of the layer: ALL, or what is BEFORE or AFTER an attention that somebody else works
    last: int,  # tokens whose hidden states are wanted: the last so many
    shape: Any,  # these as in kernels/step.py
    constants: Any,
    matrices: Any,
    norms: Any,
    head_norms: Any,
    qkv_bias: Any,
    o_bias: Any,
    mlp_bias: Any,
    places: Any,  # int64 [kv_heads, 3]: addresses of a head's first key and value in staging, and how many it holds
    position: Any,  # int32 [kv_heads, columns]
    sliding: int,  # 0 without a window
    first: int,  # position of the first token
    hidden: Any,  # fp32 [n, hidden], the wanted ones are changed
    cos: Any,  # fp32 [n, head_dim / 2]
    sin: Any,
    queries: Any,  # fp32 [heads, n, head_dim], written: rotated
    lse: Any,  # fp32 [heads, n], written for the wanted ones
    rows: Any,  # fp32 [threads, 16, the widest input]
    scratch: Any,  # int8 [threads, 16, bytes]: see kernels/digits.py
    memory: Any,  # int8 [threads, bytes], at whole cache lines: see kernels/tile_rows.py
    planes: Any,  # int8 [bytes], at a whole cache line: of all tokens
    products: Any,  # fp32 [n, at least hidden, and queries, keys and values together]
    gate: Any,  # fp32 [n, intermediate]
    up: Any,
    attended: Any,  # fp32 [n, heads * head_dim], given with AFTER
    turned: Any,  # fp32 [threads, group, head_dim]
    logits: Any,  # fp32 [threads, group, columns] and the rest of a thread's space for attention
    top: Any,  # fp32 [threads, pieces, group]
    total: Any,
    parts: Any,  # fp32 [threads, pieces, group, head_dim]
    weights: Any,  # fp32 [threads, group, the longest piece]
    like_staging: Any,  # fp32, or bf16 as uint16
    like_weight: Any,
    lanes: Any,  # as in kernels/step.py
    group_like: Any,
) -> None:
    """One layer over n tokens: their keys and values are written behind what is held, the hidden states in place."""
    intermediate, heads, kv_heads, dim, kind = shape[1], shape[2], shape[3], shape[4], shape[7]
    n, width = hidden.shape
    group, q_rows, kv_rows, eps = heads // kv_heads, heads * dim, kv_heads * dim, constants[0]
    mine, own, digits = rows[thread], memory[thread], scratch[thread]
    met = 0
    begin_tiles(own, WIDTH, like_weight)
    if part != AFTER:
        take_normed(thread, threads, hidden, norms[layer, 0], eps, mine, digits, planes, like_weight)
        met += 1
        meet(counter, met, threads)
        at = 0
        for which in (Q, K, V):
            count = q_rows if which == Q else kv_rows
            begin, end = share(count, thread, threads)
            times(matrices[layer, which], begin, end, width, planes, own, products, at, like_weight)
            add_bias(products, qkv_bias[layer, at:], begin, end, at)
            at += count
        met += 1
        meet(counter, met, threads)
        for s in range(thread, n, threads):
            for head in range(heads):
                query = products[s, head * dim : (head + 1) * dim]
                rotated_into(query, head_norms[layer, 0], eps, cos[s], sin[s], np.float32(1.0), queries[head, s])
            for head in range(kv_heads):
                at = (places[head, 2] + s) * dim * like_staging.itemsize
                key = carray(pointer(places[head, 0] + at, like_staging), (dim,))
                value = carray(pointer(places[head, 1] + at, like_staging), (dim,))
                start = q_rows + head * dim
                found = products[s, start : start + dim], products[s, start + kv_rows : start + kv_rows + dim]
                write_newcomer(found[0], found[1], head_norms[layer, 1], eps, cos[s], sin[s], key, value)
    if part == BEFORE:
        end_tiles(like_weight)
        return
    if part == ALL:
        met += 1
        meet(counter, met, threads)
        space = logits[thread], top[thread], total[thread], parts[thread], weights[thread]
        tasks = kv_heads * last
        for task in range(tasks * thread // threads, tasks * (thread + 1) // threads):
            head, s = task // last, n - last + task % last
            held = places[head, 2]
            keys = carray(pointer(places[head, 0], like_staging), (held + n, dim))
            values = carray(pointer(places[head, 1], like_staging), (held + n, dim))
            for g in range(group):
                for d in range(dim):
                    turned[thread, g, d] = queries[head * group + g, s, d] * constants[1]
            oldest = first + s - sliding if sliding else -1
            out = attended[s, head * group * dim : (head + 1) * group * dim]
            mass = lse[head * group : (head + 1) * group, s]
            seen = held + s + 1
            attend_token(
                turned[thread], keys, values, position[head], seen, oldest, space, out, mass, lanes, group_like
            )
        met += 1
        meet(counter, met, threads)
    hidden, attended, products = hidden[n - last :], attended[n - last :], products[n - last :]
    gate, up = gate[n - last :], up[n - last :]
    take_blocks(thread, threads, attended, q_rows, digits, planes, like_weight)
    met += 1
    meet(counter, met, threads)
    begin, end = share(width, thread, threads)
    times(matrices[layer, OUT], begin, end, q_rows, planes, own, products, 0, like_weight)
    add_bias(products, o_bias[layer], begin, end, 0)
    add_update(hidden, products, begin, end)
    met += 1
    meet(counter, met, threads)
    take_normed(thread, threads, hidden, norms[layer, 1], eps, mine, digits, planes, like_weight)
    met += 1
    meet(counter, met, threads)
    begin, end = share(intermediate, thread, threads)
    times(matrices[layer, GATE], begin, end, width, planes, own, gate, 0, like_weight)
    times(matrices[layer, UP], begin, end, width, planes, own, up, 0, like_weight)
    add_bias(gate, mlp_bias[layer], begin, end, 0)
    add_bias(up, mlp_bias[layer, intermediate:], begin, end, 0)
    for s in range(last):
        activate_and_gate(gate[s, begin:end], up[s, begin:end], kind)
    met += 1
    meet(counter, met, threads)
    take_blocks(thread, threads, gate, intermediate, digits, planes, like_weight)
    met += 1
    meet(counter, met, threads)
    begin, end = share(width, thread, threads)
    times(matrices[layer, DOWN], begin, end, intermediate, planes, own, products, 0, like_weight)
    add_bias(products, mlp_bias[layer, 2 * intermediate :], begin, end, 0)
    add_update(hidden, products, begin, end)
    end_tiles(like_weight)


@njit(nogil=True, fastmath=FASTMATH, error_model="numpy", cache=True)
def head(
    thread: int,
    counter: Any,
    threads: int,
    shape: Any,
    constants: Any,
    ends: Any,
    norms: Any,
    hidden: Any,
    rows: Any,
    scratch: Any,
    memory: Any,
    planes: Any,
    out: Any,  # fp32 [n, vocab]
    like_weight: Any,
) -> None:
    """Logits of hidden states after the last layer."""
    width = hidden.shape[1]
    begin_tiles(memory[thread], WIDTH, like_weight)
    norm = norms[norms.shape[0] - 1, 0]
    take_normed(thread, threads, hidden, norm, constants[0], rows[thread], scratch[thread], planes, like_weight)
    meet(counter, 1, threads)
    begin, end = share(shape[5], thread, threads)
    times(ends[1], begin, end, width, planes, memory[thread], out, 0, like_weight)
    end_tiles(like_weight)
