"""D2O's allocation (Wan et al., ICLR 2025, arXiv 2406.13035): layers whose attention is spread evenly get more.

`P = exp(-v)`: the variance over the tokens of the attention that each got from all queries, scaled to 0..1 between the
query heads of the layer, then their mean. The paper's softmax over layers is this share. Differences from the authors'
code: there the shares are worked out at the first decode step, clipped to 1..100% of the text so that they do not add
up to the budget, and the first two layers and the last are never compressed; here they take part like the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from torch import Tensor

    from ..view import LayerView

_EPS = 1e-6  # where all heads have one variance, as in the authors' code


@dataclass(frozen=True)
class D2OAllocation:
    """Needs the attention of all queries; what a continued text held before is judged by the new queries alone."""

    needs: ClassVar[frozenset[str]] = frozenset({"column_sums"})

    def preference(self, view: LayerView, indicator: Tensor) -> float:
        """From 1/e (every head as uneven as the most uneven) to 1."""
        assert view.column_sums is not None, "the allocation asked for them"
        variances = []
        for head, sums in enumerate(view.column_sums.double()):
            length = view.columns[head // view.group]
            variances.append(float(sums[:length].var()) if length > 1 else 0.0)
        low, high = min(variances), max(variances)
        return math.exp(-sum((one - low) / (high - low + _EPS) for one in variances) / len(variances))
