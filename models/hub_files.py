"""Which files of a model repository are wanted: safetensors named by the index, config, tokenizer, chat template."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from ..errors import ModelNotFound, WeightsError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CONFIG = "config.json"
TOKENIZERS = ("tokenizer.json", "tokenizer.model")  # one of them must be there
DOCUMENTS = (
    CONFIG,
    "generation_config.json",
    *TOKENIZERS,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)


def weight_names(index: Path) -> list[str]:
    """The files that an index names, sorted. Raises WeightsError for one that is broken or leaves its folder."""
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(f"{index} is not a readable safetensors index: remove it and download it again") from error
    for name in names:
        if not isinstance(name, str) or not name.endswith(".safetensors") or "/" in name or "\\" in name:
            raise WeightsError(f"{index} names {name!r}, which is no safetensors file of its own folder")
    if not names:
        raise WeightsError(f"{index} names no file")
    return sorted(names)


def absent_files(folder: Path) -> list[Path]:
    """What a folder lacks to be a whole model, dangling links among them; empty if it can be loaded."""
    absent = [folder / name for name in DOCUMENTS if (folder / name).is_symlink() and not (folder / name).exists()]
    for needed in ([CONFIG], list(TOKENIZERS)):
        if not any((folder / name).exists() or (folder / name) in absent for name in needed):
            absent.append(folder / needed[0])
    index = folder / INDEX
    if index.is_symlink() and not index.exists():
        absent.append(index)
    else:
        weights = weight_names(index) if index.exists() else [SINGLE]
        absent += [folder / name for name in weights if not (folder / name).exists()]
    return absent


def weight_bytes(folder: Path) -> int:
    """Size of the safetensors files that would be loaded from a whole folder."""
    index = folder / INDEX
    names = weight_names(index) if index.exists() else [SINGLE]
    return sum((folder / name).stat().st_size for name in names)


def check_has_safetensors(repo: str, names: Iterable[str]) -> None:
    """Raise ModelNotFound, saying what the repository has instead, if it has no loadable safetensors."""
    names = set(names)
    if INDEX in names or SINGLE in names:
        return
    kinds = {
        ".gguf": "only GGUF files: download one and run `cake-infer import-gguf FILE FOLDER`",
        ".bin": "only PyTorch .bin files, which are not loaded: choose a repository with safetensors",
        ".pth": "only PyTorch .pth files, which are not loaded: choose a repository with safetensors",
        ".safetensors": f"none of them {SINGLE} or listed in {INDEX}: choose one in Hugging Face's layout",
    }
    has = next((text for ending, text in kinds.items() if any(name.endswith(ending) for name in names)), None)
    raise ModelNotFound(f"{repo} has no safetensors to load, {has or 'no weights at all: choose another repository'}")
