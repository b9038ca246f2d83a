"""A layer's arithmetic in a workspace against the same arithmetic in tensors of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cake_infer.models.config import ModelConfig
from cake_infer.models.decoder import Decoder
from cake_infer.models.rope import Rotary
from cake_infer.models.weights import random_decoder
from cake_infer.models.workspace import Workspace, workspace_elements
from torch import Tensor

BASE = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
}


def config_of(kind: str) -> ModelConfig:
    config = ModelConfig.from_dict(BASE)
    return {
        "plain": config,
        "biases": replace(config, attention_bias=True, output_bias=True, mlp_bias=True),
        "qk_norm": replace(config, qk_norm=True),
        "norm_offset": replace(config, norm_offset=1.0, hidden_act="gelu_tanh"),
        "queries wider than the MLP": ModelConfig.from_dict({**BASE, "head_dim": 16, "intermediate_size": 24}),
    }[kind]


def through_a_layer(decoder: Decoder, hidden: Tensor, work: Workspace | None) -> tuple[Tensor, Tensor, Tensor]:
    """A chunk's hidden states, keys and values after layer 0, whose attention is here the mean of the values."""
    config, count = decoder.config, hidden.shape[0]
    layer, hidden = decoder.widened(0), hidden.clone()
    cos, sin = Rotary(config.rope, 64).cos_sin(torch.arange(count))
    keys, values = (torch.full((config.num_kv_heads, count, config.head_dim), torch.nan) for _ in range(2))
    normed = decoder.attention_norm(layer, hidden, work)
    decoder.keys_values(layer, normed, cos, sin, keys, values, work)
    queries = decoder.queries(layer, normed, cos, sin, work)
    group = config.num_heads // config.num_kv_heads
    attended = torch.softmax(queries @ keys.repeat_interleave(group, 0).mT, -1) @ values.repeat_interleave(group, 0)
    hidden += decoder.attention_output(layer, attended, work)
    hidden += decoder.mlp(layer, decoder.mlp_norm(layer, hidden, work), work)
    return hidden, keys, values


@pytest.mark.parametrize("kind", ["plain", "biases", "qk_norm", "norm_offset", "queries wider than the MLP"])
def test_a_workspace_changes_nothing_chunk_after_chunk(kind: str) -> None:
    config = config_of(kind)
    decoder = random_decoder(config)
    work = Workspace(config, 7, torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for count in (7, 7, 3, 1):  # the last chunk of a piece is shorter
        work._buffer.fill_(torch.nan)  # what a chunk leaves behind is nobody's input
        hidden = torch.randn(count, config.hidden_size, generator=generator)
        for found, expected in zip(
            through_a_layer(decoder, hidden, work), through_a_layer(decoder, hidden, None), strict=True
        ):
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_a_workspace_holds_one_input_and_two_of_the_widest_arrays() -> None:
    config = config_of("plain")
    assert workspace_elements(config, 7) == 7 * (32 + 2 * 48)
    wide_queries = config_of("queries wider than the MLP")
    assert workspace_elements(wide_queries, 7) == 7 * (32 + 2 * 64)
    work = Workspace(config, 7, torch.float32, torch.device("cpu"))
    parts = [work.normed(7), work.left(7, 48), work.right(7, 48)]
    for index, part in enumerate(parts):
        part.fill_(index)
    assert [part.unique().tolist() for part in parts] == [[0.0], [1.0], [2.0]], "the three places do not overlap"
    with pytest.raises(AssertionError, match="fewer tokens"):
        work.left(8, 48)
    with pytest.raises(AssertionError, match="narrower"):
        work.right(7, 49)
