"""What a hold rule is: which slots a full row gives up for the tokens of a reply."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class HeldRow:
    """One row in a decode step, the newcomer in its last column.

    weights: fp32 `[group, columns]`, the newest query's attention. positions: int32 `[columns]`. scores: fp32
    `[columns]`, what the rule keeps with each slot, to be written in place.
    """

    weights: Tensor
    positions: Tensor
    scores: Tensor


class HoldRule:
    """Stateless: what a rule remembers lies with the slots, and moves with them. `needs` as of an indicator."""

    needs: ClassVar[frozenset[str]] = frozenset()
    keeps_scores: ClassVar[bool] = False  # whether the slots' scores are the rule's own

    @property
    def every(self) -> int:
        """By how many tokens a row may grow beyond its limit, the newcomer included."""
        return 1


class OneByOne(HoldRule, ABC):
    """A rule that looks at every slot in each step: it gives up one for each newcomer, or `interval` of them at once.

    At intervals what is given up is what the rule finds least worth at the step of the cut.
    """

    interval: int

    @property
    def every(self) -> int:
        return self.interval

    @abstractmethod
    def worth(self, rows: list[HeldRow], position: int) -> list[Tensor]:
        """Of each row of a layer fp32 `[columns]`, higher stays, at the newest query's `position`. Called once a step
        if the rule keeps scores, which it brings up to date, and else where a row is full."""

    def losers(self, rows: list[HeldRow], position: int, window: int) -> list[int]:
        """Of each row of a layer the column to give up: the least worth outside the window."""
        worth = self.worth(rows, position)
        return [lowest(one, row.positions, position, window) for one, row in zip(worth, rows, strict=True)]


class AtIntervals(HoldRule, ABC):
    """A rule that lets rows grow by `every` tokens and then cuts them back."""

    @abstractmethod
    def cut(
        self, keys: Tensor, positions: Tensor, scores: Tensor, queries: Tensor, scale: float, limit: int, window: int
    ) -> tuple[Tensor, Tensor]:
        """Which columns of one row stay.

        keys `[n, head_dim]`, positions int32 `[n]`, scores fp32 `[n]`; queries `[group, r, head_dim]`, the last ones,
        oldest first. Returns int64 `[limit]` columns and the scores to keep with them.
        """


def lowest(scores: Tensor, positions: Tensor, position: int, window: int) -> int:
    """The column of the lowest score outside the last `window` tokens; of equals the oldest."""
    scores = scores.masked_fill(positions > position - window, float("inf"))
    equal = scores == scores.amin()
    return int(torch.where(equal, positions, torch.iinfo(positions.dtype).max).argmin())


def best(scores: Tensor, positions: Tensor, limit: int, window: int) -> Tensor:
    """Columns of the last `window` tokens and the best others, `limit` in all, in the order of the text."""
    ranked = scores.masked_fill(positions > positions.max() - window, float("inf"))
    order = torch.argsort(positions)  # of equals the later stay
    chosen = order.flip(0)[ranked[order.flip(0)].argsort(descending=True, stable=True)[:limit]]
    return chosen[positions[chosen].argsort()]


def redundancy(keys: Tensor, positions: Tensor, alike: float) -> Tensor:
    """fp32 `[n]`: softmax of each key's mean cosine to the others (Cai et al., 2025, arXiv 2505.24133).

    Of the keys that are more alike to a key than `alike` the latest is not counted: it stands for the others.
    """
    order = positions.argsort()
    unit = torch.nn.functional.normalize(keys.float(), dim=-1)[order]
    cosine = unit @ unit.t()
    cosine.fill_diagonal_(0.0)
    n = len(order)
    latest = torch.where(cosine > alike, torch.arange(n, device=keys.device), -1).amax(1)
    rows = (latest >= 0).nonzero()[:, 0]
    cosine[rows, latest[rows]] = 0.0
    return torch.empty(n, device=keys.device).scatter_(0, order, cosine.mean(0).softmax(0))
