"""ChunkKV (Liu et al., NeurIPS 2025, arXiv 2502.00299): whole chunks of the text, the same for every head.

A chunk is `chunk` neighbouring positions; its score is the mean over its tokens before the window of a base indicator,
summed over heads, and all its tokens get it. Defaults: chunk 10 (the paper; kvpress has 20), base snapkv. A budget that
ends inside a chunk keeps its first tokens, where the authors' code keeps fewer. The paper also reuses one layer's
choice for the next one: that saves time and is not done here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from ..attention import before_window
from ..joined import SharedPositions

if TYPE_CHECKING:
    from torch import Tensor

    from ..policies.base import Indicator
    from ..view import LayerView


@dataclass(frozen=True)
class ChunkIndicator:
    """A wrapper round any indicator."""

    base: Indicator
    chunk: int = 10

    own_needs: ClassVar[frozenset[str]] = frozenset()

    @property
    def needs(self) -> frozenset[str]:
        return self.own_needs | self.base.needs

    def score(self, view: LayerView) -> Tensor:
        """fp32 `[kv_heads, n]`, alike in every head that holds the token."""
        base = self.base.score(view)
        shared = SharedPositions.of(view)
        votes, count = [], []
        for head, length in enumerate(view.columns):
            before = before_window(view, head)
            votes.append(base[head, :length].masked_fill(~before, 0.0))
            count.append(before.float())
        index = shared.positions // self.chunk
        index -= index[0].clone()
        size = int(index[-1]) + 1
        device = shared.positions.device
        mass = torch.zeros(size, device=device).index_add_(0, index, shared.total(votes))
        tokens = torch.zeros(size, device=device).index_add_(0, index, (shared.total(count) > 0).float())
        return shared.spread(view, (mass / tokens.clamp_min_(1))[index])

    def carry(self, view: LayerView, indicator: Tensor) -> Tensor:
        """What the base indicator wants to remember."""
        base, carry = self.base.score(view), getattr(self.base, "carry", None)
        return base if carry is None else carry(view, base)

    def describe(self) -> str:
        return f"chunk {self.chunk}"
