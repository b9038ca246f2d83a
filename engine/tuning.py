"""The file that `tune` writes for a model, and everything that runs the model reads."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ..cache.config import CacheConfig
from ..cache.policies.base import PolicyModel
from ..cache.tuned import Tuned
from ..errors import CakeError
from ..models.config import ModelConfig
from ..models.embedded import cache_home
from ..ranges import POSITIVE
from .whole_file import write_whole

log = logging.getLogger(__name__)

NAME = "cake-tuning.json"
FORMAT = 1


def policy_model(config: ModelConfig, tuned: tuple[Tuned, ...] = ()) -> PolicyModel:
    """What a policy may know of a model, with the constants that were found for it."""
    return PolicyModel(config.model_type, config.num_layers, config.hidden_size, config.vocab_size, tuned)


def places(model_path: Path) -> tuple[Path, Path]:
    """Beside the model, and, where that folder cannot be written to, in the user's cache folder."""
    folder = model_path.resolve()
    digest = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
    return model_path / NAME, cache_home() / "tuned" / f"{folder.name}-{digest}.json"


def read_tuning(model_path: Path) -> tuple[Tuned, ...]:
    """What was found for a model; () where nothing was. Raises CakeError for a file that is damaged."""
    for path in places(model_path):
        try:
            text = path.read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, UnicodeDecodeError) as error:
            raise CakeError(f"{path} cannot be read: {error}; remove it, or run `cake-infer tune` again") from None
        return _parsed(text, path)
    return ()


def write_tuning(model_path: Path, found: Sequence[Tuned]) -> Path:
    """Add what was found to what is known (a budget's row takes the place of an older one); returns the file."""
    known = {row.budget: row for row in read_tuning(model_path)}
    known.update((row.budget, row) for row in found)
    rows = [asdict(known[budget]) for budget in sorted(known)]
    text = json.dumps({"format": FORMAT, "cake": rows}, indent=1) + "\n"
    beside, cached = places(model_path)
    try:
        write_whole(beside, text.encode())
        return beside
    except OSError as refused:
        if beside.exists():
            raise CakeError(f"cannot write {beside}: {refused.strerror or refused}") from None
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        write_whole(cached, text.encode())
    except OSError as error:
        raise CakeError(f"cannot write {cached}: {error.strerror or error}") from None
    return cached


def _parsed(text: str, path: Path) -> tuple[Tuned, ...]:
    try:
        data = json.loads(text)
        if data["format"] != FORMAT:
            raise CakeError(f"{path} is of another version: remove it, or run `cake-infer tune` again")
        rows = tuple(Tuned(**row) for row in data["cake"])
        good = all(POSITIVE.has(row.budget) for row in rows)
        constants = [(row.tau1, row.tau2, 0.0 if row.gamma is None else row.gamma) for row in rows]
        numbers = [CacheConfig.numbers[name] for name in ("tau1", "tau2", "gamma")]
        good &= all(own.has(value) for row in constants for own, value in zip(numbers, row, strict=True))
    except (ValueError, KeyError, TypeError, RecursionError):
        good = False
    if not good:
        raise CakeError(f"{path} is damaged: remove it, or run `cake-infer tune` again") from None
    return rows
