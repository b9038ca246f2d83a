"""The window's statistics by the compiled pass: what `cache.scores` asks a worker for on a CPU."""

from __future__ import annotations

import logging
import time

import numpy as np
import torch
from torch import Tensor

from ..cache.view import LayerView
from .background import Background
from .kernels import kernels_cached, load_window, mark_cached
from .stepper import OnWait
from .team import Team

log = logging.getLogger(__name__)

FEWEST_COLUMNS = 1024  # below it torch is quick enough, and nothing need be compiled
_NOWHERE = np.iinfo(np.int32).max


class WindowWorker:
    """Works `cache.scores.window_moments` in compiled code, with the threads of its own team."""

    def __init__(self, threads: int) -> None:
        self._team, self._threads = Team(threads), threads
        self._module = load_window()
        self._compiled: set[str] = set()
        self._compiling: dict[str, Background] = {}
        self._attention = np.zeros((0, 0), dtype=np.float32)

    def fits(self, view: LayerView) -> bool:
        """Whether the pass has a form for this layer, and the layer is long enough."""
        keys = view.keys
        return (
            keys.device.type == "cpu"
            and keys.dtype in (torch.float32, torch.bfloat16)
            and keys.shape[2] % 16 == 0
            and keys.stride()[1:] == (keys.shape[2], 1)
            and max(view.columns) >= FEWEST_COLUMNS
        )

    def __call__(self, view: LayerView, gamma: float, on_wait: OnWait | None = None) -> tuple[Tensor, float, float]:
        """Scores before pooling fp32 `[kv_heads, n]` (0 in the window), dispersion and shift."""
        kv_heads, n, head_dim = view.keys.shape
        rows, columns = view.queries.shape[1], self._module.COLUMNS
        queries = view.queries.float().mul(view.scale).reshape(kv_heads, -1, head_dim).contiguous()
        padded = -(-n // columns) * columns
        lengths = np.array(view.columns, dtype=np.int64)
        positions = np.full((kv_heads, padded), _NOWHERE, dtype=np.int32)
        for head, length in enumerate(view.columns):
            positions[head, :length] = view.positions[head, :length].numpy()
        height = queries.shape[1]
        if self._attention.shape[0] < height or self._attention.shape[1] < padded:
            self._attention = np.zeros((height, padded), dtype=np.float32)
        moments = np.zeros((kv_heads, height, 4), dtype=np.float32)
        scores = np.zeros((kv_heads, padded), dtype=np.float32)
        shifts = np.zeros((kv_heads, padded // columns), dtype=np.float32)
        keys = view.keys.view(torch.uint16).numpy() if view.keys.dtype == torch.bfloat16 else view.keys.numpy()
        lanes = (0,) * (head_dim // 16)
        some = (0,) * (4 if len(lanes) <= 4 else 2)
        arguments = (
            self._threads,
            queries.numpy(),
            rows,
            keys,
            lengths,
            positions,
            view.query_positions.numpy().astype(np.int64),
            view.sliding_window or 0,
            view.window_start,
            np.float32(gamma),
            self._attention,
            moments,
            scores,
            shifts,
            lanes,
            some,
            (0,),
        )
        kind = f"window-{keys.dtype.name}-{len(lanes)}"
        if kind not in self._compiled:
            self._compile(kind, arguments, on_wait)
        self._team.run(self._module.window_pass, *arguments)
        total, mass, dot = (moments[:, :, place].astype(np.float64) for place in (1, 2, 3))
        # lse * sum a - sum a z, with z relative to the row's largest logit: both terms have one sign, nothing cancels
        dispersion = float((np.log(total) * mass / total - dot / total).sum())
        return torch.from_numpy(scores[:, :n]), dispersion, float(shifts.sum(dtype=np.float64))

    def _compile(self, kind: str, arguments: tuple[object, ...], on_wait: OnWait | None) -> None:
        """Compile the pass, or load it from the cache, before threads enter it; see `CompiledStep`."""
        import numba

        started = time.perf_counter()
        if kind not in self._compiling:
            if not kernels_cached(kind):
                log.info("compiling the pass over the window's attention (about 5 s)")
            counter = np.zeros(2, dtype=np.int64)
            signature = tuple(numba.typeof(argument) for argument in (0, counter, *arguments))
            function = self._module.window_pass
            self._compiling[kind] = Background(lambda: function.compile(signature), name="cake-infer-compiler")
        try:
            self._compiling[kind].wait(on_wait)
        finally:
            if self._compiling[kind].done:
                del self._compiling[kind]
        mark_cached(kind)
        self._compiled.add(kind)
        log.debug("%s ready in %.2f s", kind, time.perf_counter() - started)
