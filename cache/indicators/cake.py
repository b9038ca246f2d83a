"""CAKE's indicator (Qin et al., ICLR 2025, arXiv 2503.12491): mean and variance of the window's attention.

`I[n] = mean_rows A[:, n] + gamma * var_rows A[:, n]` before the window, average over 5 neighbours, then the mean over
the query heads of a KV head. Defaults: gamma 200, pool 5. The authors' code pools in storage order and in half
precision; here neighbours are those in the text, in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..scores import layer_statistics
from ..tuned import nearest

if TYPE_CHECKING:
    from torch import Tensor

    from ..policies.base import PolicyModel
    from ..view import LayerView


DEFAULT_GAMMA = 200.0


@dataclass(frozen=True)
class CakeIndicator:
    """Attention that is large or changes from one query of the window to the next."""

    gamma: float = DEFAULT_GAMMA
    pool: int = 5

    needs: ClassVar[frozenset[str]] = frozenset({"window_queries"})

    @classmethod
    def create(cls, model: PolicyModel, budget: int, *, gamma: float | None, pool: int) -> CakeIndicator:
        """An explicit gamma wins over one that `tune` found, and that over 200."""
        found = nearest(model.tuned, budget)
        if gamma is None:
            gamma = found.gamma if found is not None and found.gamma is not None else DEFAULT_GAMMA
        return cls(gamma, pool)

    def score(self, view: LayerView) -> Tensor:
        """fp32 `[kv_heads, n]`; shares one pass over the window's attention with the allocation cake."""
        return layer_statistics(view, self.gamma, self.pool).indicator

    def describe(self) -> str:
        return f"gamma {self.gamma:g}"
