"""XKV's allocation (Li et al., arXiv 2412.05896), in its spirit: the retained attention of all layers is made largest.

A layer that keeps `b` tokens a head retains `R(b)`: the window's attention that its best `b` tokens before the window
get, mean over rows and heads. The sum of all `R` under the budget is largest where every next seat goes to the layer
that gains most by it, since `R` is concave; so a layer's seats have its sorted attention as priorities. The paper's
measure and solver are not public beyond the abstract, and it samples a first pass of a smaller model; here the layer
itself is measured when it has been read, and later layers only add candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from ..attention import before_window, window_attention

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from ..view import LayerView


@dataclass(frozen=True)
class XKVAllocation:
    """Seats by the attention that each more retains."""

    needs: ClassVar[frozenset[str]] = frozenset({"window_queries"})
    scored: ClassVar[bool] = True

    def curve(self, view: LayerView, indicator: Tensor, limit: int) -> np.ndarray:
        """fp32, falling, at most `limit`: what each further token a head retains, mean over the heads."""
        retained = torch.zeros(min(limit, view.keys.shape[1]), dtype=torch.float64)
        for head, attention in window_attention(view):
            mass = attention.mean((0, 1))[before_window(view, head)]
            best = mass.topk(min(len(retained), len(mass))).values
            retained[: len(best)] += best.double().cpu()
        return retained.div_(view.keys.shape[0]).float().numpy()
