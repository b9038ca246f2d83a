"""RoCo (Ren and Zhu, 2024, arXiv 2402.06262): mean attention, but what attention to it varies is not given up.

Per KV head, with the mean over its query heads taken first: over all queries that see a token, mean and standard
deviation of their attention. The sinks come first, then the `volatile * budget` tokens of largest deviation, then the
rest by mean. Defaults: 4 sinks, volatile 0.1. The authors feed the prompt in strides and evict a stride at a time,
always the least mean among the `budget - recent - sinks` tokens of least deviation, which spares as many volatile ones
as their recent share of 0.1; here the prompt is read whole and cut once. A later turn counts its own queries only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from ..attention import before_window, empty_scores
from ..policies.base import PolicyModel

if TYPE_CHECKING:
    from torch import Tensor

    from ..view import LayerView


@dataclass(frozen=True)
class RoCoIndicator:
    """`budget` is in tokens; what is spared because it varies is a share of it."""

    budget: int
    volatile: float = 0.1
    sinks: int = 4

    needs: ClassVar[frozenset[str]] = frozenset({"column_sums", "column_squares"})

    @classmethod
    def create(cls, model: PolicyModel, budget: int, *, volatile: float, sinks: int) -> RoCoIndicator:
        return cls(budget, volatile, sinks)

    def score(self, view: LayerView) -> Tensor:
        """fp32 `[kv_heads, n]`: the mean, from 0 to 1, plus 1 for volatile tokens, which go by deviation; infinite for
        the sinks."""
        assert view.column_sums is not None
        assert view.column_squares is not None
        kv_heads, n = view.keys.shape[:2]
        sums = view.column_sums.view(kv_heads, view.group, n).mean(1)
        scores = empty_scores(view)
        for head, length in enumerate(view.columns):
            positions = view.positions[head, :length]
            count = seen_by(view, positions).clamp_min(1)
            mean = sums[head, :length] / count
            deviation = (view.column_squares[head, :length] / count - mean.square()).clamp_min_(0).sqrt_()
            before = before_window(view, head) & (positions >= self.sinks)
            spared = min(int(self.volatile * self.budget), int(before.sum()))
            top = deviation.masked_fill(~before, -1).topk(spared).indices
            mean[top] = 1 + deviation[top]
            scores[head, :length] = mean.masked_fill_(positions < self.sinks, float("inf"))
        return scores

    def describe(self) -> str:
        return f"volatile {self.volatile:g} sinks {self.sinks}"


def seen_by(view: LayerView, positions: Tensor) -> Tensor:
    """How many of the new tokens' queries see each position."""
    last = torch.full_like(positions, view.total)
    if view.sliding_window is not None:
        last = last.minimum(positions + view.sliding_window)
    return (last - positions.clamp_min(view.first)).clamp_min(0)
