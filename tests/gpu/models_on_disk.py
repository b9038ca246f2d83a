"""Small models as folders that the engine loads: random ones, and checkpoints of llama2.c as they were published.

A checkpoint of llama2.c (Karpathy, 2023) is a folder with one .bin of weights (7 int32: width, MLP, layers, heads, KV
heads, vocabulary, context; then fp32) and a tok*.bin of pieces. It rotates neighbouring numbers of a head, where names
of Hugging Face's mean its halves: rows of q and k are put in that order.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from shapes import TINY
from torch import Tensor

SPECIAL = ("<unk>", "<s>", "</s>")
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
LETTERS = ("▁", *"abcdefghijklmnopqrstuvwxyz", "▁t", "▁th", "▁the", "▁a", "er", "in", "an")


def random_folder(folder: Path) -> Path:
    """A model with random weights and a tokenizer of bytes, letters and a few words."""
    from cake_infer.models.config import ModelConfig
    from cake_infer.models.parameters import parameter_shapes

    pieces = [*SPECIAL, *BYTES, *LETTERS]
    config = {**TINY, "hidden_size": 64, "head_dim": 32, "vocab_size": len(pieces), "num_hidden_layers": 2}
    config = {key: value for key, value in config.items() if value is not None}
    generator, tensors = torch.Generator().manual_seed(1), {}
    for name, shape in parameter_shapes(ModelConfig.from_dict(config, where="check")).items():
        if len(shape) == 1:
            tensors[name] = torch.ones(shape)
        else:  # wide enough that attention is far from uniform, and that a reply is not one token over and over
            spread = 1.0 if "embed" in name else 2.0 * shape[1] ** -0.5
            tensors[name] = torch.randn(shape, generator=generator) * spread
    return _written(folder, config, tensors, pieces)


def llama2c_folder(source: Path, folder: Path) -> Path:
    """A checkpoint of llama2.c as a folder that the engine loads."""
    (tokens,) = source.glob("tok*.bin")
    weights = min((path for path in source.glob("*.bin") if path != tokens and "q8" not in path.name), key=str)
    data = weights.read_bytes()
    width, mlp, layers, heads, kv_heads, vocab, context = struct.unpack("7i", data[:28])
    assert vocab > 0, "a head of its own is not read here"
    numbers, at, dim = np.frombuffer(data, np.float32, offset=28), 0, width // heads

    def take(*shape: int) -> Tensor:
        nonlocal at
        size = int(np.prod(shape))
        part = torch.from_numpy(numbers[at : at + size].reshape(shape).copy())
        at += size
        return part

    embedding = take(vocab, width)
    names = {
        "input_layernorm": (width,),
        "self_attn.q_proj": (heads * dim, width),
        "self_attn.k_proj": (kv_heads * dim, width),
        "self_attn.v_proj": (kv_heads * dim, width),
        "self_attn.o_proj": (width, width),
        "post_attention_layernorm": (width,),
        "mlp.gate_proj": (mlp, width),
        "mlp.down_proj": (width, mlp),
        "mlp.up_proj": (mlp, width),
    }
    tensors = {"model.embed_tokens.weight": embedding}
    for name, shape in names.items():
        for layer, part in enumerate(take(layers, *shape)):
            whole = part
            if name.endswith(("q_proj", "k_proj")):
                whole = part.view(-1, dim // 2, 2, width).transpose(1, 2).reshape(shape)
            tensors[f"model.layers.{layer}.{name}.weight"] = whole.contiguous()
    tensors["model.norm.weight"] = take(width)
    config = {
        **{key: value for key, value in TINY.items() if value is not None},
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "max_position_embeddings": context,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    }
    return _written(folder, config, tensors, _pieces(tokens.read_bytes()))


def _pieces(data: bytes) -> list[str]:
    """The tokenizer's pieces by id: after a number each is a score, a length and so many bytes."""
    at, found = 4, []
    while at < len(data):
        _, size = struct.unpack("fi", data[at : at + 8])
        found.append(data[at + 8 : at + 8 + size].decode().replace(" ", "▁"))
        at += 8 + size
    return [*SPECIAL, *found[len(SPECIAL) :]]


def _written(folder: Path, config: Mapping[str, Any], tensors: dict[str, Tensor], pieces: Sequence[str]) -> Path:
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **config}))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    vocab = {piece: index for index, piece in enumerate(pieces)}
    # a piece is better the lower its id; every way to make it of two others counts
    merges = [
        [piece[:cut], piece[cut:]]
        for piece in pieces[len(SPECIAL) + len(BYTES) :]
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab
    ]
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    decoders = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    normalizers = [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    ]
    start = {"SpecialToken": {"id": SPECIAL[1], "type_id": 0}}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": index, "content": name, **special} for index, name in enumerate(SPECIAL)],
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [start, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [start, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {SPECIAL[1]: {"id": SPECIAL[1], "ids": [1], "tokens": [SPECIAL[1]]}},
        },
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "unk_token": SPECIAL[0],
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": vocab,
            "merges": merges,
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    about = {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2], "unk_token": SPECIAL[0], "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder
