"""The shapes of models that the check runs, and how large everything else is: on a GPU, and in a dry run on a CPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SMOLLM_135M = {
    **LLAMA_8B,
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "rope_scaling": None,
    "tie_word_embeddings": True,
}
TINY = {
    **SMOLLM_135M,
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Scale:
    """How large everything is: on a GPU the real shapes, in a dry run shapes that a CPU works in a second.

    warm, steps, rounds: decode steps before those that are timed, those of one timing, and how many timings the median
    is taken of. repeats: how often a prompt of each of `prefills` is read.
    """

    dry: bool
    large: dict[str, Any]
    small: dict[str, Any]
    contexts: tuple[int, ...]
    prefills: tuple[int, ...]
    repeats: tuple[int, ...]
    budget: int
    window: int
    chunk: int
    warm: int
    steps: int
    rounds: int
    prompts: tuple[int, ...]
    new_tokens: int
    dtype: str
    copied: int  # bytes of the buffer that bandwidth is measured with


GPU = Scale(
    dry=False,
    large=LLAMA_8B,
    small=SMOLLM_135M,
    contexts=(1024, 32768, 131072),
    prefills=(8192, 32768, 131072),
    repeats=(4, 3, 1),
    budget=1024,
    window=32,
    chunk=4096,
    warm=10,
    steps=16,
    rounds=3,
    prompts=(5, 500, 37, 5),
    new_tokens=40,
    dtype="bfloat16",
    copied=4 << 30,
)
DRY = replace(
    GPU,
    dry=True,
    large=TINY,
    small=TINY,
    contexts=(12,),
    prefills=(40,),
    repeats=(1,),
    budget=8,
    window=4,
    chunk=16,
    warm=1,
    steps=1,
    rounds=1,
    prompts=(3, 20, 3),
    new_tokens=3,
    dtype="float32",
    copied=1 << 16,
)
