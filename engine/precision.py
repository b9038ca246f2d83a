"""Which number formats a run uses where the user has not said."""

from __future__ import annotations

import torch

from ..cache.config import CacheConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def kv_dtype(cache: CacheConfig, stored: torch.dtype, compute: torch.dtype) -> torch.dtype:
    """How kept keys and values are stored: as the user says, else in bf16 where the weights carry no more, else as
    computed."""
    if cache.kv_dtype is not None:
        return DTYPES[cache.kv_dtype]
    narrow = stored in (torch.bfloat16, torch.int8, torch.uint8)
    return torch.bfloat16 if narrow and compute == torch.float32 else compute
