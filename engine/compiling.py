"""Compiling a kernel behind whoever waits for it, or loading it from the cache, once per form of its arguments."""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np

from .background import Background
from .kernels import kernels_cached, kernels_kept, locked, mark_cached
from .stepper import OnWait

log = logging.getLogger(__name__)


class Compiling:
    """What has been compiled, and what is being compiled, for a team (see team.py) of one owner."""

    def __init__(self) -> None:
        self._ready: set[str] = set()
        self._running: dict[str, Background] = {}
        self._not_kept: set[str] = set()

    def ensure(
        self,
        kind: str,
        function: Any,
        arguments: tuple[object, ...],
        *,
        what: str,
        seconds: int,
        on_wait: OnWait | None = None,
    ) -> None:
        """Return when `function(number, counter, *arguments)` can be called without compiling.

        kind: the form of the arguments, the name in the cache. what, seconds (on an idle machine): for the notice,
        given where nothing is cached. An interrupt (or an `on_wait` that raises) ends the wait at once; the compilation
        goes on behind, and whoever asks next waits for the same one.
        """
        if kind in self._ready:
            return
        import numba

        started = time.perf_counter()
        if kind not in self._running:
            if not kernels_cached(kind):
                once = ", once for this machine" if kernels_kept() else ""
                log.info("compiling %s%s (about %d s if nothing else runs)", what, once, seconds)
            counter = np.zeros(2, dtype=np.int64)
            signature = tuple(numba.typeof(argument) for argument in (0, counter, *arguments))
            self._running[kind] = Background(
                lambda: self._compile(kind, function, signature), name="cake-infer-compiler"
            )
        try:
            self._running[kind].wait(on_wait)
        finally:
            if self._running[kind].done:  # also after a failure: who asks next tries again
                del self._running[kind]
        if kind not in self._not_kept:
            mark_cached(kind)
        self._ready.add(kind)
        log.debug("%s ready in %.2f s", kind, time.perf_counter() - started)

    def _compile(self, kind: str, function: Any, signature: tuple[object, ...]) -> None:
        """Numba compiles, and then saves what it has compiled: on a full disk only the second fails.

        Of two processes that want the same the second loads what the first has compiled.
        """
        try:
            with locked(kind):
                function.compile(signature)
        except OSError as error:
            if signature not in function.overloads:
                raise
            self._not_kept.add(kind)
            log.warning("what was compiled cannot be kept (%s): the next start compiles it anew", error)
