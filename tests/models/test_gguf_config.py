"""GGUF metadata becomes a config, rope scaling among it; what the engine does not have is refused by name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from cake_infer.errors import UnsupportedModel, WeightsError
from cake_infer.models.config import read_config
from cake_infer.models.gguf_import import import_gguf

Write = Callable[..., Path]


def _nothing_left(tmp_path: Path) -> bool:
    return {path.name for path in tmp_path.iterdir()} <= {"source", "m.gguf"}


def _divisors(factor: float, low: float, high: float, original: int, theta: float, size: int) -> Any:
    """rope_freqs as llama.cpp's converter computes it from llama3 parameters."""
    values = []
    for pair in range(size // 2):
        wavelength = 2 * math.pi * theta ** (2 * pair / size)
        if wavelength < original / high:
            values.append(1.0)
        elif wavelength > original / low:
            values.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            values.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(values, dtype=np.float32)


@pytest.mark.parametrize(
    ("factor", "low", "high", "original"),
    [(8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192), (4.0, 1.0, 16.0, 2048), (16.0, 2.0, 8.0, 4096)],
)
def test_rope_freqs_become_the_llama3_scaling_that_gives_them(
    tmp_path: Path, gguf_source: Write, write_gguf: Write, factor: float, low: float, high: float, original: int
) -> None:
    folder = gguf_source(head_dim=64, rope_theta=500000.0)
    divisors = _divisors(factor, low, high, original, 500000.0, 64)
    path = write_gguf(tmp_path / "m.gguf", folder, tensors={"rope_freqs.weight": divisors})
    scaling = json.loads((import_gguf(path, tmp_path / "out") / "config.json").read_text())["rope_scaling"]
    assert scaling["rope_type"] == "llama3"
    assert isinstance(scaling["original_max_position_embeddings"], int)
    again = _divisors(
        scaling["factor"],
        scaling["low_freq_factor"],
        scaling["high_freq_factor"],
        scaling["original_max_position_embeddings"],
        500000.0,
        64,
    )
    np.testing.assert_allclose(again, divisors, rtol=1e-5)
    if low == 1.0:  # only the ratios to the original context can be seen in the divisors
        assert scaling == {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": original,
        }


def test_equal_divisors_are_linear_scaling_and_ones_are_none(
    tmp_path: Path, gguf_source: Write, write_gguf: Write
) -> None:
    folder = gguf_source()
    for number, (value, expected) in enumerate([(4.0, {"rope_type": "linear", "factor": 4.0}), (1.0, None)]):
        divisors = {"rope_freqs.weight": np.full(4, value, dtype=np.float32)}
        out = import_gguf(write_gguf(tmp_path / "m.gguf", folder, tensors=divisors), tmp_path / f"out{number}")
        assert json.loads((out / "config.json").read_text())["rope_scaling"] == expected


@pytest.mark.parametrize("divisors", [[1.0, 2.0, 1.5, 7.0], [1.0, 1.0, 8.0], [1.0, float("nan"), 8.0, 8.0]])
def test_other_divisors_are_refused(
    tmp_path: Path, gguf_source: Write, write_gguf: Write, divisors: list[float]
) -> None:
    tensors = {"rope_freqs.weight": np.array(divisors, dtype=np.float32)}
    path = write_gguf(tmp_path / "m.gguf", gguf_source(), tensors=tensors)
    with pytest.raises(UnsupportedModel, match=r"rope_freqs\.weight"):
        import_gguf(path, tmp_path / "out")


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"scaling.type": "linear", "scaling.factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"scale_linear": 3.0}, {"rope_type": "linear", "factor": 3.0}),
        ({"scaling.type": "none", "scaling.factor": 2.0}, None),
        (
            {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 1024},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
        ),
        (
            {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.attn_factor": 0.5, "scaling.yarn_beta_fast": 16.0},
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 1024,
                "attention_factor": 0.5 * (0.1 * math.log(4.0) + 1.0),
                "beta_fast": 16.0,
            },
        ),
    ],
)
def test_rope_scaling_of_the_metadata(
    tmp_path: Path, gguf_source: Write, write_gguf: Write, metadata: dict[str, Any], expected: dict[str, Any] | None
) -> None:
    entries = {f"llama.rope.{key}": value for key, value in metadata.items()}
    path = write_gguf(tmp_path / "m.gguf", gguf_source(), metadata=entries)
    out = import_gguf(path, tmp_path / "out")
    assert json.loads((out / "config.json").read_text())["rope_scaling"] == expected
    read_config(out)


@pytest.mark.parametrize(
    ("metadata", "tensors", "expected"),
    [
        ({"general.architecture": "phi3"}, {}, "general.architecture = 'phi3'"),
        ({"llama.expert_count": 8}, {}, "llama.expert_count = 8"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 4.0}, {}, "'longrope'"),
        ({}, {"rope_factors_long.weight": np.ones(4, dtype=np.float32)}, "rope_factors_long.weight"),
        ({"llama.rope.dimension_count": 4}, {}, "llama.rope.dimension_count = 4"),
        ({"llama.logit_scale": 0.5}, {}, "llama.logit_scale = 0.5"),
        ({"llama.attention.head_count_kv": [2, 2, 1]}, {}, "head_count_kv differs from layer to layer"),
        ({}, {"blk.0.attn_sinks.weight": np.ones(4, dtype=np.float32)}, "blk.0.attn_sinks.weight"),
        ({}, {"blk.3.attn_norm.weight": np.ones(32, dtype=np.float32)}, "blk.3.attn_norm.weight"),
        ({}, {"blk.0.attn_q_norm.weight": np.ones(8, dtype=np.float32)}, "blk.0.attn_q_norm.weight"),
        ({"split.count": 2}, {}, "one part of a split GGUF"),
    ],
)
def test_what_the_engine_does_not_have_is_refused_by_name(
    tmp_path: Path,
    gguf_source: Write,
    write_gguf: Write,
    metadata: dict[str, Any],
    tensors: dict[str, Any],
    expected: str,
) -> None:
    if "general.architecture" in metadata:
        path = tmp_path / "m.gguf"
        writer = gguf.GGUFWriter(path, metadata["general.architecture"])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    else:
        path = write_gguf(tmp_path / "m.gguf", gguf_source(), metadata=metadata, tensors=tensors)
    with pytest.raises(UnsupportedModel) as caught:
        import_gguf(path, tmp_path / "out")
    assert expected in str(caught.value)
    assert _nothing_left(tmp_path)


@pytest.mark.parametrize(
    ("metadata", "tensors", "expected"),
    [
        ({}, {"blk.2.ffn_up.weight": ...}, "no tensor for model.layers.2.mlp.up_proj.weight"),
        (
            {},
            {"blk.1.attn_k.weight": np.ones((32, 32), dtype=np.float32)},
            "blk.1.attn_k.weight has shape (32, 32)",
        ),
        ({}, {"token_embd.weight": np.ones((299, 32), dtype=np.float32)}, "300 tokens"),
        ({}, {"token_embd.weight": ...}, "no tensor token_embd.weight"),
        ({"llama.feed_forward_length": ...}, {}, "llama.feed_forward_length is missing"),
        ({"llama.block_count": 0}, {}, "llama.block_count"),
        ({"llama.context_length": "many"}, {}, "llama.context_length"),
        ({}, {"blk.0.ffn_up.weight": np.full((64, 32), np.inf, dtype=np.float32)}, "blk.0.ffn_up.weight"),
    ],
)
def test_a_gguf_that_lacks_or_contradicts_something_is_refused_by_name(
    tmp_path: Path,
    gguf_source: Write,
    write_gguf: Write,
    metadata: dict[str, Any],
    tensors: dict[str, Any],
    expected: str,
) -> None:
    path = write_gguf(tmp_path / "m.gguf", gguf_source(), metadata=metadata, tensors=tensors)
    with pytest.raises(WeightsError) as caught:
        import_gguf(path, tmp_path / "out")
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)
    assert _nothing_left(tmp_path)


def test_values_that_float16_cannot_hold_are_refused_and_bfloat16_takes_them(
    tmp_path: Path, gguf_source: Write, write_gguf: Write
) -> None:
    large = {"blk.0.ffn_up.weight": np.full((64, 32), 1e6, dtype=np.float32)}
    path = write_gguf(tmp_path / "m.gguf", gguf_source(), tensors=large)
    with pytest.raises(WeightsError, match="not finite in float16"):
        import_gguf(path, tmp_path / "out", dtype="float16")
    assert _nothing_left(tmp_path)
    import_gguf(path, tmp_path / "out")
