"""What an engine needs to know before a weight is read: device, context, tokenizer, the model's own defaults."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from ..cache.config import CacheConfig
from ..errors import BackendError, OptionError
from ..models.config import ModelConfig
from ..models.tokenizer import Tokenizer
from .results import Progress


def choose_device(name: str | None) -> torch.device:
    """The device asked for (a name that `EngineOptions` lets pass), or a GPU if there is one."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BackendError("there is no CUDA device here (or torch was built without it): set the option device to cpu")
    return device


def check_quant(quant: str | None, device: torch.device) -> None:
    """Raise BackendError for a quantisation that the device has no products for."""
    if quant is None or device.type == "cpu":
        return
    if quant != "int8":
        raise BackendError(
            f"{quant} weights run on a CPU only: set the option quant to int8, or the option device to cpu"
        )
    if importlib.util.find_spec("triton") is None:
        raise BackendError("int8 weights need the package triton on a GPU: install it, or leave the option quant out")


def context_limit(asked: int | None, config: ModelConfig) -> int:
    """The most tokens of a text. Raises OptionError for more than the model can have."""
    if asked is None:
        return config.max_position_embeddings
    if asked > config.max_position_embeddings:
        raise OptionError(
            f"a context of {asked:,} tokens is more than the model's {config.max_position_embeddings:,}: "
            "stretch it with the option rope_scaling (KIND:FACTOR), or ask for less"
        )
    return asked


def load_tokenizer(path: Path, config: ModelConfig, *, optional: bool) -> Tokenizer | None:
    names = ("tokenizer.json", "tokenizer.model", "vocab.json")
    if optional and not any((path / name).exists() for name in names):
        return None
    tokenizer = Tokenizer.load(path)
    tokenizer.check_vocabulary(config.vocab_size)
    return tokenizer


def generation_defaults(path: Path) -> dict[str, object]:
    file = path / "generation_config.json"
    if not file.exists():
        return {}
    try:
        loaded = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OptionError(f"{file} cannot be read: {error}; repair or remove it") from None
    return loaded if isinstance(loaded, dict) else {}


def cache_config(cache: CacheConfig | None, options: dict[str, Any]) -> CacheConfig:
    known = {field.name for field in fields(CacheConfig)}
    unknown = sorted(set(options) - known)
    if unknown:
        raise OptionError(f"unknown option {unknown[0]!r}: the cache's options are {', '.join(sorted(known))}")
    given = {name: value for name, value in options.items() if value is not None}
    return replace(cache, **given) if cache is not None else CacheConfig(**given)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def stage_reporter(on_progress: Callable[[Progress], None] | None) -> Callable[[str, int, int], None] | None:
    """`on_progress` for a stage's name and figures, called once for each whole percent; None for None."""
    if on_progress is None:
        return None
    callback = on_progress
    last: tuple[str, int] | None = None

    def report(stage: str, done: int, total: int) -> None:
        nonlocal last
        step = (stage, 100 * done // total if total > 0 else done)
        if step != last:  # a model has hundreds of small tensors, and nobody wants the same percentage for each
            last = step
            callback(Progress("load" if stage == "load" else "download", done, total))

    return report
