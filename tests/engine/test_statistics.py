"""The figures of a reply."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest
from cake_infer.engine.results import Progress
from cake_infer.engine.statistics import Statistics, mean_length

MIB = 2**20


def test_the_line_says_everything_in_one_line() -> None:
    statistics = Statistics(
        prompt_tokens=3012,
        prefill_s=7.31,
        kept_tokens=512.0,
        full_tokens=3012,
        kept_bytes=int(11.8 * MIB),
        full_bytes=int(69.4 * MIB),
        new_tokens=24,
        decode_s=0.769,
        peak_memory=612 * MIB,
        policy="cake tau 1/1",
    )
    assert statistics.line() == (
        "prompt 3,012 tok (412 tok/s) | KV kept 512 of 3,012 tok a layer (17.0%), 11.8 of 69.4 MiB | "
        "24 tok (31.2 tok/s) | peak 612 MiB | cake tau 1/1"
    )


@pytest.mark.parametrize("seconds", [0.0, math.nan, 5e-324])
def test_zero_tokens_and_unset_times_do_not_divide_by_zero(seconds: float) -> None:
    statistics = Statistics(prompt_tokens=3, new_tokens=0, prefill_s=seconds, decode_s=seconds)
    assert statistics.line() == "prompt 3 tok | 0 tok"
    assert statistics.prefill_rate is None
    assert statistics.decode_rate is None
    assert statistics.kept_share is None
    assert statistics.layers_text() == ""
    assert Statistics().line() == "prompt 0 tok | 0 tok"


def test_decode_rate_counts_forward_passes() -> None:
    assert Statistics(new_tokens=1, decode_steps=0, decode_s=0.001).decode_rate is None
    assert Statistics(new_tokens=11, decode_steps=10, decode_s=2.0).decode_rate == 5.0
    assert Statistics(new_tokens=10, decode_s=2.0).decode_rate == 5.0


def test_the_dictionary_is_strict_json_and_complete() -> None:
    statistics = Statistics(
        prompt_tokens=10, prefill_s=2.0, decode_s=math.nan, load_s=math.inf, layer_lengths=((3, 4), (5, 5)), seed=0
    )
    values = json.loads(json.dumps(statistics.as_dict(), allow_nan=False))
    assert values["prefill_tokens_per_s"] == 5.0
    assert values["decode_tokens_per_s"] is None
    assert values["decode_s"] is None
    assert values["load_s"] is None
    assert values["layer_lengths"] == [[3, 4], [5, 5]]
    assert values["seed"] == 0
    assert set(Statistics.__dataclass_fields__) < set(values)


def test_layers_are_listed_with_their_share_and_uneven_heads() -> None:
    statistics = Statistics(full_tokens=1000, layer_lengths=((250, 250), (100, 300), (1000, 1000)))
    lines = statistics.layers_text().splitlines()
    assert len(lines) == 3
    assert lines[0].split() == ["layer", "0", "250", "tok", "25.0%"]
    assert lines[1].split() == ["layer", "1", "200", "tok", "20.0%", "(heads", "100-300)"]
    assert lines[2].split() == ["layer", "2", "1,000", "tok", "100%"]


def test_mean_length_is_over_all_rows() -> None:
    assert mean_length(((3, 4), (5, 6))) == 4.5
    assert mean_length(()) == 0.0


def test_sizes_share_a_unit_unless_one_would_be_next_to_nothing_in_it() -> None:
    def line(kept: int) -> str:
        return Statistics(kept_tokens=1, full_tokens=2, kept_bytes=kept, full_bytes=2**31, peak_memory=3 * 2**30).line()

    assert "22.5 MiB of 2.0 GiB" in line(45 * 2**19)
    assert "100 B of 2.0 GiB" in line(100)
    assert "1.5 of 2.0 GiB" in line(3 * 2**29)
    assert "0.0 of 2.0 GiB" in line(0)
    assert "peak 3.0 GiB" in line(0)
    assert "512 of 900 B" in Statistics(kept_tokens=1, full_tokens=2, kept_bytes=512, full_bytes=900).line()


def test_peak_memory_is_in_bytes_and_sees_an_allocation() -> None:
    code = """
from cake_infer.engine.statistics import peak_memory_bytes
before = peak_memory_bytes()
block = b"x" * (before + (64 << 20))
print(before, peak_memory_bytes("cpu"))
"""
    answer = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    before, after = map(int, answer.split())
    assert 4 * MIB < before < 400 * MIB  # an interpreter without torch
    assert before + 64 * MIB <= after < 3 * before + 128 * MIB


def test_progress_share_is_between_0_and_1() -> None:
    assert Progress("prefill", 3, 12, layer=0, num_layers=4).share == 0.25
    assert Progress("load", 0, 0).share == 1.0
    assert Progress("load", 9, 3).share == 1.0
