"""Small tables from the host to a device, without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def to_device(values: np.ndarray | Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
    """The values as a tensor there. A plain copy from memory that is not pinned would wait until the device is idle."""
    listed = torch.as_tensor(values, dtype=dtype)
    return listed.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else listed
