"""Every family, option and rope kind gives the logits of transformers: two random layers, fp32, through a folder."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from cake_infer.models.config import read_config
from cake_infer.models.decoder import Decoder
from cake_infer.models.rope import Rotary
from cake_infer.models.weights import load_decoder
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

PROMPT = 50
SIZE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
LONG = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 32,
    "short_factor": [1.0, 1.05, 1.2, 1.5],
    "long_factor": [1.0, 1.5, 3.0, 6.0],
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0}
SLIDE_AFTER_ONE = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
SLIDE_BY_TYPE = {
    "use_sliding_window": True,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}

CASES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "llama, heads not grouped": (LlamaConfig, {"num_key_value_heads": 4}),
    "llama, one KV head": (LlamaConfig, {"num_key_value_heads": 1}),
    "llama, tied": (LlamaConfig, {"tie_word_embeddings": True}),
    "llama, attention bias": (LlamaConfig, {"attention_bias": True}),
    "llama, MLP bias": (LlamaConfig, {"mlp_bias": True}),
    "llama, wide heads": (LlamaConfig, {"head_dim": 16}),
    "llama, gelu": (LlamaConfig, {"hidden_act": "gelu"}),
    "llama, tanh gelu": (LlamaConfig, {"hidden_act": "gelu_pytorch_tanh"}),
    "llama, theta": (LlamaConfig, {"rope": {"rope_type": "default", "rope_theta": 500000.0}}),
    "llama, linear": (LlamaConfig, {"rope": {"rope_type": "linear", "factor": 4.0}}),
    "llama, dynamic within": (LlamaConfig, {"rope": {"rope_type": "dynamic", "factor": 4.0}}),
    "llama, dynamic at the border": (
        LlamaConfig,
        {"max_position_embeddings": PROMPT, "rope": {"rope_type": "dynamic", "factor": 4.0}},
    ),
    "llama, dynamic past the border": (
        LlamaConfig,
        {"max_position_embeddings": PROMPT - 1, "rope": {"rope_type": "dynamic", "factor": 4.0}},
    ),
    "llama, dynamic far past": (
        LlamaConfig,
        {"max_position_embeddings": 16, "rope": {"rope_type": "dynamic", "factor": 4.0}},
    ),
    "llama, llama3": (LlamaConfig, {"rope": {**LLAMA3, "rope_theta": 50.0}}),
    "llama, yarn": (LlamaConfig, {"rope": YARN}),
    "llama, yarn attention factor": (LlamaConfig, {"rope": {**YARN, "attention_factor": 1.7}}),
    "llama, yarn mscale": (LlamaConfig, {"rope": {**YARN, "mscale": 2.0, "mscale_all_dim": 0.5, "truncate": False}}),
    "llama, longrope past the border": (LlamaConfig, {"rope": LONG}),
    "llama, longrope just past": (
        LlamaConfig,
        {"rope": {**LONG, "original_max_position_embeddings": PROMPT - 1, "factor": 3.0}},
    ),
    "llama, longrope at the border": (LlamaConfig, {"rope": {**LONG, "original_max_position_embeddings": PROMPT}}),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "mistral, sliding": (MistralConfig, {"sliding_window": 8}),
    "mistral, wide heads": (MistralConfig, {"sliding_window": None, "head_dim": 16}),
    "mistral, yarn": (MistralConfig, {"sliding_window": None, "rope": YARN}),
    "qwen2": (Qwen2Config, {}),
    "qwen2, tied": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2, window not used": (Qwen2Config, {"sliding_window": 8, "max_window_layers": 0}),
    "qwen2, later layers slide": (Qwen2Config, SLIDE_AFTER_ONE),
    "qwen2, layer types": (Qwen2Config, SLIDE_BY_TYPE),
    "qwen2, yarn": (Qwen2Config, {"rope": YARN}),
    "qwen3": (Qwen3Config, {"head_dim": 8}),
    "qwen3, wide heads, tied": (Qwen3Config, {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3, attention bias": (Qwen3Config, {"head_dim": 8, "attention_bias": True}),
    "qwen3, later layers slide": (Qwen3Config, {"head_dim": 8, **SLIDE_AFTER_ONE}),
    "qwen3, layer types": (Qwen3Config, {"head_dim": 8, **SLIDE_BY_TYPE}),
    "qwen3, yarn": (Qwen3Config, {"head_dim": 8, "rope": YARN}),
    "gemma": (GemmaConfig, {"head_dim": 16}),
    "gemma, one KV head": (GemmaConfig, {"head_dim": 8, "num_key_value_heads": 1}),
    "gemma, legacy gelu": (GemmaConfig, {"head_dim": 16, "hidden_act": "gelu"}),
    "gemma, untied with bias": (GemmaConfig, {"head_dim": 8, "tie_word_embeddings": False, "attention_bias": True}),
    "gemma, linear": (GemmaConfig, {"head_dim": 16, "rope": {"rope_type": "linear", "factor": 2.0}}),
}


def build(config_class: type[PreTrainedConfig], options: dict[str, Any]) -> Any:
    """A random transformers model in which every parameter matters: no zero bias, no norm of one."""
    options = dict(options)
    rope = {"rope_theta": 10000.0, **options.pop("rope", {"rope_type": "default"})}
    config = config_class(**{**SIZE, **options, "rope_parameters": rope})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.copy_(0.2 * noise + (0.0 if config_class is GemmaConfig else 1.0))
            elif name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            else:
                parameter.copy_(noise * (1.0 if "embed" in name else 1.5 * parameter.shape[1] ** -0.5))
    return model


def dense_logits(decoder: Decoder, ids: torch.Tensor) -> torch.Tensor:
    """A plain forward pass, fp32 [n, vocab]: all keys, softmax over an explicit mask."""
    config, length = decoder.config, ids.numel()
    positions = torch.arange(length)
    cos, sin = Rotary(config.rope, length).cos_sin(positions)
    group = config.num_heads // config.num_kv_heads
    hidden = decoder.embed(ids)
    for index, window in enumerate(config.sliding_windows):
        layer = decoder.widened(index)
        x = decoder.attention_norm(layer, hidden)
        queries = decoder.queries(layer, x, cos, sin)
        keys, values = torch.empty(2, config.num_kv_heads, length, config.head_dim)
        decoder.keys_values(layer, x, cos, sin, keys, values)
        distance = positions[:, None] - positions
        visible = (distance >= 0) & (distance < (window or length))
        scores = queries @ keys.repeat_interleave(group, 0).mT * decoder.scale
        attention = scores.masked_fill(~visible, float("-inf")).softmax(-1) @ values.repeat_interleave(group, 0)
        hidden = hidden + decoder.attention_output(layer, attention)
        hidden = hidden + decoder.mlp(layer, decoder.mlp_norm(layer, hidden))
    return decoder.logits(hidden)


def prompt() -> torch.Tensor:
    return torch.randint(SIZE["vocab_size"], (PROMPT,), generator=torch.Generator().manual_seed(1))


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert theirs.std() > 0.3  # the comparison means something
    assert (ours - theirs).abs().max() <= 1e-4 * max(1.0, float(theirs.abs().max()) / 10)


def old_spelling(config: dict[str, Any]) -> dict[str, Any]:
    """The config as a transformers of two years ago would have written it."""
    config = {key: value for key, value in config.items() if key != "layer_types" or "sliding_window" not in config}
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "torch_dtype": config.pop("dtype"), "rope_scaling": None}
    if rope["rope_type"] != "default":
        rope["type"] = rope.pop("rope_type")
        config["rope_scaling"] = rope
    if config["num_key_value_heads"] == config["num_attention_heads"]:
        del config["num_key_value_heads"]
    return config


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, logger="transformers")


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    model = build(*CASES[case])
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        theirs = model(prompt()[None], use_cache=False).logits[0]
    config = read_config(tmp_path)
    assert_close(dense_logits(load_decoder(tmp_path, config), prompt()), theirs)

    # The same folder in the spelling of its day reads as the same model.
    path = tmp_path / "config.json"
    written = json.loads(path.read_text())
    if "layer types" not in case:
        path.write_text(json.dumps(old_spelling(written)))
        assert read_config(tmp_path) == config


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["llama", "mistral, sliding", "qwen2, tied", "qwen3", "gemma"])
def test_a_half_checkpoint_computes_in_fp32(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    build(*CASES[case]).to(dtype).save_pretrained(tmp_path)
    # Loaded anew: a model that was half once has rounded rope frequencies for good.
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        theirs = model(prompt()[None], use_cache=False).logits[0]
    decoder = load_decoder(tmp_path, read_config(tmp_path))
    assert decoder.dtype == dtype
    assert_close(dense_logits(decoder, prompt()), theirs)


def test_fp32_norms_among_bf16_weights_are_used_as_they_are(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = build(*CASES["llama"])
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    halved = {name: tensor if "norm" in name else tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(halved, tmp_path / "model.safetensors")
    model.load_state_dict({name: tensor.float() for name, tensor in halved.items()})
    with torch.no_grad():
        theirs = model(prompt()[None], use_cache=False).logits[0]
    assert_close(dense_logits(load_decoder(tmp_path, read_config(tmp_path)), prompt()), theirs)


def test_qwen_weights_under_a_llama_config_keep_their_biases(tmp_path: Path) -> None:
    model = build(*CASES["qwen2"])
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "attention_bias": True}
    config = {key: value for key, value in config.items() if "window" not in key and key != "layer_types"}
    path.write_text(json.dumps(config))
    with torch.no_grad():
        theirs = model(prompt()[None], use_cache=False).logits[0]
    assert_close(dense_logits(load_decoder(tmp_path, read_config(tmp_path)), prompt()), theirs)
