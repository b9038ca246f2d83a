"""The default model's real weights say the same here and in transformers, where they are on the machine."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cake_infer.engine.engine import Engine
from cake_infer.models.config import ModelConfig, read_config
from cake_infer.models.embedded import SHAPE, embedded_folder, is_embedded_complete

TEXT = "The harbour office keeps watch day and night. Ships that arrive after dark are asked to wait outside the mole, "


@pytest.mark.skipif(not is_embedded_complete(), reason="the default model has not been downloaded on this machine")
def test_logits_and_greedy_ids_are_those_of_transformers() -> None:
    from transformers import AutoModelForCausalLM

    folder = embedded_folder()
    exact = {"dtype": "float32", "kv_dtype": "float32", "budget": 500, "step": "eager"}
    with Engine.load(folder, **exact) as engine:
        ids = engine.encode(TEXT * 3)
        found = engine.generate(ids=ids, max_new_tokens=20, temperature=0.0).ids
        scores = engine.score(ids)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        wanted = model.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False)[0, len(ids) :].tolist()
        logits = torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1], -1)
    expected = logits.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(scores), expected, rtol=0, atol=3e-4)
    assert list(found) == wanted[: len(found)]
    assert len(found) >= 5


@pytest.mark.skipif(not is_embedded_complete(), reason="the default model has not been downloaded on this machine")
def test_the_shape_that_is_known_beforehand_is_that_of_the_file() -> None:
    found = read_config(embedded_folder())
    known = ModelConfig.from_dict(SHAPE)
    tokens = {name: getattr(found, name) for name in ("bos_token_id", "eos_token_ids", "pad_token_id")}
    assert replace(known, **tokens) == found
