"""Which runner makes the decode steps: compiled where it can, plain torch else."""

from __future__ import annotations

import logging
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from ..cache.arena import Arena
from ..errors import BackendError
from ..models.decoder import Decoder
from . import decode
from .sequence import Sequence

log = logging.getLogger(__name__)

STEPS = ("auto", "compiled", "eager")


class Step(Protocol):
    """Feeds one token to the sequence in the arena and gives the next token's logits fp32 `[vocab]`."""

    def __call__(self, arena: Arena, sequence: Sequence, token: int, *, window: int) -> Tensor: ...


def make_step(decoder: Decoder, kv_dtype: torch.dtype, wanted: str, threads: int) -> Step:
    """The step of a name in STEPS. "auto" says once why it falls back to torch; "compiled" raises BackendError then."""
    if wanted != "eager":
        from .compiled import CompiledStep

        try:
            return CompiledStep(decoder, kv_dtype, threads).step
        except BackendError as error:
            if wanted == "compiled":
                raise
            if decoder.device.type == "cpu":
                log.warning("decoding runs in plain torch, several times slower: %s", error)
    return partial(decode.step, decoder)
