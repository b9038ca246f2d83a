"""What a model is: one frozen description that the five families and both spellings of config.json are read into."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import ModelNotFound, OptionError, UnsupportedModel
from ..ranges import COUNT, Range, shown
from .config_keys import ConfigKeys, read_json_object
from .rope_config import RopeConfig, parse_scaling, read_rope

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
}
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
# What transformers' config class of each family fills in where the file is silent.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"bos": 1, "eos": (2,), "pad": None, "context": 2048},
    "mistral": {"bos": 1, "eos": (2,), "pad": None, "context": 131072},
    "qwen2": {"bos": None, "eos": (), "pad": None, "context": 32768},
    "qwen3": {"bos": None, "eos": (), "pad": None, "context": 32768, "head_dim": 128},
    "gemma": {"bos": 2, "eos": (1,), "pad": 0, "context": 8192, "head_dim": 256},
}
# more than any model has: what is made for each layer, head or token is made in time
LAYERS, HEADS, WIDTH = Range(1, 4096), Range(1, 65_536), Range(1, 2**24)
# Keys of relatives of these families that change the result; a value that is not neutral is refused by name.
_FOREIGN_KEYS = (
    "attn_logit_softcapping", "final_logit_softcapping", "logit_softcapping", "logits_soft_cap",
    "query_pre_attn_scalar", "attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling",
    "logit_scale", "attention_scale", "attn_scale", "scale_emb", "scale_depth", "dim_model_base", "clip_qkv", "alibi",
    "use_bidirectional_attention", "attention_chunk_size", "attention_sinks", "dual_chunk_attention_config",
    "no_rope_layers", "use_nope", "rope_interleaved", "qk_layernorm", "use_qk_norm", "parallel_attn",
    "use_parallel_residual", "num_local_experts", "num_experts", "n_routed_experts", "moe_intermediate_size",
    "num_nextn_predict_layers", "q_lora_rank", "kv_lora_rank", "cross_attention_layers", "text_config",
    "vision_config",
)  # fmt: skip


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only model. Sizes in elements, lengths in tokens.

    `max_position_embeddings` is the context the model can read, which a scaled rope may put above the figure in the
    file. `sliding_windows` has one entry a layer: None, or the number of keys a query may see, itself included (key j
    is visible to query i if `i - window < j <= i`).
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_act: str
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    sliding_windows: tuple[int | None, ...]
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModel(
                f"num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads {self.num_kv_heads}"
            )
        if len(self.sliding_windows) != self.num_layers:
            raise UnsupportedModel(f"{len(self.sliding_windows)} layer types for {self.num_layers} layers")
        if self.rope.head_dim != self.head_dim:
            raise UnsupportedModel(f"rope is made for head_dim {self.rope.head_dim}, the model has {self.head_dim}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
        """Read a Hugging Face config. `where` begins the message of every error.

        Raises `UnsupportedModel`, naming key and value, for an unknown architecture, rope kind, activation or
        quantisation, a key of another type than it should have, and a key that changes the result in a way that is
        not implemented.
        """
        keys = ConfigKeys(values, where)
        family = _family(keys)
        _refuse_foreign(keys)
        defaults = _DEFAULTS[family]
        hidden_size = keys.integer("hidden_size", None, WIDTH)
        num_layers = keys.integer("num_hidden_layers", None, LAYERS)
        num_heads = keys.integer("num_attention_heads", None, HEADS)
        head_dim = _head_dim(keys, family, hidden_size, num_heads)
        stated = keys.integer("max_position_embeddings", keys.integer("max_sequence_length", defaults["context"]))
        rope = read_rope(keys, head_dim, stated)
        gemma = family == "gemma"
        attention_bias = keys.boolean("attention_bias", False)
        return cls(
            model_type=family,
            vocab_size=keys.integer("vocab_size", None, WIDTH),
            hidden_size=hidden_size,
            intermediate_size=keys.integer("intermediate_size", None, WIDTH),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=keys.integer("num_key_value_heads", num_heads, HEADS),
            head_dim=head_dim,
            hidden_act=_activation(keys, family),
            rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
            max_position_embeddings=rope.context,
            rope=rope,
            sliding_windows=_sliding_windows(keys, family, num_layers),
            norm_offset=1.0 if gemma else 0.0,
            embedding_scale=math.sqrt(hidden_size) if gemma else 1.0,
            attention_bias=family == "qwen2" or attention_bias,  # Qwen2 has them without a key
            output_bias=family != "qwen2" and attention_bias,
            mlp_bias=keys.boolean("mlp_bias", False),
            qk_norm=family == "qwen3",
            tie_word_embeddings=keys.boolean("tie_word_embeddings", gemma),
            bos_token_id=keys.token_id("bos_token_id", None if "bos_token_id" in values else defaults["bos"]),
            eos_token_ids=keys.token_ids("eos_token_id", defaults["eos"]),
            pad_token_id=keys.token_id("pad_token_id", None if "pad_token_id" in values else defaults["pad"]),
            dtype=_dtype(keys),
        )


def read_config(folder: str | Path, scaling: str | None = None) -> ModelConfig:
    """The config of a model folder, with the end tokens of generation_config.json added to its own; or of one file.

    scaling: KIND:FACTOR, see `with_rope_scaling`. Raises `ModelNotFound` without a config.json, `UnsupportedModel` as
    `ModelConfig.from_dict` does, and `OptionError` for a scaling that the model cannot take.
    """
    path = Path(folder) if Path(folder).is_file() else Path(folder) / "config.json"
    if not path.is_file():
        raise ModelNotFound(f"{folder} has no config.json; it is not the folder of a Hugging Face model")
    config = ModelConfig.from_dict(read_json_object(path), where=str(path))
    generation = path.with_name("generation_config.json")
    if generation.is_file():
        more = ConfigKeys(read_json_object(generation), str(generation)).token_ids("eos_token_id")
        config = replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *more))))
    return config if scaling is None else with_rope_scaling(config, scaling)


def context_limit(asked: int | None, config: ModelConfig) -> int:
    """The most tokens of a text. Raises OptionError for more than the model can have."""
    if asked is None:
        return config.max_position_embeddings
    if asked > config.max_position_embeddings:
        raise OptionError(
            f"a context of {asked:,} tokens is more than the model's {config.max_position_embeddings:,}: "
            "stretch it with the option rope_scaling (KIND:FACTOR), or ask for less"
        )
    return asked


def with_rope_scaling(config: ModelConfig, scaling: str) -> ModelConfig:
    """The same model with `KIND:FACTOR` applied to its rope and its context multiplied by the factor.

    A factor alone is enough for linear, dynamic and yarn; a model that comes with a scaled rope keeps it, except that
    the factor of its own dynamic or yarn may be set anew. The length before scaling is the config's
    max_position_embeddings, or its original_max_position_embeddings where yarn already names one. Raises `OptionError`.
    """
    kind, factor = parse_scaling(scaling)
    rope = config.rope
    if rope.kind != "default" and (rope.kind != kind or kind == "linear"):
        raise OptionError(
            f"this model comes with {rope.kind} rope scaling; rope scaling {scaling!r} cannot be put on top of it"
        )
    original = rope.original_max_position_embeddings or rope.max_position_embeddings
    if kind == "linear":  # its context is the figure itself, there is no border in its formula
        scaled = replace(rope, kind=kind, factor=factor)
        scaled = replace(scaled, max_position_embeddings=scaled.stretched(original))
    elif kind == "dynamic":
        scaled = replace(rope, kind=kind, factor=factor)
    else:
        scaled = replace(
            rope,
            kind=kind,
            factor=factor,
            max_position_embeddings=original,
            original_max_position_embeddings=original,
        )
    return replace(config, rope=scaled, max_position_embeddings=scaled.context)


def _family(keys: ConfigKeys) -> str:
    architectures = keys.texts("architectures") if "architectures" in keys else ()
    named = {name.lower(): family for family, name in ARCHITECTURES.items()}
    if "model_type" not in keys and architectures and architectures[0].lower() in named:
        return named[architectures[0].lower()]
    family = keys.text("model_type")
    if family not in ARCHITECTURES:
        raise keys.refused("model_type", f"one of {', '.join(ARCHITECTURES)}")
    if architectures and ARCHITECTURES[family].lower() not in (name.lower() for name in architectures):
        raise keys.refused("architectures", f"[{ARCHITECTURES[family]!r}] for model_type {family}")
    return family


def _refuse_foreign(keys: ConfigKeys) -> None:
    if "quantization_config" in keys:
        value = keys.values["quantization_config"]
        method = value.get("quant_method", "unknown") if isinstance(value, dict) else value
        raise UnsupportedModel(
            f"{keys.where}: quantization_config says the weights are quantised ({shown(method)}), which is not "
            "supported; use the original bf16, fp16 or fp32 checkpoint"
        )
    for key in _FOREIGN_KEYS:
        if keys.values.get(key) not in (None, False, 0, [], {}):
            raise keys.refused(key, "absent (what it changes is not implemented)")


def _head_dim(keys: ConfigKeys, family: str, hidden_size: int, num_heads: int) -> int:
    if "head_dim" in keys:
        return keys.integer("head_dim", None, HEADS)
    default = _DEFAULTS[family].get("head_dim")
    if default is not None and "head_dim" not in keys.values:
        return int(default)
    if hidden_size % num_heads:
        raise UnsupportedModel(
            f"{keys.where}: hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads} "
            "and head_dim is missing"
        )
    return hidden_size // num_heads


def _activation(keys: ConfigKeys, family: str) -> str:
    key, default = "hidden_act", "silu"
    if family == "gemma":
        # Gemma's files say "gelu" and mean the tanh form; later ones spell it out as hidden_activation.
        key = "hidden_activation" if "hidden_activation" in keys else "hidden_act"
        default = "gelu_pytorch_tanh"
    elif "hidden_activation" in keys:
        raise keys.refused("hidden_activation", "absent (this family reads hidden_act)")
    name = keys.text(key, default)
    if name not in _ACTIVATIONS:
        raise keys.refused(key, f"one of {', '.join(_ACTIVATIONS)}")
    return "gelu_tanh" if family == "gemma" and name == "gelu" else _ACTIVATIONS[name]


def _sliding_windows(keys: ConfigKeys, family: str, num_layers: int) -> tuple[int | None, ...]:
    """One window a layer. Mistral slides everywhere unless `sliding_window` is null (a missing key is 4096, as in
    transformers); Qwen slides where `layer_types` says so, else from layer `max_window_layers` on."""
    window = keys.integer("sliding_window", 4096) if keys.values.get("sliding_window", 4096) is not None else None
    types = keys.texts("layer_types") if "layer_types" in keys else None
    for kind in types or ():
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModel(f"{keys.where}: layer_types names {shown(kind)}, which is not supported")
    if types is not None and len(types) != num_layers:
        raise UnsupportedModel(f"{keys.where}: layer_types has {len(types)} entries for {num_layers} layers")
    slides = [kind == "sliding_attention" for kind in types] if types is not None else None
    if family == "mistral":
        slides = slides if slides is not None else [window is not None] * num_layers
    elif family in ("qwen2", "qwen3"):
        use = keys.boolean("use_sliding_window", slides is not None and any(slides))
        if slides is None:
            first = keys.integer("max_window_layers", 28, COUNT)
            slides = [use and window is not None and index >= first for index in range(num_layers)]
        elif any(slides) and not use:
            raise keys.refused("use_sliding_window", "true, as layer_types names sliding layers")
    else:
        if "sliding_window" in keys or any(slides or ()):
            key = "sliding_window" if "sliding_window" in keys else "layer_types"
            raise keys.refused(key, f"absent (model_type {family} has no sliding window)")
        slides = [False] * num_layers
    if any(slides) and window is None:
        raise keys.refused("sliding_window", "an integer, as layer_types names sliding layers")
    return tuple(window if slide else None for slide in slides)


def _dtype(keys: ConfigKeys) -> str | None:
    """The dtype the config names (new key first); the files themselves decide how the weights are read."""
    for key in ("dtype", "torch_dtype"):
        if key in keys:
            return keys.text(key).removeprefix("torch.")
    return None
