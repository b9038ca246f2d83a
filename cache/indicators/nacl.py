"""NACL (Chen et al., ACL 2024, arXiv 2408.03675): what the proxy tokens attend to, and a random part of the rest.

`s[n] = sum over the proxy's rows of A`, mean over the query heads of a KV head. The first `ends * budget` tokens come
first, then the best `top * budget` by s, then the rest in the order of sampling without replacement with chances
`softmax(s / temperature)` (Gumbel's way). Defaults: ends 0.05, top 0.6, temperature 1: the shares 0.01 : 0.12 : 0.07 of
the paper as parts of what is kept. The proxy is the window, where theirs is the last 1% of the prompt. Not taken over
from their code: 256 sinks with a recent stretch that is negative below 25,600 tokens, and proxy scores that are looked
up by the wrong head where heads are grouped. Which tokens are drawn depends on seed, layer, head and position alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from ..attention import before_window, empty_scores, window_attention
from ..noise import uniform_noise
from ..policies.base import PolicyModel

if TYPE_CHECKING:
    from torch import Tensor

    from ..view import LayerView


@dataclass(frozen=True)
class NaclIndicator:
    """`budget` is in tokens; ends and top are shares of it, whatever a layer's own share is."""

    budget: int
    ends: float = 0.05
    top: float = 0.6
    temperature: float = 1.0
    seed: int = 0

    needs: ClassVar[frozenset[str]] = frozenset({"window_queries"})

    @classmethod
    def create(
        cls, model: PolicyModel, budget: int, *, ends: float, top: float, temperature: float, seed: int
    ) -> NaclIndicator:
        return cls(budget, ends, top, temperature, seed)

    def score(self, view: LayerView) -> Tensor:
        """fp32 `[kv_heads, n]`: infinite, then above 0 for the best, then below 0 for the rest."""
        noise = uniform_noise(self.seed, view.layer, view.keys.shape[0], view.total).to(view.keys.device)
        scores = empty_scores(view)
        for head, attention in window_attention(view):
            length = attention.shape[2]
            positions = view.positions[head, :length].long()
            votes = attention.sum(1).mean(0)  # at most the number of rows
            before = before_window(view, head) & (positions >= int(self.ends * self.budget))
            chances = (votes.double() / self.temperature).masked_fill_(~before, float("-inf")).log_softmax(0)
            drawn = chances - torch.log(-torch.log(noise[head, positions]))  # of Gumbel's distribution
            order = drawn.masked_fill_(~before, float("-inf")).argsort(descending=True, stable=True)
            places = torch.empty(length, device=votes.device)
            places[order] = torch.arange(1, length + 1, device=votes.device, dtype=torch.float32)
            best = votes.masked_fill(~before, -1).topk(min(int(self.top * self.budget), int(before.sum()))).indices
            result = -places
            result[best] = 1 + votes[best]
            scores[head, :length] = result.masked_fill_(~before, float("inf"))
        return scores

    def describe(self) -> str:
        return f"top {self.top:g} ends {self.ends:g} seed {self.seed}"
