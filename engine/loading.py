"""What an engine needs to know before a weight is read: device, context, tokenizer, the model's own defaults."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from ..errors import BackendError, OptionError
from ..models.config import ModelConfig
from ..models.tokenizer import Tokenizer


def choose_device(name: str | None) -> torch.device:
    """The device asked for, or a GPU if there is one."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise BackendError(f"unknown device {name!r}: give cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise BackendError(f"the device {name!r} is not supported: give cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BackendError("there is no CUDA device here (or this torch was built without CUDA): use --device cpu")
    return device


def context_limit(asked: int | None, config: ModelConfig) -> int:
    if asked is None:
        return config.max_position_embeddings
    if asked < 1:
        raise OptionError(f"context must be at least 1 token, not {asked}")
    if asked > config.max_position_embeddings:
        raise OptionError(
            f"a context of {asked:,} tokens is more than the model's {config.max_position_embeddings:,}: "
            "stretch it with --rope-scaling KIND:FACTOR, or ask for less"
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
