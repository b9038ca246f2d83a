"""The worst case over the window's queries by the compiled pass: what `cache.worst` asks for on a CPU."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import torch

from ..cache.view import LayerView, is_in_order
from ..cache.worst import WorstCase
from .compiling import Compiling
from .kernels import load_worst
from .team import Team

KIND = "worst"
REACH = 2  # columns to either side, at most, with which one is pooled: as in kernels/worst.py, which imports numba
_NOWHERE = np.iinfo(np.int32).max


class WorstWorker:
    """Works `cache.worst.worst_case` in compiled code, by the threads of a team that is called from one thread."""

    def __init__(self, team: Team, compiling: Compiling) -> None:
        self._team, self._compiling = team, compiling
        self._module: ModuleType | None = None

    def __call__(self, view: LayerView, reach: int) -> WorstCase | None:
        """See `cache.worst.by_torch`, with dispersion and shift; None for a reach that it has no form for."""
        if reach > REACH:
            return None
        module = self._module = self._module or load_worst()
        kv_heads, n, head_dim = view.keys.shape
        queries = view.queries.float().mul(view.scale).reshape(kv_heads, -1, head_dim)
        height, columns = queries.shape[1], module.COLUMNS
        padded = -(-n // columns) * columns
        attention = torch.empty(height, padded + 2 * module.MARGIN)
        logits = attention[:, module.MARGIN :]
        at = view.query_positions.numpy().astype(np.int64)
        worst, means = (torch.zeros(kv_heads, padded) for _ in range(2))
        sums = np.zeros((kv_heads, height, 5), dtype=np.float32)
        shifts = np.zeros((kv_heads, padded // columns), dtype=np.float32)
        in_order = is_in_order(view)
        rows = Columns.of(view.positions[0].numpy(), padded, reach) if in_order else None
        for head, length in enumerate(view.columns):
            own = rows or Columns.of(view.positions[head, :length].numpy(), padded, reach)
            torch.mm(queries[head], own.ordered(view.keys[head, :length]).float().t(), out=logits[:, :length])
            arguments = (
                self._team.size,
                length,
                own.positions,
                own.near,
                own.links,
                at,
                view.sliding_window or 0,
                view.window_start,
                attention.numpy(),
                sums[head],
                worst[head].numpy(),
                means[head].numpy(),
                shifts[head],
            )
            what = "the pass over the window's attention"
            self._compiling.ensure(KIND, module.worst_pass, arguments, what=what, seconds=3)
            self._team.run(module.worst_pass, *arguments)
            own.restore(worst[head].numpy())
            own.restore(means[head].numpy())
        total, mass, dot = (sums[:, :, place].astype(np.float64) for place in (1, 2, 3))
        # lse * sum a - sum a z, as in window.py
        dispersion = float((np.log(total) * mass / total - dot / total).sum())
        moments = dispersion, float(shifts.sum(dtype=np.float64))
        return WorstCase(worst[:, :n], means[:, :n], moments)


class Columns:
    """The columns of a head in order of position, and which of them are near each other."""

    def __init__(self, order: np.ndarray | None, positions: np.ndarray, near: np.ndarray, links: np.ndarray) -> None:
        """order: of the columns that there are, None where they lie in order. The rest `[padded]`, as `worst_pass` has
        them."""
        self.order, self.positions, self.near, self.links = order, positions, near, links

    @classmethod
    def of(cls, positions: np.ndarray, padded: int, reach: int) -> Columns:
        """positions: int32 `[length]`, unique."""
        length, order = len(positions), None
        if (positions[1:] < positions[:-1]).any():
            order = np.argsort(positions)
        laid = np.full(padded, _NOWHERE, dtype=np.int32)
        laid[:length] = positions if order is None else positions[order]
        near = np.zeros(padded, dtype=np.uint8)
        links = np.zeros(padded, dtype=np.float32)
        links[:length] = 1
        for offset in range(1, reach + 1):
            close = laid[offset:length] - laid[: max(0, length - offset)] <= reach
            links[offset:length] += close
            links[: len(close)] += close
            near[offset:length] |= close.view(np.uint8) << (2 - offset)
            near[: len(close)] |= close.view(np.uint8) << (1 + offset)
        return cls(order, laid, near, links)

    def ordered(self, keys: torch.Tensor) -> torch.Tensor:
        """`[length, head_dim]` in order of position."""
        return keys if self.order is None else keys.index_select(0, torch.from_numpy(self.order))

    def restore(self, scores: np.ndarray) -> None:
        """`[padded]`, in order of position, to the order of the columns, in place."""
        if self.order is not None:
            scores[self.order] = scores[: len(self.order)].copy()
