"""Triton kernel of a decode step's products: a few tokens with a matrix that is read once, as it is stored.

What a library's product is not made for: at one token all that counts is that every SM has enough of the matrix on its
way. So one token's products are sums of strips, up to 16 tokens' go to the tensor cores in one tile, and the norm in
front, the gate and the residual behind are worked in the same pass over the matrix, in which the input is read anyway.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def product_kernel(
    x,  # [n, columns], contiguous
    norm,  # [columns], if NORM: x is normed first
    weight,  # [outputs, columns], contiguous; [2 * outputs, columns] if GATED: gate on top of up
    bias,  # [outputs] (or 2 * outputs), if BIAS
    out,  # [n, outputs], written; raised if ADD
    tokens,
    outputs,
    columns,
    eps,
    norm_offset,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """out = x @ weight^T + bias, of up to TOKENS tokens; silu(gate) * up if GATED. Grid (row blocks,).

    The sum of a row's squares goes along with the products, and its root behind them: a norm costs no pass of its own.
    """
    row, token = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, TOKENS)
    inside_row, inside_token = row < outputs, token < tokens
    lines = row.to(tl.int64)[:, None] * columns
    lower = (row.to(tl.int64) + outputs)[:, None] * columns  # those of up, below the gate's
    kind: tl.constexpr = x.dtype.element_ty
    if TOKENS == 1:
        strips = tl.zeros([ROWS, BLOCK], tl.float32)
        others = tl.zeros([ROWS, BLOCK], tl.float32)
        squares = tl.zeros([BLOCK], tl.float32)
    else:
        sums = tl.zeros([ROWS, TOKENS], tl.float32)
        more = tl.zeros([ROWS, TOKENS], tl.float32)
        squares = tl.zeros([TOKENS], tl.float32)
    for first in tl.range(0, columns, BLOCK, num_stages=4):  # said here, so that loads without a tl.dot run ahead too
        column = first + tl.arange(0, BLOCK)
        inside = column < columns
        part = inside_row[:, None] & inside[None, :]
        line = tl.load(weight + lines + column[None, :], mask=part, other=0.0)
        if GATED:
            other = tl.load(weight + lower + column[None, :], mask=part, other=0.0)
        if NORM:
            factor = tl.load(norm + column, mask=inside, other=0.0).to(tl.float32) + norm_offset
        if TOKENS == 1:
            value = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
            if NORM:
                squares += value * value
                value *= factor
            strips += line.to(tl.float32) * value[None, :]
            if GATED:
                others += other.to(tl.float32) * value[None, :]
        else:
            many = tl.load(
                x + token[None, :] * columns + column[:, None], mask=inside_token[None, :] & inside[:, None], other=0.0
            )  # [BLOCK, TOKENS]
            if NORM:
                wide = many.to(tl.float32)
                squares += tl.sum(wide * wide, 0)
                many = (wide * factor[:, None]).to(kind)
            if WIDEN:  # the interpreter cannot multiply bf16
                many, line = many.to(tl.float32), line.to(tl.float32)
            sums += tl.dot(line, many, input_precision="ieee")
            if GATED:
                if WIDEN:
                    other = other.to(tl.float32)
                more += tl.dot(other, many, input_precision="ieee")
    if TOKENS == 1:
        sums = tl.sum(strips, 1)[:, None]
        more = tl.sum(others, 1)[:, None]
    if NORM:
        if TOKENS == 1:
            scale = tl.rsqrt(tl.sum(squares, 0) / columns + eps)
        else:
            scale = tl.rsqrt(squares / columns + eps)[None, :]
        sums *= scale
        more *= scale
    if BIAS:
        sums += tl.load(bias + row, mask=inside_row, other=0.0).to(tl.float32)[:, None]
        if GATED:
            more += tl.load(bias + outputs + row, mask=inside_row, other=0.0).to(tl.float32)[:, None]
    if GATED:  # rounded where plain torch rounds
        gate = sums.to(kind).to(tl.float32)
        gate = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
        sums = gate * more.to(kind).to(tl.float32)
    place = out + token[None, :] * outputs + row[:, None]
    there = inside_token[None, :] & inside_row[:, None]
    if ADD:
        sums = sums.to(kind).to(tl.float32) + tl.load(place, mask=there, other=0.0).to(tl.float32)
    tl.store(place, sums.to(out.dtype.element_ty), mask=there)
