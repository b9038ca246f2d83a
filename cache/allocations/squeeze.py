"""SqueezeAttention's allocation (Wang et al., ICLR 2025, arXiv 2404.04793): layers that change little get little.

A layer's figure is the mean cosine of its tokens' hidden states before and after attention. The figures of all layers
are put into three clusters; the layers of the highest one, whose attention changes least, get `idle` of an equal
budget, and the others what that leaves, in equal parts. Default: idle 0.35, in the paper's range of 0.3 to 0.4.

Late: no layer is evicted from before the last one has been read, so a prefill holds the whole cache, `L` layers of `S`
tokens. The authors cluster by k-means from random starts; here the best of all ways to cut the sorted figures in three
is taken, which is what k-means looks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from torch import Tensor

    from ..view import LayerView


@dataclass(frozen=True)
class SqueezeAllocation:
    """Two shares: one for the layers that hardly change the hidden states, one for all others."""

    idle: float = 0.35

    needs: ClassVar[frozenset[str]] = frozenset({"hidden_similarity"})

    def preference(self, view: LayerView, indicator: Tensor) -> float:
        """The mean cosine, moved from -1..1 to 0..2; `settle` makes shares of all of them."""
        assert view.hidden_similarity is not None, "the allocation asked for it"
        return 1.0 + view.hidden_similarity

    def settle(self, figures: Sequence[float]) -> list[float]:
        """Shares of an equal budget, from the figures of all layers; they add up to the number of layers."""
        highest = highest_of_three(figures)
        count = sum(highest)
        if count in (0, len(figures)):
            return [1.0] * len(figures)
        others = (len(figures) - count * self.idle) / (len(figures) - count)
        return [self.idle if is_idle else others for is_idle in highest]


def highest_of_three(figures: Sequence[float]) -> list[bool]:
    """Which figures are in the highest of the three clusters with the least sum of squared distances to their means.

    None if there are fewer than three different figures.
    """
    ordered = sorted(figures)
    count = len(ordered)
    if len(set(ordered)) < 3:
        return [False] * count
    sums, squares = [0.0], [0.0]
    for figure in ordered:
        sums.append(sums[-1] + figure - ordered[0])
        squares.append(squares[-1] + (figure - ordered[0]) ** 2)

    def spread(start: int, end: int) -> float:
        return squares[end] - squares[start] - (sums[end] - sums[start]) ** 2 / (end - start)

    cuts = [cut for cut in range(1, count) if ordered[cut] > ordered[cut - 1]]  # equal figures stay together
    best = min(combinations(cuts, 2), key=lambda pair: sum(spread(*part) for part in pairwise((0, *pair, count))))
    return [figure >= ordered[best[1]] for figure in figures]
