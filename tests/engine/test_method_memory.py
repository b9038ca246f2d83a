"""The plan counts what a method asks for, and a prefill by it stays below the plan."""

from __future__ import annotations

import pytest
import torch
from cake_infer.cache.config import CacheConfig
from cake_infer.cache.layout import ArenaLayout
from cake_infer.engine.memory import plan_run
from cake_infer.engine.method_memory import method_bytes
from cake_infer.models.config import read_config


@pytest.mark.parametrize(
    ("policy", "floats_per_token"),
    [
        ("cake", 0),
        ("knorm", 0),
        ("expected-attention", 0),
        ("h2o", 4 + 2 * 2),  # sums per query head; carried numbers per KV head and their masked copy
        ("roco", 4 + 2),  # sums, and squares per KV head
        ("gate", 32 + 2 * 2),  # hidden states and carried numbers
    ],
)
def test_what_lasts_for_a_layer_grows_with_its_tokens_by_what_is_asked(
    tmp_path, write_checkpoint, policy, floats_per_token
):
    config = read_config(write_checkpoint(tmp_path / "model"))
    layout = ArenaLayout(3, 2, 8, torch.float32, torch.float32)
    lasting = [method_bytes(config, CacheConfig(policy=policy), layout, tokens, 64)[0] for tokens in (1000, 5000)]
    assert lasting[1] - lasting[0] == 4000 * floats_per_token * 4


def test_a_plan_for_a_method_that_asks_for_much_is_larger(tmp_path, write_checkpoint):
    config = read_config(write_checkpoint(tmp_path / "model"))
    chunk = {}
    for policy in ("streaming-llm", "snapkv", "h2o", "criticalkv"):
        cache = CacheConfig(policy=policy, budget=64, window=16)
        plan = plan_run(config, cache, weights=1, stored=torch.float32, prompt_tokens=4000, new_tokens=1, chunk=64)
        chunk[policy] = plan.chunk
    assert chunk["streaming-llm"] < chunk["snapkv"] < chunk["criticalkv"]
    assert chunk["streaming-llm"] < chunk["h2o"]
