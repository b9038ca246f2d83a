"""Nexus Sampling (Duong et al., 2026, arXiv 2606.23961): blocks kept by weighted chance.

Per layer, heads averaged: `P` is the attention of the last 16 mean queries over the mean keys, `S` its sums over blocks
of 32 positions with rows normalised, `a` the mean row. A walk over the newest 3 rows, `C <- C + (1 + <r, C>) r`, gives
`c = C / sum C`; a block weighs `w = a + 0.5 c`, plus 1e-6 times its place. A block's key is the mean of 5 draws of
`u^(1 / w)`, in logarithms, since most of these are 0 in floating point; the largest stay. The first block is kept. The
paper does not say which rows the walk takes: these are the newest. The tokens drawn depend on seed, layer and position
alone. With many draws the choice tends to that by weight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from ..joined import SharedPositions
from ..noise import noise_tiles

if TYPE_CHECKING:
    from torch import Tensor

    from ..view import LayerView

_EPSILON = 1e-6


@dataclass(frozen=True)
class NexusIndicator:
    """One choice of blocks for all heads of a layer."""

    block: int = 32
    rows: int = 16
    walk: int = 3
    mix: float = 0.5
    draws: int = 5
    seed: int = 0

    needs: ClassVar[frozenset[str]] = frozenset({"window_queries"})

    def score(self, view: LayerView) -> Tensor:
        """fp32 `[kv_heads, n]`: the logarithm of a block's key, infinite for the first block."""
        shared = SharedPositions.of(view)
        block = shared.positions // self.block
        index = torch.unique(block, return_inverse=True)
        weight = self.weights(view, shared, index[1], len(index[0]))
        there = index[0].cpu()
        parts = []
        for first, noise in noise_tiles(self.seed, view.layer, self.draws, int(block[-1]) + 1):
            mine = there[(there >= first) & (there < first + noise.shape[1])]
            own = weight[len(there[there < first]) :][: len(mine)]
            parts.append(torch.logsumexp(noise[:, mine - first].log().to(weight.device) / own, 0))
        key = torch.cat(parts) - math.log(self.draws)
        key = torch.where(index[0] == 0, torch.full_like(key, math.inf), key)
        return shared.spread(view, key.float()[index[1]])

    def weights(self, view: LayerView, shared: SharedPositions, index: Tensor, blocks: int) -> Tensor:
        """fp64 `[blocks]`: `w` of each block that is there; `index` is the block of each position of `shared`."""
        count = torch.zeros(len(shared.positions), device=index.device)
        keys = torch.zeros(len(shared.positions), view.keys.shape[2], device=index.device)
        for head, (length, inverse) in enumerate(zip(view.columns, shared.inverse, strict=True)):
            keys.index_add_(0, inverse, view.keys[head, :length].float())
            count[inverse] += 1
        keys /= count[:, None]
        queries = view.queries[:, -self.rows :].float().mean(0)
        at = view.query_positions[-self.rows :].to(index.device)[:, None]
        hidden = shared.positions > at
        if view.sliding_window is not None:
            hidden |= shared.positions <= at - view.sliding_window
        attention = (queries @ keys.t() * view.scale).masked_fill_(hidden, float("-inf")).softmax(-1).double()
        mass = torch.zeros(len(queries), blocks, dtype=torch.float64, device=index.device)
        mass.index_add_(1, index, attention)
        rows = mass / mass.sum(1, keepdim=True)
        walked = torch.zeros(blocks, dtype=torch.float64, device=index.device)
        for row in rows[-self.walk :]:
            walked = walked + (1 + row @ walked) * row
        weight = rows.mean(0) + self.mix * walked / walked.sum()
        return weight + _EPSILON * torch.arange(blocks, device=index.device) / max(blocks - 1, 1)

    def describe(self) -> str:
        return f"block {self.block} draws {self.draws} seed {self.seed}"
