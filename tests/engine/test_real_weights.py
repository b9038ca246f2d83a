"""The default model's real weights say the same here and in transformers, where they are on the machine."""

from __future__ import annotations

import pytest
import torch
from cake_infer.engine.engine import Engine
from cake_infer.models.embedded import embedded_folder, is_embedded_complete

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
