"""OpenMP's threads, of which torch keeps some for every thread that has called it."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from pathlib import Path

SOFT = 1  # omp_pause_soft: what has been set stays set
MAPS = Path("/proc/self/maps")


def release_workers() -> None:
    """End the OpenMP threads that wait for the calling thread's next product; it gets new ones when it needs them.

    GNU's library lets waiting threads spin, which makes the parts of a product begin at once, but hardly any more as
    soon as all callers' threads together are more than the cores: a prefill then takes half as long again. So whoever
    hands the engine over to another thread for good calls this first. Does nothing with another library.
    """
    for path in _loaded("libgomp"):
        with suppress(OSError, AttributeError):
            ctypes.CDLL(path).omp_pause_resource_all(SOFT)


def _loaded(name: str) -> set[str]:
    """Paths of the shared libraries of a name that this process has loaded, as far as Linux tells."""
    try:
        lines = MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    return {path for line in lines if name in (path := line.split(maxsplit=5)[-1]).rpartition("/")[2]}
