"""CriticalKV (Feng et al., 2025, arXiv 2502.03805): scores weighed by the size of the projected value.

Of n tokens that a row keeps, the first `share * n` are the best by a base indicator, the rest the best of the others by
`(s + 1e-4) * ||W_o v||_1`, mean over the query heads of a KV head. Defaults: share 0.5, base snapkv. The sets for n and
n + 1 are nested, so they are one order of tokens, which is what is computed: right for any share of the budget that a
layer or head gets, also in a cascade. Heads share by the base scores, as in the authors' CriticalAdaKV.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from ..attention import before_window, empty_scores
from ..projection import projected_norms

if TYPE_CHECKING:
    from torch import Tensor

    from ..policies.base import Indicator
    from ..view import LayerView

EPSILON = 1e-4
_OWN = frozenset({"values", "output_projection"})


@dataclass(frozen=True)
class CriticalIndicator:
    """A wrapper round any indicator whose scores are not negative."""

    base: Indicator
    share: float = 0.5

    own_needs: ClassVar[frozenset[str]] = _OWN

    @property
    def needs(self) -> frozenset[str]:
        return self.own_needs | self.base.needs

    def score(self, view: LayerView) -> Tensor:
        """fp32 `[kv_heads, n]`: minus a token's place in the order."""
        base = self._base(view)
        scores = empty_scores(view)
        for head, length in enumerate(view.columns):
            before = before_window(view, head).nonzero()[:, 0]
            worth = base[head, :length][before]
            critical = (worth + EPSILON) * projected_norms(view, head)[before]
            place = two_stage_places(ranks(worth), ranks(critical), self.share)
            scores[head, :length] = 0.0
            scores[head, before] = -torch.tensor(place, dtype=torch.float32, device=scores.device)
        return scores

    def worth(self, view: LayerView, indicator: Tensor) -> Tensor:
        """What the base is compared by, its scores as a rule: places in an order say nothing between heads."""
        worth = getattr(self.base, "worth", None)
        base = self._base(view)
        return base if worth is None else worth(view, base)

    def carry(self, view: LayerView, indicator: Tensor) -> Tensor:
        """What the base indicator wants to remember."""
        carry = getattr(self.base, "carry", None)
        base = self._base(view)
        return base if carry is None else carry(view, base)

    def _base(self, view: LayerView) -> Tensor:
        known: Tensor | None = view.memo.get("critical base")
        if known is None:
            known = view.memo["critical base"] = self.base.score(view)
        return known

    def describe(self) -> str:
        return f"share {self.share:g}"


def ranks(scores: Tensor) -> list[int]:
    """Each entry's place, 0 for the largest; of equals the first."""
    order = scores.argsort(descending=True, stable=True)
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device)).tolist()


def two_stage_places(first: list[int], second: list[int], share: float) -> list[int]:
    """The order whose first n entries are, for every n, `int(share * n)` best by `first` and else the best by `second`.

    first, second: each entry's rank. Returns each entry's place. Linear in the number of entries.
    """
    count = len(first)
    by_first, by_second = [0] * count, [0] * count
    for entry in range(count):
        by_first[first[entry]] = by_second[second[entry]] = entry
    place = [-1] * count
    taken = ahead = 0  # how far the two lists have been gone through
    placed = 0
    while placed < count:
        if taken < int(share * (placed + 1)):
            entry, taken = by_first[taken], taken + 1
            if place[entry] >= 0:  # it was in already by `second`: that stage has room for one more
                continue
        else:
            while place[by_second[ahead]] >= 0:
                ahead += 1
            entry = by_second[ahead]
        place[entry], placed = placed, placed + 1
    return place
