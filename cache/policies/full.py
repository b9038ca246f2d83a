"""The policy that keeps everything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..cascade import Cascade
from ..view import LayerView
from .base import LayerScore


@dataclass(frozen=True)
class FullPolicy:
    """Nothing is evicted: the full cache, for comparison and for short prompts."""

    name: ClassVar[str] = "full"
    evicts: ClassVar[bool] = False
    needs: ClassVar[frozenset[str]] = frozenset()
    late: ClassVar[bool] = False
    merger: ClassVar[None] = None

    def cascade(self, num_layers: int, kv_heads: int, budget: int, window: int) -> Cascade:
        """Layers alike, if it were asked."""
        return Cascade(num_layers, kv_heads, budget, window)

    def score(self, view: LayerView) -> LayerScore:
        """Every row counts the same, so an order is that of positions."""
        return LayerScore(torch.zeros(view.keys.shape[:2], device=view.keys.device), preference=1.0)

    def describe(self) -> str:
        return "full"
