"""Which number formats a run uses where the user has not said."""

from __future__ import annotations

import torch

from ..cache.config import CacheConfig
from ..cache.layout import ArenaLayout
from ..models.config import ModelConfig
from ..models.products import product_dtype

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def kv_dtype(cache: CacheConfig, stored: torch.dtype, compute: torch.dtype) -> torch.dtype:
    """How kept keys and values are stored: as the user says, else in bf16 where the weights carry no more, else as
    computed."""
    if cache.kv_dtype is not None:
        return DTYPES[cache.kv_dtype]
    narrow = stored in (torch.bfloat16, torch.int8, torch.uint8)
    return torch.bfloat16 if narrow and compute == torch.float32 else compute


def compute_dtype(stored: torch.dtype, device: torch.device) -> torch.dtype:
    """What weights in a dtype are computed in: fp32 on a CPU, elsewhere as stored, packed ones in bf16."""
    if device.type == "cpu":
        return torch.float32
    return stored if stored.is_floating_point else torch.bfloat16


def planned_layout(config: ModelConfig, cache: CacheConfig, stored: torch.dtype, device: torch.device) -> ArenaLayout:
    """The layout that a model with weights in a dtype will have on a device, before there are any."""
    kept = kv_dtype(cache, stored, compute_dtype(stored, device))
    return arena_layout(config, cache, kept, product_dtype(stored, device))


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
