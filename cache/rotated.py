"""Where queries will point on average: their moments before rotation, turned by the mean rotation to come."""

from __future__ import annotations

import torch
from torch import Tensor

from .view import LayerView

BLOCK = 4096  # positions at a time


def mean_rotation(view: LayerView, ahead: int) -> Tensor:
    """The mean of the rotations of the next `ahead` positions, fp32 `[head_dim, head_dim]` (half-split layout)."""
    assert view.rotation is not None
    parts = []
    for first in range(view.total, view.total + ahead, BLOCK):
        positions = torch.arange(first, min(first + BLOCK, view.total + ahead), device=view.keys.device)
        parts.append(torch.stack([table.double().sum(0) for table in view.rotation(positions)]))
    cos, sin = (torch.stack(parts).sum(0) / ahead).float()
    return torch.cat([torch.cat([cos.diag(), -sin.diag()], 1), torch.cat([sin.diag(), cos.diag()], 1)], 0)
