"""Where the CPU has matrix instructions for bf16, narrow weights are multiplied in bf16 while a prompt is read."""

from __future__ import annotations

import pytest
import torch
from cake_infer.engine.sequence import Sequence
from cake_infer.models.config import read_config
from cake_infer.models.packed import as_quantised
from cake_infer.models.weights import load_decoder


@pytest.fixture
def with_amx(plain_products: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on such a CPU; the products themselves run anywhere."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True, raising=False)


def logits(runner, ids):
    sequence = Sequence()
    return runner.feed(sequence, ids, runner.prepare(sequence, len(ids), 1))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"model_type": "qwen2"},
        {"model_type": "qwen3"},
        {"model_type": "gemma"},
        {"model_type": "mistral", "sliding_window": 30},
        {"attention_bias": True, "mlp_bias": True},
    ],
)
def test_logits_are_those_of_fp32_products_up_to_bf16_rounding(
    with_amx, tmp_path, write_checkpoint, make_runner, random_ids, options, monkeypatch
):
    folder = write_checkpoint(tmp_path / "model", dtype=torch.bfloat16, **options)
    ids = random_ids(150)
    narrow = make_runner(folder, budget=60, window=8)
    assert narrow.decoder.product_dtype == torch.bfloat16
    assert narrow.layout.staging_dtype == torch.bfloat16
    found = logits(narrow, ids)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False, raising=False)
    exact = make_runner(folder, budget=60, window=8)
    assert exact.decoder.product_dtype == torch.float32
    wanted = logits(exact, ids)
    error = (found - wanted).norm() / wanted.norm()
    assert 0 < error < 0.05
    assert (narrow.tenancy.arena.length.sum() == exact.tenancy.arena.length.sum()).all()


def test_stored_bf16_layers_are_used_as_they_are_and_int8_ones_are_widened_to_bf16(
    with_amx, tmp_path, write_checkpoint
):
    folder = write_checkpoint(tmp_path / "model", dtype=torch.bfloat16)
    decoder = load_decoder(folder, read_config(folder))
    assert decoder.for_products(1) is decoder.layers[1]
    packed = as_quantised(decoder, "int8")
    wide = {name: tensor.bfloat16() for name, tensor in packed.widened(1).named_tensors()}
    layer = packed.for_products(1)
    assert layer.input_layernorm is packed.layers[1].input_layernorm
    for name in ("q_proj", "o_proj", "down_proj"):
        assert torch.equal(getattr(layer, name), wide[name])
    assert torch.equal(packed.widened(1).q_proj.bfloat16(), wide["q_proj"]), "one buffer serves both"


def test_fp32_weights_are_multiplied_in_fp32(with_amx, tmp_path, write_checkpoint):
    folder = write_checkpoint(tmp_path / "model", dtype=torch.bfloat16)
    config = read_config(folder)
    assert load_decoder(folder, config, dtype="float32").product_dtype == torch.float32
    assert load_decoder(folder, config, dtype="float16").product_dtype == torch.float32
