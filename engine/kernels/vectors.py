"""Sixteen fp32 numbers at a time in LLVM's own terms, for loops that a compiler does not find by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .arithmetic import COEFFICIENTS, LN2_HIGH, LN2_LOW, LOG2E

WIDTH = 16
BYTE, HALF, WORD, REAL = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()
BYTES, HALVES, WORDS, REALS = (ir.VectorType(kind, WIDTH) for kind in (BYTE, HALF, WORD, REAL))


class Vectors:
    """What the two loops below are built from."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder
        kind = ir.FunctionType(REALS, [REALS] * 3)
        self._fused = cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.v16f32")

    def at(self, address: Any, offset: Any, kind: Any) -> Any:
        """A pointer to `kind`, `offset` bytes behind an address."""
        return self.builder.inttoptr(self.builder.add(address, offset), kind.as_pointer())

    def constant(self, number: int) -> Any:
        return ir.Constant(ir.IntType(64), number)

    def load(self, address: Any, offset: Any, item: int) -> Any:
        """Sixteen numbers as fp32: of 4 bytes as they are, of 2 bytes bf16, of 1 byte int8."""
        builder = self.builder
        if item == 4:
            return builder.load(self.at(address, offset, REALS), align=4)
        if item == 2:
            words = builder.zext(builder.load(self.at(address, offset, HALVES), align=2), WORDS)
            return builder.bitcast(builder.shl(words, ir.Constant(WORDS, [16] * WIDTH)), REALS)
        return builder.sitofp(builder.sext(builder.load(self.at(address, offset, BYTES), align=1), WORDS), REALS)

    def ask(self, address: Any, offset: Any, caches: int = 3) -> None:
        """Ask for the cache line at an address, which need not be valid; nothing is waited for.

        caches: 3 for all of a core's, 2 for all but the first.
        """
        pointer = BYTE.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, WORD, WORD, WORD])
        function = self.builder.module.declare_intrinsic("llvm.prefetch", (pointer,), kind)
        flags = [ir.Constant(WORD, value) for value in (0, caches, 1)]  # to read, data
        self.builder.call(function, [self.at(address, offset, BYTE), *flags])

    def fused(self, a: Any, b: Any, c: Any) -> Any:
        return self.builder.call(self._fused, [a, b, c])

    def splat(self, scalar: Any) -> Any:
        undefined = ir.Constant(REALS, ir.Undefined)
        single = self.builder.insert_element(undefined, scalar, ir.Constant(WORD, 0))
        return self.builder.shuffle_vector(single, undefined, ir.Constant(WORDS, [0] * WIDTH))

    def total(self, vector: Any) -> Any:
        """The sum of a vector's numbers: halves are added until one is left."""
        width = WIDTH
        while width > 1:
            width //= 2
            undefined = ir.Constant(vector.type, ir.Undefined)
            low, high = (
                self.builder.shuffle_vector(
                    vector, undefined, ir.Constant(ir.VectorType(WORD, width), list(range(start, start + width)))
                )
                for start in (0, width)
            )
            vector = self.builder.fadd(low, high)
        return self.builder.extract_element(vector, ir.Constant(WORD, 0))

    def of_reals(self, name: str, *arguments: Any) -> Any:
        """A function of LLVM's own on vectors of fp32."""
        kind = ir.FunctionType(REALS, [REALS] * len(arguments))
        return self.builder.call(
            cgutils.get_or_insert_function(self.builder.module, kind, f"llvm.{name}.v16f32"), arguments
        )

    def exponential(self, x: Any) -> Any:
        """`arithmetic.exp32` for numbers up to 88; what is not a number stays so."""
        builder = self.builder

        def every(number: Any) -> Any:
            return ir.Constant(REALS, [float(np.float32(number))] * WIDTH)

        tiny = builder.fcmp_ordered("<", x, every(-87.0))
        bounded = builder.select(tiny, every(-87.0), x)
        n = self.of_reals("floor", self.fused(bounded, every(LOG2E), every(0.5)))
        r = self.fused(n, every(-LN2_LOW), self.fused(n, every(-LN2_HIGH), bounded))
        p = every(COEFFICIENTS[0])
        for coefficient in COEFFICIENTS[1:]:
            p = self.fused(p, r, every(coefficient))
        power = builder.add(builder.fptosi(n, WORDS), ir.Constant(WORDS, [127] * WIDTH))
        power = builder.bitcast(builder.shl(power, ir.Constant(WORDS, [23] * WIDTH)), REALS)
        return builder.select(tiny, every(0.0), builder.fmul(p, power))


@intrinsic
def largest(typingctx: Any, numbers: Any, count: Any) -> Any:
    """The largest of `count` fp32 numbers at an address, a multiple of 16; what is not a number is passed over."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        make = Vectors(builder)
        best = cgutils.alloca_once_value(builder, ir.Constant(REALS, [float("-inf")] * WIDTH))
        with cgutils.for_range(builder, builder.lshr(args[1], make.constant(4))) as loop:
            part = make.load(args[0], builder.shl(loop.index, make.constant(6)), 4)
            builder.store(make.of_reals("maxnum", builder.load(best), part), best)
        kind = ir.FunctionType(REAL, [REALS])
        reduce = cgutils.get_or_insert_function(builder.module, kind, "llvm.vector.reduce.fmax.v16f32")
        return builder.call(reduce, [builder.load(best)])

    return types.float32(types.int64, types.int64), codegen


@intrinsic
def exponentials(typingctx: Any, numbers: Any, out: Any, count: Any, base: Any) -> Any:
    """`out = exp(numbers - base)`, fp32 at addresses, `count` a multiple of 16. Returns their sum."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        make = Vectors(builder)
        total = cgutils.alloca_once_value(builder, ir.Constant(REALS, None))
        offset = make.splat(args[3])
        with cgutils.for_range(builder, builder.lshr(args[2], make.constant(4))) as loop:
            at = builder.shl(loop.index, make.constant(6))
            part = make.exponential(builder.fsub(make.load(args[0], at, 4), offset))
            builder.store(part, make.at(args[1], at, REALS), align=4)
            builder.store(builder.fadd(builder.load(total), part), total)
        return make.total(builder.load(total))

    return types.float32(types.int64, types.int64, types.int64, types.float32), codegen
