"""Captures of a function over fixed tensors: CUDA graphs, and the function itself where there are none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

Body = Callable[[], None]


class Capture(Protocol):
    """Makes a replay of a function over fixed tensors. Calling the function itself is one."""

    def __call__(self, body: Body) -> Body: ...

    def forget(self) -> None:
        """All replays made so far are gone, and what they took is free."""


class Uncaptured:
    """A replay that is the function itself."""

    def __call__(self, body: Body) -> Body:
        return body

    def forget(self) -> None:
        pass


class CudaGraphs:
    """Captures CUDA graphs that share a memory pool: only one of them runs at a time."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, body: Body) -> Body:
        """Run the body twice on a side stream, where kernels are compiled and libraries make their work space, and
        capture it then. It is called where every seat is empty, so that these runs change nothing."""
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(2):
                body()
        current.wait_stream(side)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # "thread_local": what other threads do on the GPU meanwhile is no error of this one. The outer context brings
        # the current stream back where the capture ends with an error, which the inner one then does not.
        with (
            torch.cuda.stream(current),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            body()
        replay: Body = graph.replay
        return replay

    def forget(self) -> None:
        self._pool = None
