"""Triton kernels that multiply a few tokens with an int8 matrix: weights are read once, as they are stored.

A number of a row is `data * factor`: products and sums are made with the whole numbers, in fp32, and the factor comes
last. Bandwidth is all that counts: `matvec_kernel` keeps a wide strip of every row in flight, `few_rows_kernel` uses
the tensor cores so that up to 16 tokens cost what one does.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def matvec_kernel(
    x,  # [columns]
    data,  # int8 [outputs, columns], contiguous
    factors,  # fp32 [outputs]
    bias,  # [outputs], read if BIAS
    out,  # [outputs], written
    outputs,
    columns,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
):
    """One token. Grid (row blocks,)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside_row = row < outputs
    lines = row.to(tl.int64)[:, None] * columns
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in tl.range(0, columns, BLOCK, num_stages=4):  # said here, so that loads without a tl.dot run ahead too
        column = first + tl.arange(0, BLOCK)
        inside = column < columns
        value = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(data + lines + column[None, :], mask=inside_row[:, None] & inside[None, :], other=0)
        sums += weight.to(tl.float32) * value[None, :]
    result = tl.sum(sums, 1) * tl.load(factors + row, mask=inside_row, other=0.0)
    if BIAS:
        result += tl.load(bias + row, mask=inside_row, other=0.0).to(tl.float32)
    tl.store(out + row, result.to(out.dtype.element_ty), mask=inside_row)


@triton.jit
def few_rows_kernel(
    x,  # [tokens, columns], contiguous
    data,  # int8 [outputs, columns], contiguous
    factors,  # fp32 [outputs]
    bias,  # [outputs], read if BIAS
    out,  # [tokens, outputs], written
    tokens,
    outputs,
    columns,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Up to TOKENS tokens. Grid (row blocks,)."""
    row, token = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, TOKENS)
    inside_row, inside_token = row < outputs, token < tokens
    lines = row.to(tl.int64)[:, None] * columns
    sums = tl.zeros([ROWS, TOKENS], tl.float32)
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < columns
        value = tl.load(
            x + token[None, :] * columns + column[:, None], mask=inside_token[None, :] & inside[:, None], other=0.0
        )  # [BLOCK, TOKENS]
        weight = tl.load(data + lines + column[None, :], mask=inside_row[:, None] & inside[None, :], other=0)
        if WIDEN:  # the interpreter cannot multiply bf16
            sums += tl.dot(weight.to(tl.float32), value.to(tl.float32), input_precision="ieee")
        else:
            sums += tl.dot(weight.to(value.dtype), value, input_precision="ieee")
    result = sums * tl.load(factors + row, mask=inside_row, other=0.0)[:, None]
    if BIAS:
        result += tl.load(bias + row, mask=inside_row, other=0.0).to(tl.float32)[:, None]
    tl.store(
        out + token[None, :] * outputs + row[:, None],
        result.to(out.dtype.element_ty),
        mask=inside_token[None, :] & inside_row[:, None],
    )
