"""Sixteen fp32 numbers at a time in LLVM's own terms, for loops that a compiler does not find by itself."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

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

    def ask(self, address: Any, offset: Any) -> None:
        """Ask for the cache line at an address, which need not be valid; nothing is waited for."""
        pointer = BYTE.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, WORD, WORD, WORD])
        function = self.builder.module.declare_intrinsic("llvm.prefetch", (pointer,), kind)
        flags = [ir.Constant(WORD, value) for value in (0, 3, 1)]  # to read, kept in all caches, data
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
