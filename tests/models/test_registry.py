"""The list of aliases is consistent and its figures are those of the models' shapes."""

from __future__ import annotations

import re

import pytest
from cake_infer.models.registry import ALIASES, EMBEDDED, alias_of, near_aliases

# vocabulary, hidden, intermediate, layers, query heads, KV heads, head size, tied head, q/k/v bias, q/k norm
SHAPES = {
    "smollm2-135m": (49152, 576, 1536, 30, 9, 3, 64, True, False, False),
    "smollm2-360m": (49152, 960, 2560, 32, 15, 5, 64, True, False, False),
    "smollm2-1.7b": (49152, 2048, 8192, 24, 32, 32, 64, True, False, False),
    "tinyllama": (32000, 2048, 5632, 22, 32, 4, 64, False, False, False),
    "llama2-7b": (32000, 4096, 11008, 32, 32, 32, 128, False, False, False),
    "llama2-13b": (32000, 5120, 13824, 40, 40, 40, 128, False, False, False),
    "llama3-8b": (128256, 4096, 14336, 32, 32, 8, 128, False, False, False),
    "llama3.1-8b": (128256, 4096, 14336, 32, 32, 8, 128, False, False, False),
    "llama3.2-1b": (128256, 2048, 8192, 16, 32, 8, 64, True, False, False),
    "llama3.2-3b": (128256, 3072, 8192, 28, 24, 8, 128, True, False, False),
    "mistral-7b": (32768, 4096, 14336, 32, 32, 8, 128, False, False, False),
    "qwen2.5-0.5b": (151936, 896, 4864, 24, 14, 2, 64, True, True, False),
    "qwen2.5-1.5b": (151936, 1536, 8960, 28, 12, 2, 128, True, True, False),
    "qwen2.5-3b": (151936, 2048, 11008, 36, 16, 2, 128, True, True, False),
    "qwen2.5-7b": (152064, 3584, 18944, 28, 28, 4, 128, False, True, False),
    "qwen2.5-14b": (152064, 5120, 13824, 48, 40, 8, 128, False, True, False),
    "qwen3-0.6b": (151936, 1024, 3072, 28, 16, 8, 128, True, False, True),
    "qwen3-1.7b": (151936, 2048, 6144, 28, 16, 8, 128, True, False, True),
    "qwen3-4b": (151936, 2560, 9728, 36, 32, 8, 128, True, False, True),
    "qwen3-8b": (151936, 4096, 12288, 36, 32, 8, 128, False, False, True),
    "gemma-2b": (256000, 2048, 16384, 18, 8, 1, 256, True, False, False),
    "gemma-7b": (256000, 3072, 24576, 28, 16, 16, 256, True, False, False),
}
STORED_TWICE = {"qwen3-0.6b", "qwen3-1.7b"}  # their tied head is in the file once more


@pytest.mark.parametrize("name", ALIASES)
def test_parameters_and_bytes_follow_from_the_shapes(name: str) -> None:
    vocab, hidden, inner, layers, heads, kv_heads, head_dim, tied, bias, qk_norm = SHAPES[name]
    q, kv = heads * head_dim, kv_heads * head_dim
    layer = 2 * hidden * q + 2 * hidden * kv + 3 * hidden * inner + 2 * hidden
    layer += (q + 2 * kv) * bias + 2 * head_dim * qk_norm
    count = vocab * hidden * (1 if tied else 2) + layers * layer + hidden
    assert ALIASES[name].parameters == count
    assert ALIASES[name].bytes == 2 * (count + vocab * hidden * (name in STORED_TWICE))


def test_every_alias_but_the_embedded_one_is_a_hub_id_and_no_two_are_the_same() -> None:
    repositories = [alias.repo for name, alias in ALIASES.items() if name != EMBEDDED]
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+", repository) for repository in repositories)
    assert len(set(repositories)) == len(repositories)
    assert ALIASES["mistral-7b"].repo == "mistralai/Mistral-7B-Instruct-v0.3"
    assert all(name == name.lower() and "/" not in name for name in ALIASES)


def test_names_are_found_in_any_case_and_near_ones_are_suggested() -> None:
    assert alias_of(" Mistral-7B ") == "mistral-7b"
    assert alias_of("mistral") is None
    assert near_aliases("mistral")[0] == "mistral-7b"
    assert near_aliases("someone/qwen3-8B-instruct")[0] == "qwen3-8b"
    assert near_aliases("zzzz") == near_aliases("") == []
