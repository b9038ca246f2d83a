"""What the processor has, without numba, which takes several times as long to import."""

from __future__ import annotations

import ctypes
import platform
import sys
from functools import cache

from llvmlite import binding

_FEATURES = ("avx512f", "avx512bw", "avx512vnni", "amx-tile", "amx-bf16", "amx-int8")


@cache
def has_tiles() -> bool:
    """Whether there are matrix tiles (AMX), and Linux lets this process use them: it has to be asked."""
    if sys.platform != "linux" or platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    host = binding.get_host_cpu_features()
    if not all(host.get(name, False) for name in _FEATURES):
        return False
    arch_prctl, request, tile_data = 158, 0x1023, 18
    return bool(ctypes.CDLL(None).syscall(arch_prctl, request, tile_data) == 0)
