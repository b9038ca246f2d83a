"""The compiled passes that scores ask for on a CPU: here the window's statistics of `cache.scores`."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from ..cache.view import LayerView
from ..cache.worst import WorstCase
from .compiling import Compiling
from .kernels import load_window
from .lengths import LengthsWorker
from .team import Team, team_size
from .worst import WorstWorker

FEWEST_COLUMNS = 1024  # below it torch is quick enough, and nothing need be compiled
KIND = "window"
_NOWHERE = np.iinfo(np.int32).max


class WindowWorker:
    """Works `cache.scores.window_moments` in compiled code, with the threads of a team of its own."""

    def __init__(self, threads: int) -> None:
        # one of two threads would wait for a core: the other thread of torch spins on for a while after each product
        self._threads = threads if threads > 2 else 1
        self._team = Team(self._threads)
        self._module: ModuleType | None = None  # loaded for the first layer that is long enough
        self._compiling = Compiling()
        self._worst = WorstWorker(self._team, self._compiling)
        self._lengths = LengthsWorker(self._team, self._compiling)

    def fits(self, view: LayerView) -> bool:
        """Whether the layer is on a CPU and long enough."""
        return view.keys.device.type == "cpu" and max(view.columns) >= FEWEST_COLUMNS

    def __call__(self, view: LayerView, gamma: float) -> tuple[Tensor, float, float]:
        """Scores before pooling fp32 `[kv_heads, n]` (0 in the window), dispersion and shift."""
        module = self._module = self._module or load_window()
        kv_heads, n, head_dim = view.keys.shape
        queries = view.queries.float().mul(view.scale).reshape(kv_heads, -1, head_dim)
        height, columns = queries.shape[1], module.COLUMNS
        padded = -(-n // columns) * columns
        attention = torch.empty(height, padded)
        positions = np.empty(padded, dtype=np.int32)
        at = view.query_positions.numpy().astype(np.int64)
        scores = np.zeros((kv_heads, padded), dtype=np.float32)
        moments = np.zeros((kv_heads, height, 4), dtype=np.float32)
        shifts = np.zeros((kv_heads, padded // columns), dtype=np.float32)
        for head, length in enumerate(view.columns):
            torch.mm(queries[head], view.keys[head, :length].float().t(), out=attention[:, :length])
            positions[:length], positions[length:] = view.positions[head, :length].numpy(), _NOWHERE
            arguments = (
                self._threads,
                length,
                positions,
                at,
                view.sliding_window or 0,
                view.window_start,
                np.float32(gamma),
                attention.numpy(),
                moments[head],
                scores[head],
                shifts[head],
            )
            what = "the pass over the window's attention"
            self._compiling.ensure(KIND, module.window_pass, arguments, what=what, seconds=3)
            self._team.run(module.window_pass, *arguments)
        total, mass, dot = (moments[:, :, place].astype(np.float64) for place in (1, 2, 3))
        # lse * sum a - sum a z, with z relative to the row's largest logit: both terms have one sign, nothing cancels
        dispersion = float((np.log(total) * mass / total - dot / total).sum())
        return torch.from_numpy(scores[:, :n]), dispersion, float(shifts.sum(dtype=np.float64))

    def worst(self, view: LayerView, reach: int) -> WorstCase | None:
        """See `cache.worst.by_torch`, with dispersion and shift besides."""
        return self._worst(view, reach)

    def lengths(self, view: LayerView) -> Tensor | None:
        """See `cache.projection.projected_lengths`, of all heads."""
        return self._lengths(view)


def make_window_pass(threads: int) -> WindowWorker | None:
    """A worker; None where numba is missing, of which the decode step warns."""
    return WindowWorker(team_size(threads)) if importlib.util.find_spec("numba") else None
