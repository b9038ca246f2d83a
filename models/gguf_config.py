"""GGUF metadata to a config.json in Hugging Face's spelling."""

from __future__ import annotations

from typing import Any

from ..errors import UnsupportedModel, WeightsError
from ..ranges import MOST, Range, shown
from .gguf_file import GgufFile
from .gguf_rope import rope_scaling

NUMBER = Range(-MOST, MOST, float)
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
}
# Metadata that changes the arithmetic in ways the supported architectures do not know: key -> value without effect.
_NO_EFFECT = {
    "expert_count": 0,
    "logit_scale": 1.0,
    "residual_scale": 1.0,
    "embedding_scale": 1.0,
    "attention.scale": 0.0,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attention.temperature_scale": 0.0,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "attention.causal": True,
}


def convert_config(file: GgufFile, dtype: str) -> dict[str, Any]:
    """The config of a Llama, Mistral, Qwen2, Qwen3 or Gemma GGUF, `dtype` being what the weights are stored in.

    Raises UnsupportedModel naming the metadata key and value that the engine does not have, WeightsError for a key that
    is missing.
    """
    architecture = file.architecture
    if architecture not in ("llama", "qwen2", "qwen3", "gemma"):
        raise UnsupportedModel(
            f"{file.path}: general.architecture = {architecture!r} is not supported (llama, qwen2, qwen3, gemma are)"
        )
    for key, harmless in _NO_EFFECT.items():
        value = file.get(f"{{arch}}.{key}", harmless)
        if value != harmless:
            raise UnsupportedModel(f"{file.path}: {architecture}.{key} = {value!r} is not supported")

    hidden = _integer(file, "embedding_length")
    heads = _integer(file, "attention.head_count")
    if "token_embd.weight" not in file.tensors:
        raise WeightsError(f"{file.path}: no tensor token_embd.weight: a vocabulary-only file has no model to import")
    head_dim = _integer(file, "attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        value = _integer(file, key, head_dim)
        if value != head_dim:
            raise UnsupportedModel(f"{file.path}: {architecture}.{key} = {value} with a head size of {head_dim}")

    q_bias, o_bias = "blk.0.attn_q.bias" in file.tensors, "blk.0.attn_output.bias" in file.tensors
    window = _integer(file, "attention.sliding_window", 0)
    model_type = architecture
    if architecture == "llama":
        if window:
            model_type = "mistral"
        elif q_bias and not o_bias:
            model_type = "qwen2"  # the same arithmetic as Llama's, with biases on q, k and v alone
    if window and model_type != "mistral":
        raise UnsupportedModel(f"{file.path}: {architecture}.attention.sliding_window = {window} is not supported")

    config: dict[str, Any] = {
        "architectures": [_CLASSES[model_type]],
        "model_type": model_type,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": _integer(file, "feed_forward_length"),
        "num_hidden_layers": _integer(file, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _integer(file, "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "gelu_pytorch_tanh" if architecture == "gemma" else "silu",
        "rms_norm_eps": round_float32(_number(file, "attention.layer_norm_rms_epsilon", None)),
        "max_position_embeddings": _integer(file, "context_length"),
        "rope_theta": round_float32(_number(file, "rope.freq_base", 10000.0)),
        "rope_scaling": rope_scaling(file, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "torch_dtype": dtype,
    }
    if model_type == "mistral":
        config["sliding_window"] = window
    if model_type in ("qwen2", "qwen3"):
        config["use_sliding_window"] = False
    if model_type in ("llama", "qwen3"):
        config["attention_bias"] = o_bias
    if model_type == "llama":
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in file.tensors
    if architecture == "gemma":
        config["hidden_activation"] = config["hidden_act"]
    return config


def round_float32(value: float) -> float:
    """The shortest decimal that is this fp32 value: 1e-05 and not 9.999999747378752e-06."""
    import numpy as np

    return float(str(np.float32(value)))


def _number(file: GgufFile, key: str, default: float | None) -> float:
    value = file.get(f"{{arch}}.{key}", default)
    if value is None:
        raise WeightsError(f"{file.path}: metadata {file.architecture}.{key} is missing")
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise UnsupportedModel(f"{file.path}: {file.architecture}.{key} differs from layer to layer")
        value = value[0]
    if not NUMBER.has(value):
        raise WeightsError(f"{file.path}: metadata {file.architecture}.{key} = {shown(value)} is not {NUMBER.wanted()}")
    return float(value)


def _integer(file: GgufFile, key: str, default: int | None = None) -> int:
    value = _number(file, key, default)
    if not value.is_integer() or value < (0 if default is not None else 1):
        raise WeightsError(f"{file.path}: metadata {file.architecture}.{key} = {value!r} is not a count")
    return int(value)
