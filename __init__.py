"""cake-infer: a minimal inference engine for Llama, Mistral, Qwen and Gemma models with a KV cache whose budget holds.

Nothing is imported until a name is used (PEP 562): `cake-infer --help` must not pay for torch.
"""

from __future__ import annotations

TYPE_CHECKING = False  # type checkers take it as true; importing typing would take most of the time that this takes

if TYPE_CHECKING:
    from .cache.config import CacheConfig
    from .engine.document import Document
    from .engine.engine import Engine
    from .engine.generation import GenerationConfig
    from .engine.results import Piece, Progress, Result
    from .engine.statistics import Statistics
    from .errors import (
        ArenaFull,
        BackendError,
        BudgetError,
        CakeError,
        MemoryLimit,
        ModelNotFound,
        OptionError,
        PromptError,
        SnapshotError,
        TokenizerError,
        UnsupportedModel,
        WeightsError,
    )

__version__ = "0.1.0"

_HOME = {
    "Document": ".engine.document",
    "Engine": ".engine.engine",
    "Piece": ".engine.results",
    "Progress": ".engine.results",
    "Result": ".engine.results",
    "GenerationConfig": ".engine.generation",
    "Statistics": ".engine.statistics",
    "CacheConfig": ".cache.config",
    "ArenaFull": ".errors",
    "BackendError": ".errors",
    "BudgetError": ".errors",
    "CakeError": ".errors",
    "MemoryLimit": ".errors",
    "ModelNotFound": ".errors",
    "OptionError": ".errors",
    "PromptError": ".errors",
    "SnapshotError": ".errors",
    "TokenizerError": ".errors",
    "UnsupportedModel": ".errors",
    "WeightsError": ".errors",
}

__all__ = [
    "ArenaFull",
    "BackendError",
    "BudgetError",
    "CacheConfig",
    "CakeError",
    "Document",
    "Engine",
    "GenerationConfig",
    "MemoryLimit",
    "ModelNotFound",
    "OptionError",
    "Piece",
    "Progress",
    "PromptError",
    "Result",
    "SnapshotError",
    "Statistics",
    "TokenizerError",
    "UnsupportedModel",
    "WeightsError",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name], __name__), name)
