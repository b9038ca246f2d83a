"""LagKV (Liang et al., 2025, arXiv 2504.04704): tokens that stand out against the chunk that follows theirs.

Tokens after the sinks are taken in chunks of `lag`. Each channel of a chunk's keys (values) is scaled by the least and
largest of the next chunk, `(x - min) / (max - min)`; a token's score is the softmax over its chunk of the standard
deviation over channels, keys and values averaged, and then its rank in the chunk, so that every chunk keeps the same
share. The sinks, the last whole chunk and what follows it come first, the later the better. Defaults: 4 sinks and a lag
of 128, as in kvpress, since the authors' 16 and 1024 leave nothing to choose below some thousand tokens. Their code
compresses while it reads; here chunks are counted anew over what a head still holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from ..attention import empty_scores

if TYPE_CHECKING:
    from torch import Tensor

    from ..view import LayerView


@dataclass(frozen=True)
class LagKVIndicator:
    """No attention: the statistics of the next chunk say what is unusual."""

    sinks: int = 4
    lag: int = 128

    needs: ClassVar[frozenset[str]] = frozenset({"values"})

    def score(self, view: LayerView) -> Tensor:
        """fp32 `[kv_heads, n]`: ranks from 0 to 1, above 1 for the tail, infinite for the sinks."""
        assert view.values is not None
        scores = empty_scores(view)
        for head, length in enumerate(view.columns):
            order = view.positions[head, :length].argsort()
            keys, values = (table[head, :length].float()[order] for table in (view.keys, view.values))
            scores[head].scatter_(0, order, self._in_order(keys, values))
        return scores

    def _in_order(self, keys: Tensor, values: Tensor) -> Tensor:
        """Scores `[n]` of one head's rows `[n, head_dim]` in the order of the text."""
        n, sinks = keys.shape[0], min(self.sinks, keys.shape[0])
        whole = (n - sinks) // self.lag
        judged = max(0, whole - 1) * self.lag
        scores = 1 + torch.arange(1, n + 1, device=keys.device) / n
        scores[:sinks] = float("inf")
        if judged:
            span = slice(sinks, sinks + judged + self.lag)
            chance = sum(lag_relative(table[span].view(-1, self.lag, table.shape[1])) for table in (keys, values))
            ranks = torch.as_tensor(chance).argsort(dim=-1).argsort(dim=-1)
            scores[sinks : sinks + judged] = ranks.reshape(-1) / self.lag
        return scores

    def describe(self) -> str:
        return f"sinks {self.sinks} lag {self.lag}"


def lag_relative(chunks: Tensor) -> Tensor:
    """`[c, lag, d]` -> `[c - 1, lag]`: each chunk but the last against the next one."""
    low, high = torch.aminmax(chunks[1:], dim=1, keepdim=True)
    scaled = (chunks[:-1] - low) / (high - low).clamp_min(1e-6)
    return scaled.std(dim=-1).softmax(dim=-1)
