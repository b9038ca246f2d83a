"""VL-Cache's allocation (Tu et al., ICLR 2025, arXiv 2410.23317): dense layers get more than sparse ones.

`P = 1 - gamma`, gamma the share of the window's attention entries that a query can see and that are below `threshold`
times the largest of its row. Default: threshold 1%. The paper looks at the text after an image and clips a layer's
share to 1..100% of the prompt; here the window is what looks, and seats are dealt exactly. No authors' code was found.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..attention import window_attention

if TYPE_CHECKING:
    from torch import Tensor

    from ..view import LayerView


@dataclass(frozen=True)
class VLCacheAllocation:
    """How much of the window's attention is not next to nothing."""

    threshold: float = 0.01

    needs: ClassVar[frozenset[str]] = frozenset({"window_queries"})

    def preference(self, view: LayerView, indicator: Tensor) -> float:
        """The share of visible entries that are at least `threshold` of their row's largest, 0 to 1."""
        dense = seen = 0
        for head, attention in window_attention(view):
            visible = _visible(view, head)
            least = attention.amax(-1, keepdim=True) * self.threshold
            dense += int(((attention >= least) & visible).sum())
            seen += int(visible.sum()) * attention.shape[0]
        return dense / seen if seen else 0.0


def _visible(view: LayerView, head: int) -> Tensor:
    """bool `[r, length]`: what each query of the window sees, by position."""
    positions = view.positions[head, None, : view.columns[head]]
    at = view.query_positions.to(positions.device)[:, None]
    visible = positions <= at
    return visible if view.sliding_window is None else visible & (positions > at - view.sliding_window)
