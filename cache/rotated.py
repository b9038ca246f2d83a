"""Where queries will point on average: their moments before rotation, turned by the mean rotation to come."""

from __future__ import annotations

import torch
from torch import Tensor

from .view import LayerView


def mean_rotation(view: LayerView, ahead: int) -> Tensor:
    """The mean of the rotations of the next `ahead` positions, fp32 `[head_dim, head_dim]` (half-split layout)."""
    assert view.rotation is not None
    positions = torch.arange(view.total, view.total + ahead, device=view.keys.device)
    cos, sin = (table.mean(0).diag() for table in view.rotation(positions))
    return torch.cat([torch.cat([cos, -sin], 1), torch.cat([sin, cos], 1)], 0)
