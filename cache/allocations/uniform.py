"""Uniform: every layer gets the same share, whatever it looks like."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from torch import Tensor

    from ..view import LayerView


@dataclass(frozen=True)
class UniformAllocation:
    """Equal preferences; a layer that has fewer rows than its share leaves the rest to the others."""

    needs: ClassVar[frozenset[str]] = frozenset()

    def preference(self, view: LayerView, indicator: Tensor) -> float:
        """1, always."""
        return 1.0
