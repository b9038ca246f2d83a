"""PyramidKV's allocation (Cai et al., arXiv 2406.02069): budgets fall linearly from the first layer to the last.

With `base = C - w`: the last layer gets `base / beta`, the first `2 base - base / beta`, those between lie on the line.
Where the first would be more than the text has beyond the window it gets all of that, and the last what keeps the sum.
Default: beta 20. The authors' code rounds the step down, which spends up to 1.3% more than the budget, and deals
uniformly where the text is shorter than `2 base`; here seats are dealt exactly, in proportion to the line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from torch import Tensor

    from ..policies.base import PolicyModel
    from ..view import LayerView


@dataclass(frozen=True)
class PyramidAllocation:
    """A fixed line over the depth of the model; nothing is looked at."""

    beta: float = 20.0
    num_layers: int = 1
    budget: int = 0

    needs: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def create(cls, model: PolicyModel, budget: int, *, beta: float) -> PyramidAllocation:
        """The line depends on the depth and the budget."""
        return cls(beta, model.num_layers, budget)

    def preference(self, view: LayerView, indicator: Tensor) -> float:
        """The layer's point on the line, in tokens."""
        base, beyond = max(self.budget - view.window, 0), max(view.total - view.window, 0)
        first = min(2 * base - base / self.beta, beyond)
        step = 2 * (first - base) / max(self.num_layers - 1, 1)
        return max(first - view.layer * step, 0.0) if self.num_layers > 1 else float(base)
