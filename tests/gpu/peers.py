"""transformers with everything kept, at the longest context, beside CAKE: what people would run instead."""

from __future__ import annotations

import importlib.util
import math
import time
from typing import Any

import torch
from decoding import cake_seconds
from setting import Check, free, sync

TIMES = 10  # CAKE over transformers at batch 4
WARM = 3  # steps: the first ones copy every row into a block of another size
STEPS = 6


def peers(check: Check) -> None:
    """Its own default cache, which is copied at every step, and its static one."""
    context, batches = check.scale.contexts[-1], (4, 1)
    ours = {batch: cake_seconds(check, context, batch) for batch in batches}  # before another model lies there
    free()
    there = importlib.util.find_spec("transformers") is not None
    model = _transformers(check) if there else None
    for batch in batches:
        seconds = dict.fromkeys(("dynamic", "static"), math.nan)
        for kind in seconds if there else ():
            name = f"transformers, {kind} cache, {context:,} tokens, batch {batch}"
            with check.attempt(name):
                seconds[kind] = _seconds(check, model, kind, context, batch)
                check.tell(name, batch / seconds[kind], "tok/s")
            free()
        for kind, theirs in seconds.items():
            ratio, name = theirs / ours[batch], f"CAKE over transformers, {kind} cache, batch {batch}"
            if kind == "dynamic":
                check.found[f"over transformers, batch {batch}"] = ratio
            if kind == "dynamic" and batch == 4:
                check.measured(name, ratio, "x", f"at least {TIMES}", ratio >= TIMES)
            else:
                check.tell(name, ratio, "x")


def _transformers(check: Check) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    keys = {key: value for key, value in check.scale.large.items() if key != "model_type" and value is not None}
    dtype, default = getattr(torch, check.scale.dtype), torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with check.device:
            config = LlamaConfig(**keys)
            model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa", dtype=dtype)
    finally:
        torch.set_default_dtype(default)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    return model.eval()


def _seconds(check: Check, model: Any, kind: str, context: int, batch: int) -> float:
    """Of one step, behind a context of random keys and values."""
    from transformers import DynamicCache, StaticCache

    config = model.config
    warm, steps = (1, 1) if check.scale.dry else (WARM, STEPS)
    shape = (batch, config.num_key_value_heads, context, config.head_dim)
    if kind == "dynamic":
        cache = DynamicCache(config=config)
    else:
        cache = StaticCache(config=config, max_cache_len=context + warm + steps)
    with torch.inference_mode():
        for layer in range(config.num_hidden_layers):
            keys, values = (torch.empty(shape, dtype=model.dtype, device=check.device).normal_() for _ in range(2))
            cache.update(keys, values, layer)
            del keys, values
        token = torch.full((batch, 1), 5, device=check.device)
        started = 0.0
        for step in range(warm + steps):
            if step == warm:
                sync()
                started = time.perf_counter()
            at = torch.full((batch, 1), context + step, device=check.device)
            out = model(input_ids=token, past_key_values=cache, position_ids=at, use_cache=True)
            token = out.logits[:, -1:].argmax(-1)
        sync()
        seconds = (time.perf_counter() - started) / steps
    assert int(cache.get_seq_length()) == context + warm + steps, "the cache was not used"
    return seconds
