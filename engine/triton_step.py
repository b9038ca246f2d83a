"""Triton kernels of what lies between a decode step's matrix products: a few numbers each, so one launch for each.

In plain torch these are some forty launches a layer, which at one token take as long as the weights. Each rounds where
the plain form rounds, and sums in fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_norm_kernel(
    hidden,  # [n, HIDDEN], raised by delta if ADD
    delta,  # [n, HIDDEN]
    weight,  # [HIDDEN]
    out,  # [n, HIDDEN], written
    eps,
    norm_offset,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
):
    """hidden += delta, and its RMS norm. Grid (n,)."""
    row = tl.program_id(0).to(tl.int64) * HIDDEN
    columns = tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    x = tl.load(hidden + row + columns, mask=inside, other=0.0)
    if ADD:
        more = tl.load(delta + row + columns, mask=inside, other=0.0)
        x = (x.to(tl.float32) + more.to(tl.float32)).to(hidden.dtype.element_ty)
        tl.store(hidden + row + columns, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32) + norm_offset
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / HIDDEN + eps) * scale
    tl.store(out + row + columns, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def turned(source, norm, cos, sin, eps, norm_offset, HALF: tl.constexpr, HALF_PAD: tl.constexpr, NORM: tl.constexpr):
    """Both halves of one head, normed where NORM, rotated, in the dtype of the source."""
    half = tl.arange(0, HALF_PAD)
    inside = half < HALF
    first = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + half, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(first * first, 0) + tl.sum(second * second, 0)) / (2 * HALF) + eps)
        first *= scale * (tl.load(norm + half, mask=inside, other=0.0).to(tl.float32) + norm_offset)
        second *= scale * (tl.load(norm + HALF + half, mask=inside, other=0.0).to(tl.float32) + norm_offset)
        first = first.to(source.dtype.element_ty).to(tl.float32)
        second = second.to(source.dtype.element_ty).to(tl.float32)
    c = tl.load(cos + half, mask=inside, other=0.0)
    s = tl.load(sin + half, mask=inside, other=0.0)
    left = (first * c - second * s).to(source.dtype.element_ty)
    right = (second * c + first * s).to(source.dtype.element_ty)
    return left, right


@triton.jit
def place_kernel(
    q,  # [n, HEADS * head_dim], rows q_stride apart
    k,  # [n, KV_HEADS * head_dim], k_stride
    v,  # [n, KV_HEADS * head_dim], v_stride
    q_norm,  # [head_dim], if NORM
    k_norm,
    cos,  # fp32 [n, head_dim / 2]
    sin,
    queries,  # [n, HEADS, head_dim], written
    ring,  # [n, ring_slots, HEADS, head_dim], written at position modulo ring_slots if RING
    keys,  # [slots, head_dim], written behind each row
    values,
    position,  # int32 [slots], written there
    offset,  # int32 [n, KV_HEADS]
    length,  # int32 [n, KV_HEADS]; a row of negative length is not written
    query_position,  # int32 [n]
    q_stride,
    k_stride,
    v_stride,
    ring_slots,
    eps,
    norm_offset,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    NORM: tl.constexpr,
    RING: tl.constexpr,
):
    """Norm and rotate queries and keys, and put all where they are read: see `decode.batch_step`. Grid (n, heads of q
    and of k)."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half = tl.arange(0, HALF_PAD)
    inside = half < HALF
    angle = row * HALF
    at = tl.load(query_position + row)
    if head < HEADS:
        source = q + row * q_stride + head * 2 * HALF
        left, right = turned(source, q_norm, cos + angle, sin + angle, eps, norm_offset, HALF, HALF_PAD, NORM)
        target = queries + (row * HEADS + head) * 2 * HALF
        tl.store(target + half, left, mask=inside)
        tl.store(target + HALF + half, right, mask=inside)
        if RING:
            kept = ring + ((row * ring_slots + at % ring_slots) * HEADS + head) * 2 * HALF
            tl.store(kept + half, left.to(ring.dtype.element_ty), mask=inside)
            tl.store(kept + HALF + half, right.to(ring.dtype.element_ty), mask=inside)
    else:
        kv = head - HEADS  # names of their own: a compiled branch may not give one name two types
        count = tl.load(length + row * KV_HEADS + kv)
        if count >= 0:
            key = k + row * k_stride + kv * 2 * HALF
            low, high = turned(key, k_norm, cos + angle, sin + angle, eps, norm_offset, HALF, HALF_PAD, NORM)
            slot = tl.load(offset + row * KV_HEADS + kv).to(tl.int64) + count
            key_slot, value_slot = keys + slot * 2 * HALF, values + slot * 2 * HALF
            tl.store(key_slot + half, low.to(keys.dtype.element_ty), mask=inside)
            tl.store(key_slot + HALF + half, high.to(keys.dtype.element_ty), mask=inside)
            value = v + row * v_stride + kv * 2 * HALF
            first = tl.load(value + half, mask=inside, other=0.0)
            second = tl.load(value + HALF + half, mask=inside, other=0.0)
            tl.store(value_slot + half, first.to(values.dtype.element_ty), mask=inside)
            tl.store(value_slot + HALF + half, second.to(values.dtype.element_ty), mask=inside)
            tl.store(position + slot, at)


@triton.jit
def silu_kernel(gate, up, out, gate_stride, up_stride, columns, BLOCK: tl.constexpr):
    """out `[n, columns]` = silu(gate) * up, of rows that are strides apart. Grid (n, pieces)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    active = (x / (1.0 + tl.exp(-x))).to(gate.dtype.element_ty).to(tl.float32)
    tl.store(out + row * columns + column, (active * y).to(out.dtype.element_ty), mask=inside)
