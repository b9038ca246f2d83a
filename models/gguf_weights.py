"""GGUF tensors to a safetensors file in Hugging Face names and layout, one tensor in memory at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import OptionError, UnsupportedModel, WeightsError
from .gguf_file import GgufFile, GgufTensor
from .progress import OnProgress

_TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_PER_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_READ_AS_CONFIG = ("rope_freqs.weight",)  # becomes rope_scaling
DTYPES = {"float32": ("F32", torch.float32), "bfloat16": ("BF16", torch.bfloat16), "float16": ("F16", torch.float16)}


def check_dtype(dtype: str) -> None:
    """Raise OptionError for a storage type that is not one of DTYPES."""
    if dtype not in DTYPES:
        raise OptionError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")


def parameter_name(file: GgufFile, tensor_name: str, num_layers: int) -> str | None:
    """The Hugging Face name of a GGUF tensor, None for one that is read as configuration.

    Raises UnsupportedModel for a tensor that no supported architecture has: dropping it would change the model.
    """
    if tensor_name in _READ_AS_CONFIG:
        return None
    if tensor_name in _TOP_LEVEL:
        return _TOP_LEVEL[tensor_name]
    match = _LAYER_NAME.fullmatch(tensor_name)
    if match and match[2] in _PER_LAYER and int(match[1]) < num_layers:
        return f"model.layers.{match[1]}.{_PER_LAYER[match[2]]}.{match[3]}"
    raise UnsupportedModel(f"{file.path}: tensor {tensor_name} has no place in a {file.architecture} model")


def undo_permutation(values: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows of q or k from llama.cpp's order (rotated pairs adjacent) to the half-split one; `heads` of that tensor.

    The inverse of `LlamaModel.permute` in llama.cpp's convert_hf_to_gguf.py.
    """
    half = values.shape[0] // heads // 2
    return values.reshape(heads, half, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def write_weights(
    file: GgufFile, target: Path, config: dict[str, Any], dtype: str, on_progress: OnProgress | None
) -> None:
    """Write every tensor of `file` into the safetensors file `target`, in `dtype`.

    `config` (Hugging Face keys) says the head counts and layers. Raises WeightsError for a tensor of the wrong shape or
    a missing one, UnsupportedModel for one that the architecture does not have.
    """
    check_dtype(dtype)
    code, torch_dtype = DTYPES[dtype]
    width = torch.empty(0, dtype=torch_dtype).element_size()
    expected = expected_shapes(config)
    sources: dict[str, GgufTensor] = {}
    for name, tensor in file.tensors.items():
        target_name = parameter_name(file, name, config["num_hidden_layers"])
        if target_name is None:
            continue
        shape = expected.get(target_name)
        if shape is None:
            raise UnsupportedModel(f"{file.path}: tensor {name} has no place in a {file.architecture} model")
        if tensor.shape != shape:
            raise WeightsError(f"{file.path}: tensor {name} has shape {tensor.shape}, the metadata asks for {shape}")
        sources[target_name] = tensor
    if missing := sorted(expected.keys() - sources.keys()):
        raise WeightsError(f"{file.path}: no tensor for {missing[0]} ({len(missing)} missing in all)")

    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    total = 0
    for target_name, tensor in sources.items():
        nbytes = int(np.prod(tensor.shape)) * width
        header[target_name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [total, total + nbytes]}
        total += nbytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # the format asks for aligned data
    done = 0
    with target.open("wb") as out:
        out.write(len(encoded).to_bytes(8, "little") + encoded)
        for target_name, tensor in sources.items():
            for values in _in_our_layout(file, target_name, tensor, config):
                stored = torch.from_numpy(values).to(torch_dtype).contiguous()
                if not bool(torch.isfinite(stored).all()):
                    raise WeightsError(
                        f"{file.path}: tensor {tensor.name} has values that are not finite in {dtype}; "
                        "import it with another dtype, or download the file again"
                    )
                done += out.write(stored.view(torch.uint8).reshape(-1).numpy().data)
                if on_progress is not None:
                    on_progress("import", done, total)


def expected_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every parameter that a config (Hugging Face keys) asks for, with its shape; a tied head is not among them."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config["head_dim"]
    q_rows, kv_rows = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    attention_bias = config.get("attention_bias", False)
    qkv_bias = attention_bias or config["model_type"] == "qwen2"
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        rows = {"q": (q_rows, hidden), "k": (kv_rows, hidden), "v": (kv_rows, hidden), "o": (hidden, q_rows)}
        for kind, shape in rows.items():
            shapes[f"{layer}self_attn.{kind}_proj.weight"] = shape
            if attention_bias if kind == "o" else qkv_bias:
                shapes[f"{layer}self_attn.{kind}_proj.bias"] = shape[:1]
        for kind, shape in {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}.items():
            shapes[f"{layer}mlp.{kind}_proj.weight"] = shape
            if config.get("mlp_bias", False):
                shapes[f"{layer}mlp.{kind}_proj.bias"] = shape[:1]
        if config["model_type"] == "qwen3":
            shapes[f"{layer}self_attn.q_norm.weight"] = shapes[f"{layer}self_attn.k_norm.weight"] = (head_dim,)
        shapes[f"{layer}input_layernorm.weight"] = shapes[f"{layer}post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def _in_our_layout(
    file: GgufFile, target_name: str, tensor: GgufTensor, config: dict[str, Any]
) -> Iterator[np.ndarray[Any, Any]]:
    """The tensor's values in fp32, with llama.cpp's conversions undone, in consecutive pieces."""
    if file.architecture == "llama" and re.search(r"self_attn\.[qk]_proj", target_name):
        heads = config["num_attention_heads" if ".q_proj." in target_name else "num_key_value_heads"]
        yield undo_permutation(tensor.dequantised(), heads)
        return
    for values in tensor.pieces():
        # llama.cpp stores Gemma's norms as the factor 1 + weight
        yield values - np.float32(1) if file.architecture == "gemma" and target_name.endswith("norm.weight") else values
