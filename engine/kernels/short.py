"""A layer's products for a short piece of text as compiled calls, in the matrix tiles of `tiles.py`.

Weights are read where they lie, once for all tokens, which are worked in blocks of 16: a block is normed and split by
one thread, for all to read, and then every thread has rows of its own of each matrix. Sums of int8 weights are exact,
and a token's results do not depend on how many tokens or threads there are, bit for bit. Attention is not here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from .arithmetic import FASTMATH, LINE, activate_and_gate, narrow, pointer, widen
from .matvec import share
from .newcomers import rotated_into, write_newcomer
from .step import DOWN, GATE, OUT, UP, K, Q, V, add_bias, normed_into
from .team import meet
from .tile_rows import SUMS, begin_tiles, block_bytes, end_tiles, spread_block, tile_blocks, write_planes
from .vectors import WIDTH


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


@njit(fastmath=FASTMATH, error_model="numpy")
def add_update(hidden: Any, update: Any, begin: int, end: int) -> None:
    for s in range(hidden.shape[0]):
        line, more = hidden[s, begin:end], update[s, begin:end]
        for row in range(line.shape[0]):
            line[row] += more[row]


@njit(nogil=True, fastmath=FASTMATH, error_model="numpy", cache=True)
def before_attention(
    thread: int,
    counter: Any,  # int64 [2], zeros at the start: see kernels/team.py
    threads: int,
    layer: int,
    shape: Any,  # these as in kernels/step.py
    constants: Any,
    matrices: Any,
    norms: Any,
    head_norms: Any,
    qkv_bias: Any,
    hidden: Any,  # fp32 [n, hidden]
    cos: Any,  # fp32 [n, head_dim / 2]
    sin: Any,
    places: Any,  # int64 [4]: addresses of queries [heads, n, head_dim], keys, values; numbers from KV head to KV head
    rows: Any,  # fp32 [threads, 16, the widest input]
    scratch: Any,  # int8 [threads, 16, bytes]: see kernels/digits.py
    memory: Any,  # int8 [threads, bytes], at whole cache lines: see kernels/tile_rows.py
    planes: Any,  # int8 [bytes], at a whole cache line: of all tokens
    products: Any,  # fp32 [n, at least (heads + 2 kv_heads) * head_dim]
    like_staging: Any,  # fp32, or bf16 as uint16
    like_weight: Any,
) -> None:
    """Write rotated queries, keys and values of n tokens."""
    heads, kv_heads, dim = shape[2], shape[3], shape[4]
    n, width = hidden.shape
    q_rows, kv_rows, eps = heads * dim, kv_heads * dim, constants[0]
    begin_tiles(memory[thread], WIDTH, like_weight)
    take_normed(thread, threads, hidden, norms[layer, 0], eps, rows[thread], scratch[thread], planes, like_weight)
    meet(counter, 1, threads)
    at = 0
    for which in (Q, K, V):
        count = q_rows if which == Q else kv_rows
        begin, end = share(count, thread, threads)
        times(matrices[layer, which], begin, end, width, planes, memory[thread], products, at, like_weight)
        add_bias(products, qkv_bias[layer, at:], begin, end, at)
        at += count
    end_tiles(like_weight)
    meet(counter, 2, threads)
    queries = carray(pointer(places[0], like_staging), (heads, n, dim))
    turned = rows[thread, 0, :dim]
    for s in range(thread, n, threads):
        for head in range(heads):
            query = products[s, head * dim : (head + 1) * dim]
            rotated_into(query, head_norms[layer, 0], eps, cos[s], sin[s], np.float32(1.0), turned)
            for d in range(dim):
                queries[head, s, d] = narrow(turned[d], queries)
        for head in range(kv_heads):
            at = (head * places[3] + s * dim) * like_staging.itemsize
            key = carray(pointer(places[1] + at, like_staging), (dim,))
            value = carray(pointer(places[2] + at, like_staging), (dim,))
            start = q_rows + head * dim
            new_key, new_value = products[s, start : start + dim], products[s, start + kv_rows : start + kv_rows + dim]
            write_newcomer(new_key, new_value, head_norms[layer, 1], eps, cos[s], sin[s], key, value)


@njit(nogil=True, fastmath=FASTMATH, error_model="numpy", cache=True)
def after_attention(
    thread: int,
    counter: Any,
    threads: int,
    layer: int,
    shape: Any,
    constants: Any,
    matrices: Any,
    norms: Any,
    o_bias: Any,
    mlp_bias: Any,
    attended: int,  # address of [heads, n, head_dim], contiguous
    hidden: Any,
    rows: Any,
    scratch: Any,
    memory: Any,
    planes: Any,
    products: Any,  # fp32 [n, at least hidden]
    gate: Any,  # fp32 [n, intermediate]
    up: Any,
    like_staging: Any,
    like_weight: Any,
) -> None:
    """Add what attention and MLP give to the hidden states of n tokens, in place."""
    intermediate, heads, dim, kind = shape[1], shape[2], shape[4], shape[7]
    n, width = hidden.shape
    mine, own = rows[thread], memory[thread]
    begin_tiles(own, WIDTH, like_weight)
    found = carray(pointer(attended, like_staging), (heads, n, dim))
    for first in range(WIDTH * thread, n, WIDTH * threads):
        count = min(WIDTH, n - first)
        for head in range(heads):
            for s in range(count):
                line, part = mine[s, head * dim : (head + 1) * dim], found[head, first + s]
                for d in range(dim):
                    line[d] = widen(part[d])
        take_block(mine, count, first, heads * dim, scratch[thread], planes, like_weight)
    meet(counter, 1, threads)
    begin, end = share(width, thread, threads)
    times(matrices[layer, OUT], begin, end, heads * dim, planes, own, products, 0, like_weight)
    add_bias(products, o_bias[layer], begin, end, 0)
    add_update(hidden, products, begin, end)
    meet(counter, 2, threads)
    take_normed(thread, threads, hidden, norms[layer, 1], constants[0], mine, scratch[thread], planes, like_weight)
    meet(counter, 3, threads)
    begin, end = share(intermediate, thread, threads)
    times(matrices[layer, GATE], begin, end, width, planes, own, gate, 0, like_weight)
    times(matrices[layer, UP], begin, end, width, planes, own, up, 0, like_weight)
    add_bias(gate, mlp_bias[layer], begin, end, 0)
    add_bias(up, mlp_bias[layer, intermediate:], begin, end, 0)
    for s in range(n):
        activate_and_gate(gate[s, begin:end], up[s, begin:end], kind)
    meet(counter, 4, threads)
    for first in range(WIDTH * thread, n, WIDTH * threads):
        count = min(WIDTH, n - first)
        take_block(gate[first:], count, first, intermediate, scratch[thread], planes, like_weight)
    meet(counter, 5, threads)
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
