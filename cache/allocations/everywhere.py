"""Global choice (Layer-DefensiveKV, Feng et al., ICLR 2026, arXiv 2510.13334): the best tokens of all rows of all
layers.

No layer and no head has a share: a row keeps its window and whatever of it is among the best scores of everything read
so far. It asks for an indicator whose scores mean the same in every layer. A later layer only adds candidates, so
evicting as layers are read keeps what one choice at the end would keep; the authors' code evicts after the last layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from torch import Tensor

    from ..view import LayerView


@dataclass(frozen=True)
class GlobalAllocation:
    """Rows compete by their tokens' scores (`heads own`)."""

    needs: ClassVar[frozenset[str]] = frozenset()
    scored: ClassVar[bool] = True
    rows: ClassVar[bool] = True

    def preference(self, view: LayerView, indicator: Tensor) -> float:
        """Never looked at."""
        return 1.0
