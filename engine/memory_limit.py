"""Whether what a run needs is there, before anything is read or fetched."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..cache.budget import size_text
from ..cache.config import CacheConfig
from ..errors import MemoryLimit
from ..models.config import read_config
from .available import Available, available_memory
from .memory import Plan, plan_run, weights_of

if TYPE_CHECKING:
    from .engine import Engine

log = logging.getLogger(__name__)

NEAR_LIMIT = 0.9  # a run that takes more than this share of what is free is announced


def check_memory(plan: Plan, available: Available | None) -> None:
    """Logs a warning if the run comes near the limit. Raises MemoryLimit with both figures if it cannot fit."""
    if available is None or plan.total <= NEAR_LIMIT * available.bytes:
        return
    need, free = size_text(plan.total), size_text(available.bytes)
    parts = f"weights {size_text(plan.weights)}, KV arena {size_text(plan.arena)}, the rest {size_text(plan.transient)}"
    if plan.total <= available.bytes:
        log.warning("this run needs %s (%s) of the %s that %s has free", need, parts, free, available.limit)
        return
    raise MemoryLimit(
        f"this run needs {need} ({parts}), but {available.limit} has {free} free: "
        "take a smaller model, a smaller budget or a shorter prompt, or free memory"
    )


def check_download(
    folder: Path | None,
    nbytes: int,
    cache: CacheConfig,
    *,
    dtype: str | None,
    chunk: int,
    device: torch.device | str = "cpu",
) -> None:
    """`check_memory` before `nbytes` of weights are fetched, for a prompt of one chunk: nobody knows the prompt yet.

    `folder` has the config.json; None where only the size is known.
    """
    if folder is None:
        plan = Plan(0, 0, None, weights=nbytes, arena=0, kept=0, staging=0, hidden=0, widened=0, chunk=0)
    else:
        config = read_config(folder)
        weights, stored = weights_of(None, config, dtype)
        plan = plan_run(
            config,
            cache,
            weights=weights if dtype else nbytes,
            stored=stored,
            prompt_tokens=chunk,
            new_tokens=1,
            chunk=chunk,
            device=device,
        )
    check_memory(plan, available_memory(str(device)))


def free_for_arena(engine: Engine, longest: int, available: Available | None) -> int | None:
    """Bytes that an arena may take beside what reading a prompt of `longest` tokens takes; None where nobody knows."""
    if available is None:
        return None
    plan = plan_run(
        engine.config,
        engine.cache,
        weights=0,
        stored=engine.runner.decoder.dtype,
        prompt_tokens=longest,
        new_tokens=1,
        chunk=engine.chunk,
        device=engine.device,
        compiled=engine.step != "eager",
    )
    return int(NEAR_LIMIT * available.bytes) - plan.transient - plan.products
