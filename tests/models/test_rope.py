"""Rotary embeddings: every kind equals published numbers and transformers, and the rotation is the half-split one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cake_infer.errors import UnsupportedModel
from cake_infer.models.config import ModelConfig
from cake_infer.models.rope import RopeConfig, Rotary, apply_rotary_, inverse_frequencies, rotate_into
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}
LONGROPE = {
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
    "original_max_position_embeddings": 1024,
}


def read_rope(kind: str, theta: float, head_dim: int, max_position: int, spelling: str, **extra: Any) -> RopeConfig:
    """The rope of a llama config that spells it in the given way."""
    config: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": 320,
        "hidden_size": 4 * head_dim,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": max_position,
    }
    if spelling == "rope_parameters":
        config["rope_parameters"] = {"rope_type": kind, "rope_theta": theta, **extra}
    else:
        config |= {"rope_theta": theta, "rope_scaling": {spelling: kind, **extra}}
    return ModelConfig.from_dict(config).rope


@pytest.mark.parametrize("spelling", ["type", "rope_type", "rope_parameters"])
@pytest.mark.parametrize(
    ("kind", "theta", "max_position", "seq_len", "extra", "frequencies", "factor"),
    [
        ("default", 1e4, 2048, 9999, {}, [1.0, 0.1, 0.01, 0.001], 1.0),
        ("linear", 1e4, 2048, 9999, {"factor": 2.0}, [0.5, 0.05, 0.005, 0.0005], 1.0),
        ("dynamic", 1e4, 2048, 1, {"factor": 2.0}, [1.0, 0.1, 0.01, 0.001], 1.0),
        ("dynamic", 1e4, 2048, 2048, {"factor": 2.0}, [1.0, 0.1, 0.01, 0.001], 1.0),
        ("dynamic", 1e4, 2048, 4096, {"factor": 2.0}, [1.0, 0.0693361274, 0.00480749857, 0.000333333333], 1.0),
        ("longrope", 1e4, 4096, 1024, LONGROPE, [1.0, 0.0909090909, 0.00833333333, 0.000769230769], 1.0954451150103321),
        ("longrope", 1e4, 4096, 1025, LONGROPE, [1.0, 0.05, 0.0025, 0.000125], 1.0954451150103321),
        ("longrope", 1e4, 4096, 1025, {**LONGROPE, "factor": 8.0}, [1.0, 0.05, 0.0025, 0.000125], 1.140175425099138),
        ("longrope", 1e4, 4096, 1, {**LONGROPE, "attention_factor": 1.5}, [1.0, 1 / 11, 0.1 / 12, 0.01 / 13], 1.5),
    ],
)
def test_frequencies_are_the_published_ones(
    kind: str,
    theta: float,
    max_position: int,
    seq_len: int,
    extra: dict[str, Any],
    frequencies: list[float],
    factor: float,
    spelling: str,
) -> None:
    ours, ours_factor = inverse_frequencies(read_rope(kind, theta, 8, max_position, spelling, **extra), seq_len)
    assert ours.dtype == torch.float32
    assert ours.tolist() == pytest.approx(frequencies, rel=1e-6)
    assert ours_factor == pytest.approx(factor, abs=1e-6)


@pytest.mark.parametrize("spelling", ["type", "rope_type", "rope_parameters"])
def test_llama3_frequencies_under_either_spelling(spelling: str) -> None:
    ours, factor = inverse_frequencies(read_rope("llama3", 500000.0, 16, 131072, spelling, **LLAMA3), 1)
    assert factor == 1.0
    assert ours.tolist() == pytest.approx(
        [1.0, 0.193922758, 0.0376060307, 0.00729266508, 0.000524846022, 3.42810235e-05, 6.64786967e-06, 1.28917316e-06],
        rel=1e-6,
    )


@pytest.mark.parametrize(
    ("extra", "factor"),
    [
        ({}, 1.138629436111989),
        ({"attention_factor": 1.0}, 1.0),
        ({"attention_factor": 1.2}, 1.2),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 0.707, "mscale_all_dim": 1.0}, 0.964326914892074),
        ({"mscale": 0.707, "mscale_all_dim": 0}, 1.138629436111989),
        ({"mscale": 0.707}, 1.138629436111989),
    ],
)
def test_yarn_reads_its_attention_factor_from_every_key(extra: dict[str, float], factor: float) -> None:
    ours, ours_factor = inverse_frequencies(read_rope("yarn", 1e6, 16, 131072, "rope_type", **YARN, **extra), 1)
    assert ours_factor == pytest.approx(factor, abs=1e-6)
    assert ours.tolist() == pytest.approx(
        [1.0, 0.177827939, 0.0316227786, 0.00421755994, 0.000500000024, 4.44569851e-05, 7.90569356e-06, 1.40585337e-06],
        rel=1e-6,
    )


def test_yarn_without_truncation_has_another_ramp() -> None:
    ours, _ = inverse_frequencies(read_rope("yarn", 1e6, 16, 131072, "type", **YARN, truncate=False), 1)
    assert ours[3:5].tolist() == pytest.approx([0.00551727042, 0.000607408001], rel=1e-6)


@pytest.mark.parametrize("missing", ["original_max_position_embeddings", "factor"])
def test_yarn_without_a_key_it_needs_is_refused_by_name(missing: str) -> None:
    extra = {key: value for key, value in YARN.items() if key != missing}
    with pytest.raises(UnsupportedModel, match=missing):
        read_rope("yarn", 1e6, 16, 131072, "rope_type", **extra)


@pytest.mark.parametrize("missing", list(LLAMA3))
def test_llama3_without_a_key_it_needs_is_refused_by_name(missing: str) -> None:
    extra = {key: value for key, value in LLAMA3.items() if key != missing}
    with pytest.raises(UnsupportedModel, match=missing):
        read_rope("llama3", 500000.0, 16, 131072, "rope_type", **extra)


@pytest.mark.parametrize("head_dim", [8, 64, 128])
@pytest.mark.parametrize(
    ("kind", "max_position", "seq_len", "extra"),
    [
        ("linear", 4096, 100, {"factor": 3.5}),
        ("dynamic", 2048, 2047, {"factor": 4.0}),
        ("dynamic", 2048, 2049, {"factor": 4.0}),
        ("dynamic", 2048, 7777, {"factor": 1.5}),
        ("llama3", 131072, 1, LLAMA3),
        ("llama3", 131072, 1, {**LLAMA3, "factor": 32.0, "high_freq_factor": 2.5}),
        ("yarn", 131072, 1, YARN),
        ("yarn", 131072, 1, {**YARN, "factor": None}),
        ("yarn", 131072, 1, {**YARN, "beta_fast": 24, "beta_slow": 2, "truncate": False}),
        ("yarn", 16384, 1, {"factor": 1.0, "original_max_position_embeddings": 16384}),
        ("yarn", 131072, 1, {**YARN, "mscale": 1.3, "mscale_all_dim": 0.6}),
        ("longrope", 131072, 4096, {"original_max_position_embeddings": 4096}),
        ("longrope", 131072, 4097, {"original_max_position_embeddings": 4096}),
        ("longrope", 131072, 4097, {"original_max_position_embeddings": 4096, "factor": 2}),
        ("longrope", 4096, 4097, {"original_max_position_embeddings": 4096}),
    ],
)
def test_every_kind_equals_transformers(
    kind: str, max_position: int, seq_len: int, extra: dict[str, Any], head_dim: int
) -> None:
    if kind == "longrope":
        extra = {
            **extra,
            "short_factor": [1.0 + 0.01 * index for index in range(head_dim // 2)],
            "long_factor": [1.0 + 0.7 * index for index in range(head_dim // 2)],
        }
    theirs_config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=max_position,
        rope_parameters={"rope_type": kind, "rope_theta": 50000.0, **extra},
    )
    theirs, theirs_factor = ROPE_INIT_FUNCTIONS[kind](theirs_config, torch.device("cpu"), seq_len=seq_len)
    rope = read_rope(kind, 50000.0, head_dim, max_position, "rope_parameters", **extra)
    ours, ours_factor = inverse_frequencies(rope, seq_len)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    assert ours_factor == pytest.approx(theirs_factor, abs=1e-6)


def test_linear_halves_the_positions() -> None:
    plain, halved = RopeConfig(head_dim=8), RopeConfig(head_dim=8, kind="linear", factor=2.0)
    positions = torch.tensor([0, 3, 50, 1001])
    for ours, theirs in zip(
        Rotary(halved, 2048).cos_sin(2 * positions), Rotary(plain, 2048).cos_sin(positions), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_cos_and_sin_are_fp32_functions_of_the_position_alone() -> None:
    rotary = Rotary(RopeConfig(head_dim=8), seq_len=64)
    far = 1_000_000  # past any table that seq_len could have sized
    cos, sin = rotary.cos_sin(torch.tensor([5, far, 5], dtype=torch.int32))
    assert cos.dtype == sin.dtype == torch.float32
    assert cos.shape == sin.shape == (3, 4)
    assert torch.equal(cos[0], cos[2])
    assert cos[0].tolist() == pytest.approx([math.cos(5 * 10**-i) for i in range(4)], abs=1e-6)
    assert sin[1, 0].item() == pytest.approx(math.sin(far), abs=1e-6)


def test_the_attention_factor_scales_cos_and_sin() -> None:
    rope = read_rope("yarn", 1e6, 16, 131072, "type", **YARN, attention_factor=1.25)
    cos, sin = Rotary(rope, 10).cos_sin(torch.tensor([0, 7]))
    assert cos[0].tolist() == [1.25] * 8
    assert (cos**2 + sin**2).flatten().tolist() == pytest.approx([1.25**2] * 16, rel=1e-6)


def test_key_tells_whether_two_runs_rotate_alike() -> None:
    dynamic = RopeConfig(head_dim=8, kind="dynamic", factor=2.0, max_position_embeddings=64)
    assert Rotary(dynamic, 10).key == Rotary(dynamic, 64).key
    assert Rotary(dynamic, 65).key != Rotary(dynamic, 64).key
    assert Rotary(dynamic, 66).key != Rotary(dynamic, 65).key
    longrope = read_rope("longrope", 1e4, 8, 4096, "type", **LONGROPE)
    assert Rotary(longrope, 1).key == Rotary(longrope, 1024).key
    assert Rotary(longrope, 1024).key != Rotary(longrope, 1025).key == Rotary(longrope, 4096).key
    assert hash(Rotary(longrope, 1).key) == hash(Rotary(longrope, 2).key)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rotation_is_a_complex_product_of_the_two_halves(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, 8, generator=generator).to(dtype)
    cos, sin = Rotary(RopeConfig(head_dim=8), 100).cos_sin(torch.tensor([0, 1, 2, 40, 99]))
    turned = torch.complex(x[..., :4].double(), x[..., 4:].double()) * torch.complex(cos.double(), sin.double())
    expected = torch.cat((turned.real, turned.imag), dim=-1).to(dtype)
    store = torch.full((3, 2, 5, 10), float("nan"), dtype=dtype)
    view = store[:, 1, :, 1:9]  # strided as a cache's rows are
    rotate_into(view, x, cos, sin)
    torch.testing.assert_close(view, expected)
    in_place = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert apply_rotary_(in_place, cos, sin) is in_place
    assert torch.equal(in_place, view)


def test_rope_that_makes_no_sense_is_refused() -> None:
    for extra, named in [
        ({"head_dim": 7}, "head_dim"),
        ({"head_dim": 8, "kind": "ntk"}, "ntk"),
        ({"head_dim": 8, "kind": "linear", "factor": 0.5}, "factor"),
        ({"head_dim": 8, "kind": "yarn", "factor": 2.0}, "original_max_position_embeddings"),
        ({"head_dim": 2, "kind": "dynamic", "factor": 2.0}, "head_dim"),
    ]:
        with pytest.raises(UnsupportedModel, match=named):
            RopeConfig(**extra)
