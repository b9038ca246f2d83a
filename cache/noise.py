"""Random numbers that depend on a seed, a layer and a token's position alone: whatever a method draws can be repeated,
and neither the order of columns nor the chunks of a prefill change it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

TILE = 1 << 22  # numbers drawn at a time


def uniform_noise(seed: int, layer: int, rows: int, positions: int) -> Tensor:
    """fp64 `[rows, positions]` in (0, 1); a longer text has the same numbers for its first positions."""
    return torch.cat([tile for _, tile in noise_tiles(seed, layer, rows, positions)], 1)


def noise_tiles(seed: int, layer: int, rows: int, positions: int) -> Iterator[tuple[int, Tensor]]:
    """The same `[rows, some positions]` at a time, each with the first of its positions."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + layer) % (1 << 63))
    some = max(1, TILE // rows)
    for first in range(0, positions, some):
        drawn = torch.rand(min(some, positions - first), rows, generator=generator, dtype=torch.float64)
        yield first, drawn.clamp_(1e-300, 1 - 1e-16).t()
