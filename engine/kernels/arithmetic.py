"""Compiled scalar arithmetic and typed views of raw addresses, for the kernels beside this file.

Source of the exponential: Cody-Waite reduction by ln 2 and a polynomial of degree 6 on [-ln2/2, ln2/2].
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import float32, int8, njit, types, uint16
from numba.extending import intrinsic, overload

# `fast` would fold isnan and isinf to False and leave -inf undefined; these flags are as quick.
FASTMATH = {"reassoc", "contract", "nsz", "arcp", "afn"}

LINE = 64  # bytes of a cache line

LOG2E = np.float32(1.4426950408889634)
LN2_HIGH = np.float32(0.693359375)
LN2_LOW = np.float32(-2.12194440e-4)
COEFFICIENTS = tuple(
    np.float32(c) for c in (1.3888889e-3, 8.3333333e-3, 4.1666667e-2, 1.6666667e-1, 0.5, 1.0, 1.0)
)  # of e^r, the highest power first


@intrinsic
def pointer(typingctx: Any, address: Any, like: Any) -> Any:
    """The memory at an integer address as a pointer to the element type of the array `like`."""
    target = types.CPointer(like.dtype)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(target))

    return target(types.int64, like), codegen


@intrinsic
def prefetch(typingctx: Any, address: Any) -> Any:
    """Ask for the cache line at an integer address, which need not be valid; nothing is waited for."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        function = builder.module.declare_intrinsic("llvm.prefetch", (byte,), kind)
        # to read, to be kept in all caches, data
        flags = [ir.Constant(word, value) for value in (0, 3, 1)]
        builder.call(function, [builder.inttoptr(args[0], byte), *flags])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@njit(error_model="numpy")
def ask_for(address: int, nbytes: int) -> None:
    """Ask for every cache line of a stretch of memory."""
    for line in range(address, address + nbytes, LINE):
        prefetch(line)


@njit(fastmath=FASTMATH, error_model="numpy")
def exp32(x: Any) -> Any:
    """e to the x in fp32, relative error below 2e-7; below -87 (and for -inf) it is 0, above 88 it saturates."""
    bounded: Any = min(max(x, np.float32(-87.0)), np.float32(88.0))
    n = np.floor(bounded * LOG2E + np.float32(0.5))
    r = bounded - n * LN2_HIGH - n * LN2_LOW
    p = COEFFICIENTS[0]
    for coefficient in COEFFICIENTS[1:]:
        p = p * r + coefficient
    power = np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    return p * power if x >= np.float32(-87.0) else np.float32(0.0)


@njit(fastmath=FASTMATH, error_model="numpy")
def activate_and_gate(gate: Any, up: Any, kind: int) -> None:
    """`gate = activation(gate) * up`; 0 is silu, 1 gelu (erf), 2 gelu (tanh form). One loop each: a branch inside a
    loop would keep it from being vectorised."""
    if kind == 0:
        for i in range(gate.shape[0]):
            gate[i] = gate[i] / (np.float32(1.0) + exp32(-gate[i])) * up[i]
    elif kind == 1:
        for i in range(gate.shape[0]):
            x = gate[i]
            part = np.float32(math.erf(x * np.float32(0.7071067811865476)))
            gate[i] = np.float32(0.5) * x * (np.float32(1.0) + part) * up[i]
    else:
        for i in range(gate.shape[0]):
            x = gate[i]
            inner = np.float32(0.7978845608028654) * (x + np.float32(0.044715) * x * x * x)
            # x * (1 + tanh(u)) / 2 = x * (1 - 1 / (e^2u + 1))
            share = np.float32(1.0) - np.float32(1.0) / (exp32(np.float32(2.0) * inner) + np.float32(1.0))
            gate[i] = x * share * up[i]


def widen(stored: Any) -> Any:
    """A stored number as fp32: uint16 holds the upper half of an fp32 (bfloat16), int8 is a number, fp32 itself."""
    raise AssertionError("compiled code only")


@overload(widen, fastmath=FASTMATH)
def _widen(stored: Any) -> Any:
    # numba wants the arguments of the chosen form written exactly as here, annotations included
    if stored == uint16:

        def upper_half(stored: Any) -> Any:
            return np.uint32(np.uint32(stored) << np.uint32(16)).view(np.float32)

        return upper_half
    if stored in (int8, float32):

        def number(stored: Any) -> Any:
            return np.float32(stored)

        return number
    return None


def narrow(value: Any, like: Any) -> Any:
    """An fp32 number as it is stored in the array `like`: rounded to the nearest even bfloat16 for uint16."""
    raise AssertionError("compiled code only")


@overload(narrow, fastmath=FASTMATH)
def _narrow(value: Any, like: Any) -> Any:
    if like.dtype == uint16:

        def rounded(value: Any, like: Any) -> Any:
            bits = np.float32(value).view(np.uint32)
            return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))

        return rounded
    if like.dtype == float32:

        def exact(value: Any, like: Any) -> Any:
            return np.float32(value)

        return exact
    return None
