"""By what heads are compared when a layer's slots are dealt over them."""

from __future__ import annotations

import pytest
import torch
from cake_infer.cache.policies.base import LayerScore
from cake_infer.cache.staged import Staged
from cake_infer.engine.keeping import Chosen

WINDOW, COLUMNS = 3, 12


def staged() -> Staged:
    """Two heads, the second with two columns less, in no order of position."""
    random = torch.Generator().manual_seed(2)
    position = torch.stack([torch.randperm(COLUMNS, generator=random) for _ in range(2)]).int()
    position[1, -2:] = -1
    position[1, :-2] = torch.tensor([11, 3, 10, 0, 9, 5, 1, 2, 7, 6])
    nothing = torch.empty(2, COLUMNS, 4)
    return Staged(nothing, nothing, position, torch.zeros(2, COLUMNS), (COLUMNS - 1, COLUMNS - 3), 1)


@pytest.mark.parametrize("falls", [True, False], ids=["in the order of what is kept", "in another order"])
def test_heads_are_compared_by_the_best_of_what_is_worth_most(falls: bool) -> None:
    layer = staged()
    indicator = torch.rand(2, COLUMNS, generator=torch.Generator().manual_seed(3))
    worth = indicator.clamp_max(0.5) if falls else 1 - indicator
    chosen = Chosen(LayerScore(indicator, 1.0, worth=worth), layer, COLUMNS - WINDOW, WINDOW)
    for limit in (0, 4, COLUMNS):
        for head, row in enumerate(chosen.rank(limit)):
            length = layer.lengths[head]
            before = [
                float(worth[head, column])
                for column in range(length)
                if layer.position[head, column] < COLUMNS - WINDOW
            ]
            assert row.tolist() == sorted(before, reverse=True)[:limit]
