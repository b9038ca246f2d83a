"""A policy made of an indicator, an allocation over layers and a rule over heads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ...errors import CakeError
from ..cascade import Cascade
from ..merges.base import Merge
from ..merges.none import NoMerge
from ..shares import DEFAULT_HEAD_FLOOR
from ..transfer import to_device
from .base import Allocation, Indicator, LayerScore

if TYPE_CHECKING:
    from torch import Tensor

    from ..view import LayerView


@dataclass(frozen=True)
class ComposedPolicy:
    """`title` is how the statistics call the combination: its constants are added. waits: a late schedule."""

    name: str
    title: str
    indicator: Indicator
    allocation: Allocation
    heads: Any
    merge: Merge
    waits: bool = False

    evicts: ClassVar[bool] = True

    @property
    def needs(self) -> frozenset[str]:
        return self.indicator.needs | self.allocation.needs | frozenset(self.heads.needs)

    @property
    def merger(self) -> Merge | None:
        return None if isinstance(self.merge, NoMerge) else self.merge

    @property
    def late(self) -> bool:
        return self.waits or hasattr(self.allocation, "settle")

    def cascade(self, num_layers: int, kv_heads: int, budget: int, window: int) -> Cascade:
        """The dealing that allocation and heads speak of."""
        return Cascade(
            num_layers,
            kv_heads,
            budget,
            window,
            scored=getattr(self.allocation, "scored", False),
            heads=self.heads.mode,
            head_floor=getattr(self.heads, "floor", DEFAULT_HEAD_FLOOR),
            settle=getattr(self.allocation, "settle", None),
            late=self.late,
        )

    def score(self, view: LayerView) -> LayerScore:
        """Raises `CakeError` if the layer's scores are not numbers."""
        indicator = self.indicator.score(view)
        carry, worth = getattr(self.indicator, "carry", None), getattr(self.indicator, "worth", None)
        carried = None if carry is None else carry(view, indicator)
        compared = None if worth is None else worth(view, indicator)
        curve = getattr(self.allocation, "curve", None)
        scores = indicator if compared is None else compared
        preference = 1.0 if curve is not None else self.allocation.preference(view, scores)
        if has_nan(indicator, view):
            raise CakeError(
                f"the scores of layer {view.layer} are not numbers: the weights are damaged or overflow their dtype; "
                "try float32 for the option dtype"
            )
        by_seat = None if curve is None else partial(curve, view, scores)
        return LayerScore(indicator, preference, carried, compared, by_seat)

    def describe(self) -> str:
        chosen = (self.allocation, self.indicator, self.heads, self.merge)
        parts = [part.describe() for part in chosen if hasattr(part, "describe")]
        return " ".join([self.title, *(part for part in parts if part)])


def has_nan(indicator: Tensor, view: LayerView) -> bool:
    """Whether a valid column's score is not a number."""
    if view.memo.get("numbers") is indicator:
        return False
    found = torch.isnan(indicator)
    if view.lengths is not None:  # one answer for all heads: a GPU is waited for once
        ends = to_device(view.lengths, found.device, torch.int64)[:, None]
        found &= torch.arange(found.shape[1], device=found.device) < ends
    return bool(found.any())
