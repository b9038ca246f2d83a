"""Names and shapes of every parameter of a model, as Hugging Face checkpoints spell them."""

from __future__ import annotations

from dataclasses import dataclass

from .config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True)
class LayerParameter:
    """One tensor of a layer: the field of `decoder.Layer` it becomes, its name after `model.layers.N.`, its shape."""

    field: str
    name: str
    shape: tuple[int, ...]

    def full_name(self, layer: int) -> str:
        return f"model.layers.{layer}.{self.name}"


def layer_parameters(config: ModelConfig) -> tuple[LayerParameter, ...]:
    """The parameters every layer has, in the order a forward pass reads them. Matrices are [out, in]."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    rows: list[tuple[bool, str, str, tuple[int, ...]]] = [
        (True, "input_layernorm", "input_layernorm.weight", (hidden,)),
        (True, "q_proj", "self_attn.q_proj.weight", (queries, hidden)),
        (config.attention_bias, "q_bias", "self_attn.q_proj.bias", (queries,)),
        (config.qk_norm, "q_norm", "self_attn.q_norm.weight", (config.head_dim,)),
        (True, "k_proj", "self_attn.k_proj.weight", (keys, hidden)),
        (config.attention_bias, "k_bias", "self_attn.k_proj.bias", (keys,)),
        (config.qk_norm, "k_norm", "self_attn.k_norm.weight", (config.head_dim,)),
        (True, "v_proj", "self_attn.v_proj.weight", (keys, hidden)),
        (config.attention_bias, "v_bias", "self_attn.v_proj.bias", (keys,)),
        (True, "o_proj", "self_attn.o_proj.weight", (hidden, queries)),
        (config.output_bias, "o_bias", "self_attn.o_proj.bias", (hidden,)),
        (True, "post_attention_layernorm", "post_attention_layernorm.weight", (hidden,)),
        (True, "gate_proj", "mlp.gate_proj.weight", (intermediate, hidden)),
        (config.mlp_bias, "gate_bias", "mlp.gate_proj.bias", (intermediate,)),
        (True, "up_proj", "mlp.up_proj.weight", (intermediate, hidden)),
        (config.mlp_bias, "up_bias", "mlp.up_proj.bias", (intermediate,)),
        (True, "down_proj", "mlp.down_proj.weight", (hidden, intermediate)),
        (config.mlp_bias, "down_bias", "mlp.down_proj.bias", (hidden,)),
    ]
    return tuple(LayerParameter(field, name, shape) for present, field, name, shape in rows if present)


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name to shape of every parameter of the model; a tied head is not a parameter of its own."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_layers):
        shapes |= {parameter.full_name(layer): parameter.shape for parameter in layer_parameters(config)}
    shapes[FINAL_NORM] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, config.hidden_size)
    return shapes
