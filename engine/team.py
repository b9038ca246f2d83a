"""Python threads that enter one compiled call together."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np


def team_size(threads: int) -> int:
    """As many threads as were asked for, or one for each core that this process may use, where that is less.

    Those of a team wait for each other without letting go of their cores: two on one would work in turn.
    """
    can_say = hasattr(os, "sched_getaffinity")  # what taskset and containers leave; not everywhere
    return max(1, min(threads, len(os.sched_getaffinity(0)) if can_say else os.cpu_count() or 1))


class Team:
    """`size` threads, the caller's among them. The called function waits for all of them inside, see kernels/team.py.

    The others are daemon threads that sleep between calls and end with the team. Not for two callers at a time.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._counter = np.zeros(2, dtype=np.int64)  # arrivals at the barrier, given up
        self._members = [_Member(number) for number in range(1, size)]
        self._end = weakref.finalize(self, _dismiss, self._members)

    def run(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call `function(number, counter, *arguments)` in every thread; `function` lets go of the interpreter lock.

        An interrupt that strikes before all are inside gives the call up: whoever is inside returns, and what the call
        was to write is undefined.
        """
        self._counter[:] = 0
        try:
            for member in self._members:
                member.enter(function, self._counter, arguments)
            function(0, self._counter, *arguments)
        except BaseException:
            self._counter[1] = 1
            raise
        finally:
            for member in self._members:
                member.left()


class _Member:
    """One thread of a team: two locks pass it the word, the cheapest hand-over that Python has."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._go, self._done = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._done.acquire()
        self._task: tuple[Callable[..., Any], np.ndarray, tuple[Any, ...]] | None = None
        self._inside = False
        threading.Thread(target=self._live, name=f"cake-infer-{number}", daemon=True).start()

    def enter(self, function: Callable[..., Any], counter: np.ndarray, arguments: tuple[Any, ...]) -> None:
        self._task, self._inside = (function, counter, arguments), True
        self._go.release()

    def left(self) -> None:
        if self._inside:
            self._done.acquire()
            self._inside = False

    def end(self) -> None:
        self._task = None
        self._go.release()

    def _live(self) -> None:
        while True:
            self._go.acquire()
            task, self._task = self._task, None
            if task is None:
                return
            function, counter, arguments = task
            function(self.number, counter, *arguments)
            del task, function, arguments
            self._done.release()


def _dismiss(members: list[_Member]) -> None:
    for member in members:
        member.end()
