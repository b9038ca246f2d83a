"""Options of a reply: what is refused, what comes from the model's file, what wins."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
from cake_infer.engine.generation import GenerationConfig, resolve_generation
from cake_infer.errors import OptionError

LLAMA_FILE = {"bos_token_id": 128000, "do_sample": True, "temperature": 0.6, "top_p": 0.9}
QWEN_FILE = {"do_sample": True, "repetition_penalty": 1.05, "temperature": 0.7, "top_p": 0.8, "top_k": 20}


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("temperature", [-0.1, math.nan, math.inf, "warm", True]),
        ("top_k", [-1, 2.5, True]),
        ("top_p", [0.0, 1.0001, -0.5, math.nan]),
        ("min_p", [-0.01, 1.01, math.nan]),
        ("repetition_penalty", [0.0, -1.0, math.nan, math.inf]),
        ("presence_penalty", [-2.1, 2.1, math.nan]),
        ("frequency_penalty", [-2.1, 2.1, math.nan]),
        ("max_new_tokens", [-1, 1.5, True]),
        ("seed", [-1, 2**64, 0.5, True]),
        ("logprobs", [-1, 0.5, True]),
        ("stop", ["", ("ok", ""), [1], 7]),
    ],
)
def test_a_value_that_cannot_be_applied_is_refused_by_name(option: str, values: list[object]) -> None:
    for value in values:
        with pytest.raises(OptionError, match=option):
            GenerationConfig(**{option: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("temperature", [0, 0.0, 2.0, 5]),
        ("top_k", [0, 1]),
        ("top_p", [1.0, 1, 1e-9]),
        ("min_p", [0, 1.0]),
        ("repetition_penalty", [0.5, 1, 1.3]),
        ("presence_penalty", [-2, 2.0]),
        ("max_new_tokens", [0]),
        ("seed", [0, 2**64 - 1]),
        ("logprobs", [0, 5]),
    ],
)
def test_border_values_are_accepted(option: str, values: list[object]) -> None:
    for value in values:
        assert getattr(GenerationConfig(**{option: value}), option) == value  # type: ignore[arg-type]


def test_stop_may_be_one_text_or_several() -> None:
    assert GenerationConfig(stop="END").stop == ("END",)  # type: ignore[arg-type]
    assert GenerationConfig(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]
    assert GenerationConfig().stop == ()


def test_without_a_file_replies_are_greedy_and_every_number_is_filled() -> None:
    for nothing in (None, {}):
        config = resolve_generation(GenerationConfig(), nothing)
        assert config.greedy
        assert not config.penalises
        assert (config.temperature, config.top_k, config.top_p, config.min_p) == (0.0, 0, 1.0, 0.0)
        assert (config.repetition_penalty, config.presence_penalty, config.frequency_penalty) == (1.0, 0.0, 0.0)
        assert config.max_new_tokens == 512
        assert isinstance(config.seed, int)
        assert config.logprobs is None


def test_the_file_fills_what_the_caller_left_open() -> None:
    config = resolve_generation(GenerationConfig(), QWEN_FILE)
    assert (config.temperature, config.top_k, config.top_p, config.repetition_penalty) == (0.7, 20, 0.8, 1.05)
    assert not config.greedy
    assert config.penalises
    config = resolve_generation(GenerationConfig(), LLAMA_FILE)
    assert (config.temperature, config.top_k, config.top_p) == (0.6, 0, 0.9)


def test_given_values_win_over_the_file() -> None:
    given = GenerationConfig(temperature=0.0, top_k=0, top_p=1.0, repetition_penalty=1.0, max_new_tokens=0, seed=0)
    config = resolve_generation(given, {**QWEN_FILE, "max_new_tokens": 2048})
    assert (config.temperature, config.top_k, config.top_p, config.repetition_penalty) == (0.0, 0, 1.0, 1.0)
    assert (config.max_new_tokens, config.seed) == (0, 0)


@pytest.mark.parametrize("file", [{"do_sample": False, "temperature": 0.6}, {"temperature": 0.6}])
def test_a_file_that_does_not_ask_for_sampling_means_greedy(file: dict[str, object]) -> None:
    assert resolve_generation(GenerationConfig(), file).greedy


def test_asking_for_a_filter_asks_for_sampling() -> None:
    assert resolve_generation(GenerationConfig(top_p=0.9), {}).temperature == 1.0
    assert resolve_generation(GenerationConfig(top_k=5), {"temperature": 0.6}).temperature == 0.6
    assert resolve_generation(GenerationConfig(min_p=0.1, temperature=0.0), {}).greedy
    assert resolve_generation(GenerationConfig(seed=3), {}).greedy


def test_max_new_tokens_is_never_taken_from_the_file() -> None:
    assert resolve_generation(GenerationConfig(), {"max_new_tokens": 9, "max_length": 20}).max_new_tokens == 512


def test_a_wrong_value_in_the_file_is_refused_unless_the_caller_gives_that_option() -> None:
    with pytest.raises(OptionError, match=r"generation_config\.json.*top_p"):
        resolve_generation(GenerationConfig(), {"do_sample": True, "top_p": 7})
    assert resolve_generation(GenerationConfig(top_p=0.5), {"do_sample": True, "top_p": 7}).top_p == 0.5
    assert resolve_generation(GenerationConfig(), {"top_k": -1, "temperature": None}).top_k == 0


def test_without_a_seed_each_reply_draws_a_fresh_one() -> None:
    seeds = {resolve_generation(GenerationConfig(), None).seed for _ in range(8)}
    assert len(seeds) > 6


def test_reading_the_defaults_does_not_import_torch() -> None:
    code = "import sys, cake_infer.engine.generation; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
