"""The barrier at which the threads of a team meet inside compiled code.

numba's own parallel regions cost a microsecond or more to enter, each is compiled as a function of its own (three times
the compile time of the whole step), and they need an OpenMP runtime beside torch's. A step of a model has five phases a
layer, so the team enters compiled code once a token and meets here between phases.
"""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

SPINS_BEFORE_YIELD = 1 << 8
_X86 = platform.machine().lower() in ("x86_64", "amd64", "i686")


@intrinsic
def arrive(typingctx: Any, counter: Any) -> Any:
    """Add 1 to `counter[0]`, int64, as one indivisible step that orders all memory before and after it."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        builder.atomic_rmw("add", data, ir.Constant(ir.IntType(64), 1), "acq_rel")
        return context.get_dummy_value()

    return types.void(counter), codegen


@intrinsic
def arrived(typingctx: Any, counter: Any) -> Any:
    """`counter[0]` as it is now; what other threads wrote before they arrived is seen after it."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.load_atomic(data, "acquire", 8)

    return types.int64(counter), codegen


@intrinsic
def pause(typingctx: Any) -> Any:
    """Tell the core that this is a waiting loop."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if _X86:
            function_type = ir.FunctionType(ir.VoidType(), [])
            builder.call(builder.module.declare_intrinsic("llvm.x86.sse2.pause", (), function_type), [])
        return context.get_dummy_value()

    return types.void(), codegen


_sched_yield = types.ExternalFunction("sched_yield", types.int32())


@njit(error_model="numpy")
def meet(counter: Any, round_: int, threads: int) -> None:
    """Wait until every thread of the team has called this for the `round_`-th time (1, 2, ...).

    counter: int64 `[2]`, arrivals and whether the call has been given up: then nobody waits for anybody.
    """
    if threads == 1:
        return
    arrive(counter)
    spins = 0
    while arrived(counter) < round_ * threads:
        if counter[1]:
            return
        spins += 1
        if spins < SPINS_BEFORE_YIELD:
            pause()
        else:
            _sched_yield()
