"""Which number formats a run uses where the user has not said."""

from __future__ import annotations

import torch

from ..cache.config import CacheConfig
from ..cache.layout import ArenaLayout
from ..models.config import ModelConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def kv_dtype(cache: CacheConfig, stored: torch.dtype, compute: torch.dtype) -> torch.dtype:
    """How kept keys and values are stored: as the user says, else in bf16 where the weights carry no more, else as
    computed."""
    if cache.kv_dtype is not None:
        return DTYPES[cache.kv_dtype]
    narrow = stored in (torch.bfloat16, torch.int8, torch.uint8)
    return torch.bfloat16 if narrow and compute == torch.float32 else compute


def arena_layout(config: ModelConfig, cache: CacheConfig, kept: torch.dtype, staging: torch.dtype) -> ArenaLayout:
    """How the rows of a model lie in its arena: `kept` is the KV dtype, of what is not packed."""
    return ArenaLayout(
        config.num_layers,
        config.num_kv_heads,
        config.head_dim,
        kept,
        staging,
        kv_bits=cache.kv_bits,
        window=0 if cache.kv_bits is None else cache.window,
    )
