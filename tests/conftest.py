"""Fixtures that several test folders share (test files cannot import each other)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import pytest

# Where each core has its process of tests, threads would wait for each other. Torch looks once, when it is imported.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

# Triton looks at it once, when it is imported: kernels then run on a CPU, in an interpreter.
os.environ.setdefault("TRITON_INTERPRET", "1")

FAMILY_KEYS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"use_sliding_window": False, "attention_bias": False},
    "gemma": {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
}


def _checkpoint_config(overrides: dict[str, Any]) -> dict[str, Any]:
    model_type = overrides.get("model_type", "llama")
    names = {"qwen2": "Qwen2", "qwen3": "Qwen3"}
    return {
        "architectures": [f"{names.get(model_type, str(model_type).capitalize())}ForCausalLM"],
        "model_type": model_type,
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
        **FAMILY_KEYS.get(model_type, {}),
        **overrides,
    }


def _checkpoint_tensors(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Random fp32 tensors under their Hugging Face names; wide enough that attention is far from uniform."""
    generator = torch.Generator().manual_seed(seed)
    family = config["model_type"]
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    qkv_bias = family == "qwen2" or bool(config.get("attention_bias"))
    o_bias = family != "qwen2" and bool(config.get("attention_bias"))
    mlp_bias = bool(config.get("mlp_bias"))

    def normal(*shape: int, std: float) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * std

    def norm(size: int) -> torch.Tensor:
        return normal(size, std=0.1) + (0.0 if family == "gemma" else 1.0)

    tensors = {"model.embed_tokens.weight": normal(config["vocab_size"], hidden, std=1.0)}

    def linear(name: str, rows: int, columns: int, bias: bool, gain: float = 1.0) -> None:
        tensors[f"{name}.weight"] = normal(rows, columns, std=gain * columns**-0.5)
        if bias:
            tensors[f"{name}.bias"] = normal(rows, std=0.2)

    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        tensors[f"{layer}.input_layernorm.weight"] = norm(hidden)
        linear(f"{layer}.self_attn.q_proj", heads * head_dim, hidden, qkv_bias, gain=1.5)
        linear(f"{layer}.self_attn.k_proj", kv_heads * head_dim, hidden, qkv_bias, gain=1.5)
        linear(f"{layer}.self_attn.v_proj", kv_heads * head_dim, hidden, qkv_bias)
        linear(f"{layer}.self_attn.o_proj", hidden, heads * head_dim, o_bias)
        if family == "qwen3":
            tensors[f"{layer}.self_attn.q_norm.weight"] = norm(head_dim)
            tensors[f"{layer}.self_attn.k_norm.weight"] = norm(head_dim)
        tensors[f"{layer}.post_attention_layernorm.weight"] = norm(hidden)
        linear(f"{layer}.mlp.gate_proj", intermediate, hidden, mlp_bias)
        linear(f"{layer}.mlp.up_proj", intermediate, hidden, mlp_bias)
        linear(f"{layer}.mlp.down_proj", hidden, intermediate, mlp_bias)
    tensors["model.norm.weight"] = norm(hidden)
    if not config.get("tie_word_embeddings"):
        tensors["lm_head.weight"] = normal(config["vocab_size"], hidden, std=2.0 * hidden**-0.5)
    return tensors


LONG = ("tests/test_gpu_check.py", "tests/engine/test_harness.py")  # a test of theirs takes as long as a hundred others


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests come first, so that at the end no process waits for another's."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))


@pytest.fixture(autouse=True)
def plain_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill multiplies in fp32 whatever the CPU, so that tests say the same everywhere."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False, raising=False)


@pytest.fixture
def write_checkpoint() -> Callable[..., Path]:
    """A function that writes a tiny random model (config.json and safetensors) and returns its folder.

    `write_checkpoint(folder, *, seed=0, dtype=torch.float32, shards=1, **config_overrides)`: a 3-layer llama with
    hidden size 32, 4 query and 2 KV heads and 320 tokens unless `config_overrides` (keys of config.json, also
    `model_type` qwen2, qwen3, gemma or mistral) say otherwise. An override of `...` leaves its key out. More than one
    shard adds `model.safetensors.index.json`.
    """
    from safetensors.torch import save_file

    def write(
        folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, shards: int = 1, **config_overrides: Any
    ) -> Path:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        dtype_name = str(dtype).removeprefix("torch.")
        config = _checkpoint_config({"torch_dtype": dtype_name, **config_overrides})
        config = {key: value for key, value in config.items() if value is not ...}
        tensors = {name: tensor.to(dtype) for name, tensor in _checkpoint_tensors(config, seed).items()}
        (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        if shards == 1:
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
            return folder
        names = list(tensors)
        weight_map = {}
        for shard in range(shards):
            file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
            part = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
            save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(part, file)
        total = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
        return folder

    return write


_SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")  # ids 0 to 4 in both test tokenizers
_WORDS = (
    "the and of to in is it was for that on he you with his are as at be this have from or one had by not but what all"
)
_PIECES = (
    '▁ e t a o n i h s r l d H w x ! { " ▁t ▁th ▁the ▁a ▁H ▁He ▁Hel ▁Hell ▁Hello ▁w ▁wo ▁wor ▁worl ▁world ▁x {" er'
)


class WriteTokenizer(Protocol):
    """Writes tokenizer.json and tokenizer_config.json into a folder; its ids are exactly `range(vocab_size)`."""

    def __call__(
        self, folder: Path, vocab_size: int = 300, *, chat_template: str | None = None, bos: bool = True
    ) -> None: ...


def _merges(pieces: Iterable[str]) -> list[tuple[str, str]]:
    """Every piece of two or more characters is made by adding its last character to what comes before it."""
    return [(piece[:-1], piece[-1]) for piece in pieces if len(piece) > 1]


def _write_tokenizer(folder: Path, tokenizer: Tokenizer, size: int, chat_template: str | None, bos: bool) -> None:
    assert tokenizer.get_vocab_size() == size
    folder.mkdir(parents=True, exist_ok=True)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, object] = {
        "add_bos_token": bos,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def _add_special_tokens(tokenizer: Tokenizer) -> None:
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in _SPECIAL_TOKENS])


@pytest.fixture(scope="session")
def write_byte_tokenizer() -> WriteTokenizer:
    """Write a byte-level BPE tokenizer (like Llama 3 or Qwen): special ids 0-4, the 256 bytes 5-260, then merges."""

    def write(folder: Path, vocab_size: int = 300, *, chat_template: str | None = None, bos: bool = True) -> None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        words = [f"Ġ{word}" for word in _WORDS.split()]
        pieces = list(dict.fromkeys(word[:end] for word in words for end in range(2, len(word) + 1)))
        pieces = pieces[: vocab_size - len(_SPECIAL_TOKENS) - len(alphabet)]
        vocab = {piece: index for index, piece in enumerate([*_SPECIAL_TOKENS, *alphabet, *pieces])}
        tokenizer = Tokenizer(models.BPE(vocab, _merges(pieces)))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        _add_special_tokens(tokenizer)
        _write_tokenizer(folder, tokenizer, vocab_size, chat_template, bos)

    return write


@pytest.fixture(scope="session")
def write_spm_tokenizer() -> WriteTokenizer:
    """Write a SentencePiece-like tokenizer (like Llama 2): special ids 0-4, byte pieces 5-260, then '▁' pieces."""

    def write(folder: Path, vocab_size: int = 300, *, chat_template: str | None = None, bos: bool = True) -> None:
        byte_pieces = [f"<0x{byte:02X}>" for byte in range(256)]
        pieces = [*_PIECES.split(), *"bcfgkmpuvyzABCDEFGIJKLMN"][: vocab_size - len(_SPECIAL_TOKENS) - 256]
        vocab = {piece: index for index, piece in enumerate([*_SPECIAL_TOKENS, *byte_pieces, *pieces])}
        model = models.BPE(vocab, _merges(pieces), unk_token="<unk>", fuse_unk=True, byte_fallback=True)
        tokenizer = Tokenizer(model)
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        _add_special_tokens(tokenizer)
        _write_tokenizer(folder, tokenizer, vocab_size, chat_template, bos)

    return write


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attn_output",
    **{f"self_attn.{kind}_proj": f"attn_{kind}" for kind in "qkv"},
    **{f"self_attn.{kind}_norm": f"attn_{kind}_norm" for kind in "qk"},
    **{f"mlp.{kind}_proj": f"ffn_{kind}" for kind in ("gate", "up", "down")},
}


def _gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{_GGUF_NAMES[rest]}.{kind}"
    return f"{_GGUF_NAMES[stem]}.{kind}"


def _adjacent_pairs(rows: Any, heads: int) -> Any:
    """Row r and row r + half of a head become neighbours: the order in which llama.cpp rotates."""
    size = rows.shape[0] // heads
    pairs = [(pair, pair + size // 2) for pair in range(size // 2)]
    return rows[[head * size + row for head in range(heads) for pair in pairs for row in pair]]


@pytest.fixture
def write_gguf() -> Callable[..., Path]:
    """A function that writes a checkpoint folder with a byte-level tokenizer as llama.cpp's converter would.

    `write_gguf(path, folder, *, quantisation=None, metadata={}, tensors={})`: `quantisation` ("Q8_0", "Q4_1", "F16")
    applies to matrices; `metadata` and `tensors` (GGUF names) replace or add entries, `...` leaves one out.
    """
    import gguf
    from safetensors.numpy import load_file

    def write(
        path: Path,
        folder: Path,
        *,
        quantisation: str | None = None,
        metadata: dict[str, Any] | None = None,
        tensors: dict[str, Any] | None = None,
    ) -> Path:
        config = json.loads((folder / "config.json").read_text())
        arch = {"mistral": "llama"}.get(config["model_type"], config["model_type"])
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        special = {token["id"] for token in tokenizer["added_tokens"]}
        vocab = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].__getitem__)
        values: dict[str, Any] = {
            f"{arch}.block_count": config["num_hidden_layers"],
            f"{arch}.context_length": config["max_position_embeddings"],
            f"{arch}.embedding_length": config["hidden_size"],
            f"{arch}.feed_forward_length": config["intermediate_size"],
            f"{arch}.attention.head_count": config["num_attention_heads"],
            f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
            f"{arch}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
            f"{arch}.attention.key_length": config["head_dim"],
            f"{arch}.attention.value_length": config["head_dim"],
            f"{arch}.rope.freq_base": float(config["rope_theta"]),
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": vocab,
            "tokenizer.ggml.token_type": [3 if index in special else 1 for index in range(len(vocab))],
            "tokenizer.ggml.merges": [" ".join(merge) for merge in tokenizer["model"]["merges"]],
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            **(metadata or {}),
        }
        writer = gguf.GGUFWriter(path, arch)
        for key, value in values.items():
            if isinstance(value, list):
                writer.add_array(key, value)
            elif value is not ...:
                kinds: dict[type, Any] = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
                kinds.get(type(value), writer.add_string)(key, value)
        arrays = {}
        for name, array in load_file(folder / "model.safetensors").items():
            if arch == "llama" and "q_proj" in name:
                array = _adjacent_pairs(array, config["num_attention_heads"])
            if arch == "llama" and "k_proj" in name:
                array = _adjacent_pairs(array, config["num_key_value_heads"])
            arrays[_gguf_name(name)] = array + 1 if arch == "gemma" and name.endswith("norm.weight") else array
        for name, array in (arrays | (tensors or {})).items():
            if array is ...:
                continue
            kind = gguf.GGMLQuantizationType[quantisation if quantisation and array.ndim > 1 else "F32"]
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


@pytest.fixture
def gguf_source(
    tmp_path: Path, write_checkpoint: Callable[..., Path], write_byte_tokenizer: WriteTokenizer
) -> Callable[..., Path]:
    """A function that writes a checkpoint with a tokenizer for `write_gguf` into `tmp_path / "source"`.

    Its keywords are keys of config.json.
    """

    def make(**overrides: Any) -> Path:
        folder = write_checkpoint(tmp_path / "source", **overrides)
        write_byte_tokenizer(folder, 300, bos=False)
        return folder

    return make
