"""In the spirit of SABlock (Chen et al., 2025, arXiv 2510.22556): blocks that do not cross a clause.

The paper's formulas are not public; these are ours. Segments end with a token of punctuation or a line break. A token's
score is the window's attention, average over 5 neighbours, times `1 + mix * (mean of its segment) / (largest such
mean)`. Of the block sizes 32, 16, 8, 4, 1 a head takes the largest for which the best blocks, as many tokens as the
budget has room for, hold at least `mass` (0.9) of the score that the best single tokens hold. Blocks are cut from the
start of a segment and never cross its end. One size serves the head's whole text, where the paper has one for each
segment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from ..attention import before_window, empty_scores, window_attention
from ..policies.base import PolicyModel
from ..scores import pool_neighbours

if TYPE_CHECKING:
    from torch import Tensor

    from ..view import LayerView

SIZES = (32, 16, 8, 4, 1)


@dataclass(frozen=True)
class SABlockIndicator:
    """`budget` is in tokens: how many of them the sizes are judged by."""

    budget: int
    mix: float = 1.0
    mass: float = 0.9
    pool: int = 5

    needs: ClassVar[frozenset[str]] = frozenset({"window_queries", "token_ids", "separators"})

    @classmethod
    def create(cls, model: PolicyModel, budget: int, *, mix: float, mass: float, pool: int) -> SABlockIndicator:
        return cls(budget, mix, mass, pool)

    def score(self, view: LayerView) -> Tensor:
        """fp32 `[kv_heads, n]`: every token has its block's mean score."""
        segment, start = segments(view)
        scores = empty_scores(view)
        for head, attention in window_attention(view):
            length = attention.shape[2]
            positions, before = view.positions[head, :length].long(), before_window(view, head)
            votes = attention.sum(1).mean(0).mul_(before)
            votes = pool_neighbours(votes, positions, self.pool).mul_(before)
            own = segment[positions]
            mean = group_mean(votes, own, before)
            worth = votes * (1 + self.mix * mean / mean.max().clamp_min(1e-30))
            scores[head, :length] = self._in_blocks(worth, own, positions - start[own], before, view.window)
        return scores

    def _in_blocks(self, worth: Tensor, own: Tensor, offset: Tensor, before: Tensor, window: int) -> Tensor:
        """Means over blocks of the largest size that will do. own, offset: a token's segment, and its place in it."""
        room = min(max(0, self.budget - window), int(before.sum()))
        wanted = self.mass * worth.topk(room).values.sum()
        for size in SIZES:
            block = torch.unique(own * (int(offset.max()) // size + 1) + offset // size, return_inverse=True)[1]
            blocks = group_mean(worth, block, before)
            # of equal blocks the earlier comes first, and one is not torn unless the budget ends in it
            best = (-blocks.masked_fill(~before, -1.0)).argsort(stable=True)[:room]
            if size == SIZES[-1] or worth[best].sum() >= wanted:
                return blocks
        raise AssertionError("the last size is single tokens")

    def describe(self) -> str:
        return f"mass {self.mass:g} mix {self.mix:g}"


def segments(view: LayerView) -> tuple[Tensor, Tensor]:
    """The segment of every position, int64 `[total]`, and the first position of every segment."""
    assert view.token_ids is not None
    ids = view.token_ids
    ends = torch.isin(ids, torch.tensor(sorted(view.separators or ()), dtype=ids.dtype, device=ids.device))
    begins = torch.cat([ends.new_ones(1), ends[:-1]])
    return begins.cumsum(0) - 1, begins.nonzero()[:, 0]


def group_mean(values: Tensor, group: Tensor, counted: Tensor) -> Tensor:
    """For each entry the mean of `values` over the counted entries of its group; 0 where there are none."""
    size = int(group.max()) + 1
    total = torch.zeros(size, device=values.device).index_add_(0, group, values * counted)
    count = torch.zeros(size, device=values.device).index_add_(0, group, counted.float())
    return (total / count.clamp_min_(1))[group]
