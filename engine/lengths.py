"""Lengths of projected values by the compiled pass: what `cache.projection` asks for on a CPU."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from ..cache.view import LayerView
from .compiling import Compiling
from .kernels import load_lengths
from .team import Team

LANES = 32  # a head's numbers must fill so many, as in kernels/lengths.py, which imports numba


class LengthsWorker:
    """Works `cache.projection.projected_lengths` in compiled code, by a team that is called from one thread."""

    def __init__(self, team: Team, compiling: Compiling) -> None:
        self._team, self._compiling = team, compiling
        self._module: ModuleType | None = None

    def __call__(self, view: LayerView) -> Tensor | None:
        """fp32 `[kv_heads, n]`, 0 for columns that a head has not; None for heads that it has no form for."""
        kv_heads, n, head_dim = view.keys.shape
        if head_dim % LANES or n == 0:
            return None
        module = self._module = self._module or load_lengths()
        assert view.values is not None
        assert view.output_projection is not None
        matrix = view.output_projection.contiguous()
        if matrix.dtype == torch.bfloat16:
            weights = matrix.view(torch.int16).numpy().view(np.uint16)
        else:
            weights = matrix.float().numpy()
        width = view.group * head_dim
        padded = -(-n // module.TOKENS) * module.TOKENS
        lengths = torch.zeros(kv_heads, padded)
        wide = torch.empty(len(weights), width).numpy()
        forms = np.empty((view.group, head_dim, head_dim), dtype=np.float32)
        for head, length in enumerate(view.columns):
            values, out = view.values[head, :length].float().contiguous(), lengths[head].numpy()
            arguments = (self._team.size, values.numpy(), weights, head * width, wide, forms, out)
            kind = f"lengths {weights.dtype}"
            what = "the pass over the values' lengths"
            self._compiling.ensure(kind, module.lengths_pass, arguments, what=what, seconds=2)
            self._team.run(module.lengths_pass, *arguments)
            out[length:] = 0
        return lengths[:, :n]
