"""`Engine.generate` with a list: the replies, texts and figures that each prompt would get alone."""

from __future__ import annotations

import dataclasses

import pytest
from cake_infer.engine import together
from cake_infer.engine.available import Available
from cake_infer.engine.batch import Batch
from cake_infer.engine.engine import Engine
from cake_infer.engine.generation import GenerationConfig
from cake_infer.errors import MemoryLimit, OptionError, PromptError

TEXTS = ["the " * 40, "a", "and in the beginning", "he was that one", "of all but what"]


def load(folder, **options):
    return Engine.load(folder, **{"threads": 1, "window": 4, "budget": 12, "chunk": 16, **options})


def told(result):
    """Everything of a result that does not depend on the clock or the machine."""
    stats = dataclasses.replace(result.stats, prefill_s=0, decode_s=0, peak_memory=None, load_s=0)
    return dataclasses.replace(result, stats=stats)


@pytest.mark.parametrize("options", [{}, {"decode_policy": "hold"}, {"policy": "full", "budget": None}])
@pytest.mark.parametrize("batch", [1, 2, 16])
def test_a_list_gives_what_each_prompt_gives_alone(model_folder, options, batch):
    folder = model_folder()
    configs = [
        GenerationConfig(max_new_tokens=12, seed=1, temperature=0.0, logprobs=1),
        GenerationConfig(max_new_tokens=3, seed=2, temperature=0.9),
        GenerationConfig(max_new_tokens=9, seed=3, temperature=1.0, top_k=9, repetition_penalty=1.2),
        GenerationConfig(max_new_tokens=0, seed=4),
        GenerationConfig(max_new_tokens=12, seed=1, temperature=0.0),
    ]
    with load(folder, **options) as engine:
        free = engine.generate(TEXTS[4], config=configs[4]).text
        configs[4] = dataclasses.replace(configs[4], stop=(free[2:4],))  # ends in the middle of what it would say
        alone = [engine.generate(text, config=config) for text, config in zip(TEXTS, configs, strict=True)]
        results = engine.generate(TEXTS, config=configs, batch=batch)
    assert [told(result) for result in results] == [told(result) for result in alone]
    assert results[4].text == free[:2]
    assert results[4].finish_reason == "stop"


def test_prompts_of_a_list_may_be_texts_messages_and_ids(model_folder):
    with load(model_folder()) as engine:
        messages = [{"role": "user", "content": "what?"}]
        results = engine.generate(["the", messages, [5, 6, 7]], max_new_tokens=4)
        alone = [
            engine.generate("the", max_new_tokens=4),
            engine.generate(messages=messages, max_new_tokens=4),
            engine.generate(ids=[5, 6, 7], max_new_tokens=4),
        ]
        assert [result.ids for result in results] == [result.ids for result in alone]
        assert [result.prompt_ids for result in results] == [result.prompt_ids for result in alone]
        assert engine.generate([]) == []


def test_wrong_prompts_and_options_are_named_before_anything_is_read(model_folder, monkeypatch):
    with load(model_folder(), context=64) as engine:
        monkeypatch.setattr(Batch, "read", None)
        monkeypatch.setattr(Batch, "step", None)
        with pytest.raises(PromptError, match=r"prompt 2 of 3: the prompt has 100 tokens, but .* context is 64"):
            engine.generate(["a", [9] * 100, "b"])
        with pytest.raises(PromptError, match="prompt 1 of 2: each prompt of a list is a text"):
            engine.generate([7, 8])
        with pytest.raises(PromptError, match="prompt 2 of 2"):
            engine.generate(["a", []])
        with pytest.raises(OptionError, match="2 prompts and 1 configs"):
            engine.generate(["a", "b"], config=[GenerationConfig()])
        for batch in (0, -1, "x", 1.5, True):
            with pytest.raises(OptionError, match="batch must be a whole number between 1 and"):
                engine.generate(["a", "b"], batch=batch)
        with pytest.raises(OptionError, match="there is one prompt"):
            engine.generate("a", batch=3)
        with pytest.raises(PromptError, match="not True or False"):
            engine.generate(ids=[True])
        with pytest.raises(OptionError, match="exactly one"):
            engine.generate(["a", "b"], messages=[])


def watched(monkeypatch):
    """How many were decoded together at most, and the largest arena, of what runs next."""
    seen = {"together": 0, "nbytes": 0}
    step = Batch.step

    def watch(self):
        seen["together"] = max(seen["together"], len(self))
        seen["nbytes"] = max(seen["nbytes"], self.arena.nbytes)
        return step(self)

    monkeypatch.setattr(Batch, "step", watch)
    return seen


def test_kv_memory_limits_how_many_run_together_and_not_what_they_say(model_folder, monkeypatch):
    folder, seen = model_folder(), watched(monkeypatch)
    with load(folder) as engine:
        alone = [engine.generate(text, max_new_tokens=30).ids for text in TEXTS]
        one = engine.runner.tenancy.arena.nbytes
        engine.generate(TEXTS, max_new_tokens=30)
    assert seen["together"] == 5
    everything = seen["nbytes"]
    assert everything < 5 * one
    seen.update(together=0, nbytes=0)
    limit = (everything + one) // 2
    with load(folder, kv_memory=limit) as engine:
        assert [result.ids for result in engine.generate(TEXTS, max_new_tokens=30)] == alone
    assert 1 < seen["together"] < 5
    assert one <= seen["nbytes"] <= limit
    with load(folder, policy="full", budget=None, kv_memory=limit // 2) as engine, pytest.raises(MemoryLimit) as told:
        engine.generate(["a", "the " * 60], max_new_tokens=30)
    assert str(told.value).startswith("prompt 2 of 2: this needs")


def test_free_memory_limits_how_many_run_together(model_folder, monkeypatch):
    seen = watched(monkeypatch)
    with load(model_folder()) as engine:
        alone = [engine.generate(text, max_new_tokens=5).ids for text in TEXTS]
        monkeypatch.setattr(together, "available_memory", lambda device: Available(1000, "this machine"))
        assert [result.ids for result in engine.generate(TEXTS, max_new_tokens=5)] == alone
        assert seen["together"] < 5
        monkeypatch.setattr(together, "available_memory", lambda device: None)
        engine.generate(TEXTS, max_new_tokens=5)
        assert seen["together"] == 5


def test_the_arena_of_a_list_is_made_once_and_freed(model_folder, monkeypatch):
    grown = []
    with load(model_folder()) as engine:
        from cake_infer.cache.shared import SharedArena

        grow = SharedArena._grow
        monkeypatch.setattr(SharedArena, "_grow", lambda self, needed: (grown.append(needed), grow(self, needed)))
        engine.generate(TEXTS, max_new_tokens=5)
        assert len(grown) == 1
        assert not list(engine.runner.tenancy.batches)
        assert engine.runner.tenancy.arena.nbytes < 1000


def test_progress_is_of_all_prompts_together(model_folder):
    shares = []
    with load(model_folder()) as engine:
        engine.generate(TEXTS, max_new_tokens=2, on_progress=lambda p: shares.append((p.stage, p.share)))
    prefill = [share for stage, share in shares if stage == "prefill"]
    assert prefill == sorted(prefill)
    assert prefill[-1] == 1.0
    assert len(set(prefill)) > 10


def test_an_interrupted_list_frees_everything(model_folder):
    def stop(progress):
        raise KeyboardInterrupt

    with load(model_folder()) as engine:
        before = engine.generate("the", max_new_tokens=5).ids
        with pytest.raises(KeyboardInterrupt):
            engine.generate(TEXTS, max_new_tokens=5, on_progress=stop)
        assert not list(engine.runner.tenancy.batches)
        assert engine.generate("the", max_new_tokens=5).ids == before
