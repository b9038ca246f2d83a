"""Which attention backend runs: the one that was asked for, or the best that can."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ...cache.config import CacheConfig
from ...errors import BackendError, OptionError
from ...models.config import ModelConfig
from ..options import ATTENTION
from .interface import Attention
from .sdpa import Sdpa

LARGEST_HEAD = 256
AMPERE = (8, 0)  # the first GPUs with bf16 matrix products


@dataclass(frozen=True)
class Setting:
    """What a backend must cope with. dtypes: of queries, staged and kept keys. sliding: some layer has a window.
    packed: kept rows are packed in a few bits."""

    device: torch.device
    dtypes: frozenset[torch.dtype]
    head_dim: int
    hold: bool = False
    evicts: bool = True
    sliding: bool = False
    packed: bool = False

    @classmethod
    def of(
        cls, config: ModelConfig, cache: CacheConfig, device: torch.device, dtypes: Iterable[torch.dtype] = ()
    ) -> Setting:
        """What a model and a cache ask for; without dtypes where the weights are still to be read."""
        return cls(
            device=device,
            dtypes=frozenset(dtypes),
            head_dim=config.head_dim,
            hold=cache.decode_policy == "hold",
            evicts=cache.choice is not None,
            sliding=any(window is not None for window in config.sliding_windows),
            packed=cache.kv_bits is not None,
        )


def choose_attention(wanted: str, setting: Setting) -> Attention:
    """The backend of a name in ATTENTION. "auto" takes triton, flash_attn or sdpa, the first that can run.

    Raises BackendError with the reason where the one that was asked for cannot.
    """
    if wanted not in ATTENTION:
        raise OptionError(f"unknown attention backend {wanted!r}: choose one of {', '.join(ATTENTION)}")
    if wanted == "auto" and setting.device.type == "cpu":
        return Sdpa()
    for name in ("triton", "flash_attn", "sdpa") if wanted == "auto" else (wanted,):
        reason = refusal(name, setting)
        if reason is None:
            return make(name)
        if wanted != "auto":
            raise BackendError(f"attention {name} cannot run here: {reason}; leave it out, or choose sdpa")
    raise AssertionError("sdpa runs anywhere")


def make(name: str) -> Attention:
    """A backend by name; its libraries are imported here."""
    if name == "triton":
        from .ragged import RaggedTriton

        return RaggedTriton()
    if name == "flash_attn":
        from .flash import FlashAttention

        return FlashAttention()
    return Sdpa()


def refusal(name: str, setting: Setting) -> str | None:
    """Why a backend cannot run in a setting, None if it can."""
    if name == "sdpa":
        return None
    if setting.packed and name == "flash_attn":
        return "it has no form for the packed rows of kv_bits"
    interpreted = name == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    if setting.device.type != "cuda" and not interpreted:
        return f"it needs a CUDA device, this is {setting.device.type}"
    if importlib.util.find_spec(name) is None:
        return f"the package {name.replace('_', '-')} is not installed"
    if setting.device.type == "cuda" and torch.cuda.get_device_capability(setting.device) < AMPERE:
        return "it needs a GPU of compute capability 8.0 or newer"
    if setting.head_dim > LARGEST_HEAD:
        return f"its heads have at most {LARGEST_HEAD} elements, this model's have {setting.head_dim}"
    return _flash_refusal(setting) if name == "flash_attn" else None


def _flash_refusal(setting: Setting) -> str | None:
    if len(setting.dtypes) > 1 or not setting.dtypes <= {torch.float16, torch.bfloat16}:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in setting.dtypes))
        return f"it works in float16 or bfloat16, weights, keys and values alike, not in {names}"
    if setting.head_dim % 8:
        return f"its heads are a multiple of 8 wide, this model's have {setting.head_dim} elements"
    if setting.hold:
        return "decode policy hold needs the attention weights, which it does not give"
    if setting.sliding and setting.evicts:
        return "its sliding window counts kept rows, not positions, and rows are evicted"
    return None
