"""Random numbers that depend on a seed, a layer and a token's position alone: whatever a method draws can be repeated,
and neither the order of columns nor the chunks of a prefill change it."""

from __future__ import annotations

import torch
from torch import Tensor


def uniform_noise(seed: int, layer: int, rows: int, positions: int) -> Tensor:
    """fp64 `[rows, positions]` in (0, 1); a longer text has the same numbers for its first positions."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + layer) % (1 << 63))
    drawn = torch.rand(positions, rows, generator=generator, dtype=torch.float64)
    return drawn.clamp_(1e-300, 1 - 1e-16).t()
