"""What the KV heads of a layer say together: joined by the tokens' positions, since heads may hold different ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .view import LayerView


@dataclass(frozen=True)
class SharedPositions:
    """The distinct positions that any head holds, ascending int64 `[m]`, and each head's columns as indices of them."""

    positions: Tensor
    inverse: tuple[Tensor, ...]

    @classmethod
    def of(cls, view: LayerView) -> SharedPositions:
        held = [view.positions[head, :length].long() for head, length in enumerate(view.columns)]
        positions, inverse = torch.unique(torch.cat(held), return_inverse=True)
        return cls(positions, tuple(inverse.split(list(view.columns))))

    def total(self, scores: list[Tensor]) -> Tensor:
        """Sum over the heads of fp32 `[length]` each, `[m]`; a head that lacks a token adds nothing."""
        joined = torch.zeros(len(self.positions), device=self.positions.device)
        return joined.index_add_(0, torch.cat(self.inverse), torch.cat(scores))

    def mean(self, scores: list[Tensor]) -> Tensor:
        """Mean over the heads that hold a token, fp32 `[m]`."""
        return self.total(scores) / self.total([torch.ones_like(score) for score in scores])

    def spread(self, view: LayerView, shared: Tensor) -> Tensor:
        """fp32 `[kv_heads, n]` with every head's columns read from `[m]`; -inf for columns that no head has."""
        scores = torch.full(view.keys.shape[:2], float("-inf"), device=view.keys.device)
        for head, index in enumerate(self.inverse):
            scores[head, : len(index)] = shared[index]
        return scores
