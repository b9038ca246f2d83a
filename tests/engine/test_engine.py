"""The facade: what goes in, what comes out, and what is left behind by failures, closed streams and neighbours."""

from __future__ import annotations

import gc
import importlib.util
import json
import logging
import math
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from cake_infer.cache.budget import size_text
from cake_infer.cache.config import CacheConfig
from cake_infer.engine import loading
from cake_infer.engine.encoding import token_counts
from cake_infer.engine.engine import Engine
from cake_infer.engine.generation import GenerationConfig
from cake_infer.errors import (
    BackendError,
    BudgetError,
    CakeError,
    MemoryLimit,
    OptionError,
    PromptError,
    TokenizerError,
)
from cake_infer.models.tokenizer import Tokenizer
from safetensors.torch import load_file, save_file

PROMPT = "the first of them was not this one, and all that is left "


def load(folder, **options):
    return Engine.load(folder, **{"step": "eager", "window": 8, **options})


def change_weights(folder, change):
    """Rewrite a checkpoint: `change` gets the tensors by name."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def change_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


# -- what goes in and comes out ---------------------------------------------------------------------------------------


def test_text_messages_and_ids_are_three_ways_to_say_the_same(model_folder):
    engine = load(model_folder())
    tokenizer = engine.tokenizer
    text = engine.generate(PROMPT, max_new_tokens=12)
    assert list(text.prompt_ids) == tokenizer.encode(PROMPT)
    assert engine.generate(ids=tokenizer.encode(PROMPT), max_new_tokens=12).ids == text.ids
    rendered = engine.template.render([{"role": "user", "content": PROMPT}])
    messages = engine.generate(messages=[{"role": "user", "content": PROMPT}], max_new_tokens=12)
    assert messages.ids == engine.generate(rendered, max_new_tokens=12).ids
    assert messages.prompt_ids.count(tokenizer.bos_id) == 1
    whole = tokenizer.decode([*text.prompt_ids, *text.ids])
    assert tokenizer.decode(text.prompt_ids) + text.text == whole
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert engine.encode(messages=[{"role": "user", "content": parts}]) == engine.encode(
        messages=[{"role": "user", "content": "a\nb"}]
    )


def test_a_stream_gives_the_result_piece_by_piece(model_folder):
    engine = load(model_folder())
    result = engine.generate(PROMPT, max_new_tokens=12, logprobs=3)
    pieces = list(engine.stream(PROMPT, config=GenerationConfig(max_new_tokens=12, logprobs=3)))
    assert "".join(piece.text for piece in pieces) == result.text
    assert [piece.id for piece in pieces] == [*result.ids, None]
    assert [piece.logprob for piece in pieces[:-1]] == [entry.logprob for entry in result.logprobs]
    assert [piece.top_logprobs for piece in pieces[:-1]] == [entry.top for entry in result.logprobs]
    assert [piece.finish_reason for piece in pieces] == [None] * 12 + ["length"]
    assert [piece.stats is None for piece in pieces] == [True] * 12 + [False]
    assert (result.finish_reason, result.stats.new_tokens, result.stats.decode_steps) == ("length", 12, 11)
    assert result.stats.prompt_tokens == len(result.prompt_ids)


def test_prompts_of_a_list_run_one_by_one_as_if_alone(model_folder, random_ids):
    folder = model_folder()
    engine = load(folder, budget=16)
    texts = [engine.tokenizer.decode(random_ids(count, seed=count)) for count in (3, 9, 40)]
    together = engine.generate(texts, max_new_tokens=8)
    for text, result in zip(texts, together, strict=True):
        alone = load(folder, budget=16).generate(text, max_new_tokens=8)
        assert result.ids == alone.ids
        assert result.stats.layer_lengths == alone.stats.layer_lengths
    assert together[2].stats.kept_tokens == 16
    assert engine.generate([]) == []


def test_a_stop_string_ends_the_reply_in_front_of_it(model_folder, force):
    engine = load(model_folder())
    reply = engine.tokenizer.encode("one two, three", add_bos=False)
    force(reply * 2)
    result = engine.generate(PROMPT, stop=["o, t", "never"], max_new_tokens=30)
    assert (result.text, result.finish_reason) == ("one tw", "stop")
    assert engine.tokenizer.decode(result.ids).startswith("one two, t")
    force(reply)
    assert engine.generate(PROMPT, stop="one", max_new_tokens=30).text == ""


@pytest.mark.parametrize("end", [2, 4])  # config.json's </s>, and <|im_end|> which the tokenizer knows to end a turn
def test_an_end_token_ends_the_reply_and_is_not_part_of_it(model_folder, force, end):
    engine = load(model_folder())
    force([10, 11, end, 12])
    result = engine.generate(PROMPT)
    assert (result.ids, result.finish_reason) == ((10, 11), "stop")
    force([end])
    first = engine.generate(PROMPT, logprobs=2)
    assert (first.text, first.ids, first.finish_reason, first.logprobs) == ("", (), "stop", None)
    json.dumps(first.stats.as_dict(), allow_nan=False)
    assert first.stats.line()


def test_no_new_tokens_is_an_empty_reply(model_folder):
    engine = load(model_folder())
    result = engine.generate(PROMPT, max_new_tokens=0)
    assert (result.text, result.ids, result.finish_reason) == ("", (), "length")
    assert result.stats.decode_rate is None
    json.dumps(result.stats.as_dict(), allow_nan=False)
    assert "0 tok" in result.stats.line()


def test_the_models_own_generation_defaults_apply_where_nothing_is_said(model_folder):
    folder = model_folder()
    (folder / "generation_config.json").write_text(
        json.dumps({"do_sample": True, "temperature": 2.0, "eos_token_id": [2, 77]})
    )
    engine = load(folder)
    assert engine.stop_ids == {2, 4, 77}
    said = engine.generate(PROMPT, temperature=2.0, seed=3, max_new_tokens=9)
    assert engine.generate(PROMPT, seed=3, max_new_tokens=9).ids == said.ids
    assert engine.generate(PROMPT, temperature=0.0, seed=3, max_new_tokens=9).ids != said.ids


def test_progress_runs_through_every_layer_to_the_end(model_folder):
    seen = []
    engine = load(model_folder(), chunk=16, on_progress=seen.append)
    assert {progress.stage for progress in seen} == {"load"}
    assert seen[-1].done == seen[-1].total > 0
    del seen[:]
    engine.generate(ids=[10] * 40, max_new_tokens=1, on_progress=seen.append)
    assert [(progress.layer, progress.done) for progress in seen] == [
        (layer, 40 * layer + done) for layer in range(3) for done in (16, 32, 40)
    ]
    assert {(progress.stage, progress.total, progress.num_layers) for progress in seen} == {("prefill", 120, 3)}


def test_a_text_is_scored_by_its_log_likelihood_given_what_comes_before(model_folder, dense):
    folder = model_folder()
    engine = load(folder, budget=8, chunk=16)
    ids = engine.tokenizer.encode(PROMPT)
    reference = torch.log_softmax(dense(folder).logits(ids)[:, :300], -1)[:-1]
    expected = reference.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    for text in (PROMPT, ids):
        torch.testing.assert_close(torch.tensor(engine.score(text)).double(), expected, rtol=0, atol=1e-4)
    assert engine.score([10]) == []
    with pytest.raises(PromptError, match="token id 310 is padding"):
        engine.score([10, 310])
    assert len(engine.score(ids)) == len(ids) - 1


# -- choosing tokens --------------------------------------------------------------------------------------------------


def test_log_probabilities_are_the_models_own_and_json_can_carry_them(model_folder):
    engine = load(model_folder())
    plain = engine.generate(PROMPT, max_new_tokens=6, logprobs=300)
    filtered = engine.generate(PROMPT, max_new_tokens=6, temperature=1.0, top_k=1, logprobs=5, repetition_penalty=1.0)
    assert filtered.ids == plain.ids, "the only token that top_k 1 leaves is the best one"
    for entry, whole in zip(filtered.logprobs, plain.logprobs, strict=True):
        assert json.dumps([entry.logprob, entry.top], allow_nan=False)
        assert len(entry.top) == 5
        assert entry.logprob == whole.logprob
        assert entry.top == whole.top[:5]
        assert math.isclose(math.fsum(math.exp(value) for _, value in whole.top), 1.0, abs_tol=1e-5)
        assert len(whole.top) == 300
    hot = engine.generate(PROMPT, max_new_tokens=40, temperature=50.0, logprobs=1, seed=1)
    assert all(entry.id in dict(entry.top) for entry in hot.logprobs)
    assert any(len(entry.top) == 2 for entry in hot.logprobs), "no token but the best was ever chosen"


def test_the_repetition_penalty_counts_the_ids_not_the_rows_that_were_kept(model_folder, random_ids):
    engine = load(model_folder(), budget=8)
    prompt = [token for token in range(300) if token % 6]  # 5 of 6 tokens, end tokens too; all but 8 are dropped
    plain = engine.generate(ids=prompt, max_new_tokens=12)
    assert plain.stats.kept_tokens == 8
    punished = engine.generate(ids=prompt, max_new_tokens=12, repetition_penalty=1e6)
    assert not set(punished.ids) & set(prompt)
    assert len(set(punished.ids)) == 12
    assert set(plain.ids) & set(prompt)
    same = engine.generate(ids=prompt, max_new_tokens=12, repetition_penalty=1.0, logprobs=9)
    assert same.logprobs == engine.generate(ids=prompt, max_new_tokens=12, logprobs=9).logprobs
    with pytest.raises(OptionError, match="repetition_penalty must be a number between 1e-30 and"):
        engine.generate(PROMPT, repetition_penalty=0.0)


def test_a_seed_is_all_that_a_sampled_reply_depends_on(model_folder):
    folder = model_folder()
    engine = load(folder)
    state = torch.random.get_rng_state()

    def sample(seed=None):
        return engine.generate(PROMPT, temperature=1.0, max_new_tokens=20, **({} if seed is None else {"seed": seed}))

    first = sample(7)
    other = [sample(8), sample(0), sample(), sample(), sample(1)]
    again = sample(7)
    assert first.ids == again.ids
    assert len({first.ids, *(result.ids for result in other)}) == 6
    assert (first.stats.seed, other[1].stats.seed) == (7, 0)
    fresh = other[2].stats.seed
    assert fresh != other[3].stats.seed
    assert sample(fresh).ids == other[2].ids
    assert sample(0).ids == other[1].ids
    assert torch.equal(torch.random.get_rng_state(), state)
    noise = engine.generate(PROMPT, temperature=1e6, seed=9, max_new_tokens=20)
    assert len(set(noise.ids)) > 15, "every step draws anew"
    program = (
        "import sys; from cake_infer import Engine; e = Engine.load(sys.argv[1], step='eager', window=8);"
        "print(list(e.generate(sys.argv[2], temperature=1.0, seed=7, max_new_tokens=20).ids))"
    )
    run = subprocess.run([sys.executable, "-c", program, folder, PROMPT], capture_output=True, text=True, check=True)
    assert json.loads(run.stdout) == list(first.ids)


def test_padding_of_the_vocabulary_is_never_chosen(model_folder):
    folder = model_folder()
    plain = load(folder).generate(PROMPT, max_new_tokens=9, logprobs=4)

    def favour_padding(tensors):
        best = tensors["lm_head.weight"][list(plain.ids)].mean(0)
        tensors["lm_head.weight"][310:315] = best * torch.tensor([[50.0], [-50.0], [90.0], [-90.0], [0.0]])

    change_weights(folder, favour_padding)
    engine = load(folder)
    padded = engine.generate(PROMPT, max_new_tokens=9, logprobs=4, stop=["never"])
    assert padded.ids == plain.ids
    assert padded.logprobs == plain.logprobs
    sampled = engine.generate(PROMPT, max_new_tokens=60, temperature=3.0, logprobs=300)
    assert all(token < 300 for token in sampled.ids)
    assert all(token < 300 for entry in sampled.logprobs for token, _ in entry.top)
    assert engine.score(PROMPT) == load(model_folder("unpadded")).score(PROMPT)


def test_ids_that_no_token_has_are_never_chosen(model_folder, monkeypatch):
    folder = model_folder()
    plain = load(folder).generate(PROMPT, max_new_tokens=9)
    monkeypatch.setattr(Tokenizer, "unused_ids", tuple(sorted(set(plain.ids))))
    engine = load(folder)
    result = engine.generate(PROMPT, max_new_tokens=9, logprobs=300)
    assert not set(result.ids) & set(plain.ids)
    for entry in result.logprobs:
        assert math.isclose(math.fsum(math.exp(value) for _, value in entry.top if value is not None), 1, abs_tol=1e-5)
    with pytest.raises(PromptError, match="no text has it"):
        engine.score(list(plain.ids))
    assert len(engine.score(PROMPT)) > 5


def test_a_tokenizer_with_more_ids_than_the_model_has_rows_is_refused(model_folder):
    with pytest.raises(TokenizerError, match=r"ids up to 299 .* the model has 290"):
        load(model_folder(vocab_size=290))


# -- wrong input ------------------------------------------------------------------------------------------------------


def test_an_empty_prompt_runs_where_there_is_a_bos_and_is_refused_elsewhere(model_folder):
    engine, bare = load(model_folder()), load(model_folder("bare", bos=False))
    assert engine.generate("", max_new_tokens=3).prompt_ids == (1,)
    for prompt in ({"prompt": ""}, {"ids": []}):
        with pytest.raises(PromptError, match="the prompt is empty"):
            bare.stream(**prompt)
    assert len(bare.generate(" ", max_new_tokens=3).ids) == 3
    with pytest.raises(PromptError, match="empty"):
        bare.generate(messages=[])


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ({"ids": [5, 320]}, PromptError, "token id 320 is outside the model's vocabulary of 320"),
        ({"ids": [-1]}, PromptError, "token id -1"),
        ({"ids": [1.5]}, PromptError, "whole numbers"),
        ({"prompt": "bad \ud800"}, PromptError, "not valid UTF-8"),
        ({"messages": [{"role": "user", "content": "bad \ud800"}]}, PromptError, "the user message"),
        ({"messages": [{"role": "robot", "content": "x"}]}, PromptError, "robot"),
        ({"messages": ["hello"]}, PromptError, "message 1 is not a mapping"),
        ({"prompt": 5}, PromptError, "a prompt is a text"),
        ({"prompt": "x", "ids": [5]}, OptionError, "exactly one"),
        ({}, OptionError, "exactly one"),
        ({"prompt": "x", "top_q": 3}, OptionError, "unknown option 'top_q'"),
        ({"prompt": "x", "temperature": -1.0}, OptionError, "temperature"),
        ({"ids": [5] * 4096}, PromptError, "the prompt has 4,096 tokens, but the model's context is 4,096"),
    ],
)
def test_wrong_input_is_refused_before_the_first_piece(model_folder, prompt, error, message):
    with pytest.raises(error, match=message):
        load(model_folder()).stream(**prompt)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"budgets": 3}, OptionError, "unknown option 'budgets'"),
        ({"budget": 7}, BudgetError, "the minimum is 8"),
        ({"policy": "best"}, OptionError, "unknown policy 'best'"),
        ({"device": "toaster"}, OptionError, "device must be cpu, cuda or cuda:N, not 'toaster'"),
        ({"device": "meta"}, OptionError, "not 'meta'"),
        ({"dtype": "float8"}, OptionError, "dtype must be one of .*not 'float8'"),
        ({"attention": "magic"}, OptionError, "attention must be one of .*not 'magic'"),
        ({"step": "fast"}, OptionError, "step must be one of .*not 'fast'"),
        ({"quant": "int3"}, OptionError, "quant must be one of .*not 'int3'"),
        ({"quant": "int8", "dtype": "float32"}, OptionError, "give one of"),
        ({"rope_scaling": "yarn"}, OptionError, "KIND:FACTOR"),
        ({"threads": 5000}, OptionError, "threads must be a whole number between 1 and 1,024, not 5,000"),
        ({"chunk": 2.5}, OptionError, "chunk must be a whole number"),
        ({"chunk": 0}, OptionError, "chunk must be a whole number between 1 and"),
        ({"threads": 0}, OptionError, "threads must be a whole number between 1 and"),
        ({"context": 0}, OptionError, "context must be a whole number between 1 and"),
        ({"context": 5000}, OptionError, "more than the model's 4,096"),
        ({"kv_memory": "much"}, BudgetError, "cannot read the size"),
        ({"cache": CacheConfig(), "budget": "x"}, BudgetError, "cannot read the budget"),
        ({"cache": {"budget": 64}}, OptionError, "cache is a CacheConfig, not {'budget': 64}"),
    ],
)
def test_options_that_cannot_be_applied_are_refused_at_load(model_folder, options, error, message):
    with pytest.raises(error, match=message):
        load(model_folder(), **options)


def test_a_device_that_is_not_there_is_refused(model_folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendError, match="no CUDA device here"):
        load(model_folder(), device="cuda")


def test_before_weights_may_end_a_load_when_the_tokenizer_is_there_and_no_weight_is(model_folder, monkeypatch):
    monkeypatch.setattr(loading, "load_decoder", None)
    seen = []

    def stop(engine):
        seen.append(len(engine.encode(PROMPT)))
        with pytest.raises(CakeError):
            _ = engine.runner
        raise MemoryLimit("too large")

    with pytest.raises(MemoryLimit):
        load(model_folder(), before_weights=stop)
    assert seen[0] > 5


def test_random_weights_need_only_a_config(model_folder, tmp_path):
    config = json.loads((model_folder() / "config.json").read_text())
    (tmp_path / "bare").mkdir()
    path = tmp_path / "bare" / "config.json"
    path.write_text(json.dumps(config))
    results = [
        load(model, random_weights=True, weights_seed=seed).generate(ids=[5, 6, 7], max_new_tokens=9)
        for model, seed in ((path, 0), (path.parent, 0), (path, 1))
    ]
    assert results[0].ids == results[1].ids != results[2].ids
    assert (results[0].text, len(results[0].ids)) == ("", 9)
    engine = load(path, random_weights=True)
    for attempt in ({"prompt": "x"}, {"messages": [{"role": "user", "content": "x"}]}, {"ids": [5], "stop": "x"}):
        with pytest.raises(TokenizerError, match="no tokenizer"):
            engine.stream(**attempt)


def test_a_closed_engine_says_so(model_folder):
    with load(model_folder()) as engine:
        engine.generate(PROMPT, max_new_tokens=1)
    with pytest.raises(CakeError, match="the engine is closed"):
        engine.generate(PROMPT)
    engine.close()


# -- number formats ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["torch_dtype", "dtype", None])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_checkpoint_dtype_runs_on_a_cpu_and_says_what_it_does(model_folder, caplog, monkeypatch, dtype, key):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False, raising=False)
    caplog.set_level(logging.INFO, logger="cake_infer")
    folder = model_folder(dtype=getattr(torch, dtype), torch_dtype=...)
    if key is not None:
        change_config(folder, **{key: dtype})
    engine = load(folder, kv_dtype="float32")
    assert f"{dtype} weights, float32 keys and values, computed in float32 on cpu" in caplog.text
    narrow = engine.generate(PROMPT, max_new_tokens=12, logprobs=2)

    def widen(tensors):
        tensors.update({name: tensor.float() for name, tensor in tensors.items()})

    change_weights(folder, widen)
    if key is not None:
        change_config(folder, **{key: "float32"})
    wide = load(folder, kv_dtype="float32").generate(PROMPT, max_new_tokens=12, logprobs=2)
    assert narrow.ids == wide.ids
    for one, other in zip(narrow.logprobs, wide.logprobs, strict=True):
        assert math.isclose(one.logprob, other.logprob, abs_tol=1e-5)


def test_a_dtype_that_is_asked_for_wins(model_folder, caplog):
    caplog.set_level(logging.INFO, logger="cake_infer")
    folder = model_folder(dtype=torch.bfloat16)
    assert load(folder, dtype="float32").runner.decoder.dtype == torch.float32
    assert "float32 weights" in caplog.text
    assert load(folder, dtype="float16").runner.decoder.dtype == torch.float16


# -- memory and budgets -----------------------------------------------------------------------------------------------


def test_kv_memory_holds_the_whole_arena_and_is_used(model_folder):
    limit = 150_000
    engine = load(model_folder(), kv_memory=limit)
    for tokens in (10, 600, 150, 900):
        stats = engine.generate(ids=[10] * tokens, max_new_tokens=20).stats
        assert engine.runner.tenancy.arena.nbytes <= limit
        assert (stats.kept_tokens < tokens) == (tokens > 150)
        assert stats.budget >= min(tokens, 8)
    assert engine.runner.tenancy.arena.nbytes > 0.95 * limit
    with pytest.raises(BudgetError, match=r"too small: 3,000 prompt and 20 new tokens\s+take at least"):
        engine.generate(ids=[10] * 3000, max_new_tokens=20)
    with pytest.raises(MemoryLimit, match="of KV memory, more than the 150000 allowed"):
        engine.score([10] * 3000)
    assert engine.runner.tenancy.arena.nbytes <= limit
    assert engine.generate(ids=[10] * 600, max_new_tokens=20).stats.kept_tokens < 600


def test_an_arena_that_grows_is_reported_but_not_the_first_one(model_folder, caplog):
    engine = load(model_folder())
    caplog.set_level(logging.INFO, logger="cake_infer")
    for tokens in (100, 50):
        engine.generate(ids=[10] * tokens, max_new_tokens=1)
    assert "KV arena" not in caplog.text
    before = engine.runner.tenancy.arena.nbytes
    engine.generate(ids=[10] * 300, max_new_tokens=1)
    now = engine.runner.tenancy.arena.nbytes
    assert f"the KV arena has now {size_text(now)}, {size_text(before)} before" in caplog.text


@pytest.mark.parametrize(("budget", "kept"), [("50%", 50), ("7%", 8), (24, 24), ("200%", 100), (10_000, 100)])
def test_a_budget_is_kept_to_the_token(model_folder, budget, kept):
    engine = load(model_folder(), budget=budget)
    stats = engine.generate(ids=[10] * 100 if kept > 8 else [10] * 110, max_new_tokens=3).stats
    assert stats.kept_tokens == kept
    assert stats.kept_bytes == kept * 3 * 2 * 2 * 8 * 4  # layers, KV heads, key and value, head_dim, fp32


# -- neighbours, failures, leftovers ----------------------------------------------------------------------------------


def test_streams_that_run_side_by_side_are_those_that_run_alone(model_folder, random_ids):
    folder = model_folder()
    prompts = [random_ids(count, seed=count) for count in (60, 5, 200)]
    options = [{"temperature": 1.0, "seed": seed} for seed in (1, 2, 3)]
    alone = [
        load(folder, budget=24).generate(ids=prompt, max_new_tokens=15, **option)
        for prompt, option in zip(prompts, options, strict=True)
    ]
    engine = load(folder, budget=24)
    streams = [
        engine.stream(ids=prompt, max_new_tokens=15, **option) for prompt, option in zip(prompts, options, strict=True)
    ]
    ids = [[] for _ in streams]
    for turn in range(40):
        if turn == 7:
            engine.score(random_ids(30))
        piece = next(streams[turn % 3], None)
        if piece is not None and piece.id is not None:
            ids[turn % 3].append(piece.id)
    for number, stream in enumerate(streams):
        ids[number] += [piece.id for piece in stream if piece.id is not None]
    assert ids == [list(result.ids) for result in alone]


def test_threads_queue_and_get_the_replies_they_would_get_alone(model_folder, random_ids):
    folder = model_folder()
    prompts = [random_ids(count, seed=count) for count in (60, 5, 120, 33)]
    alone = [load(folder, budget=24, chunk=8).generate(ids=prompt, max_new_tokens=15).ids for prompt in prompts]
    scores = load(folder).score(prompts[0])
    engine = load(folder, budget=24, chunk=8)
    results = [None] * 4
    start = threading.Barrier(5)
    interval = sys.getswitchinterval()

    def run(number):
        start.wait()
        results[number] = [engine.generate(ids=prompts[number], max_new_tokens=15).ids for _ in range(3)]

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        start.wait()
        found = [engine.score(prompts[0]) for _ in range(3)]
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert results == [[ids] * 3 for ids in alone]
    for one in found:
        torch.testing.assert_close(torch.tensor(one), torch.tensor(scores), rtol=0, atol=1e-5)


def test_closing_a_stream_early_frees_its_rows(model_folder, monkeypatch, random_ids):
    folder = model_folder()
    engine = load(folder, budget=24)
    stream = engine.stream(ids=random_ids(100), max_new_tokens=50)
    next(stream)
    sequence = weakref.ref(engine.runner.tenancy._active())
    stream.close()
    gc.collect()
    assert sequence() is None
    monkeypatch.setattr(engine.runner.tenancy.arena, "save", None)  # nobody's rows are not set aside
    after = engine.generate(ids=random_ids(60), max_new_tokens=9)
    assert after.ids == load(folder, budget=24).generate(ids=random_ids(60), max_new_tokens=9).ids


class Broken(Exception):
    pass


def fail_in(engine, monkeypatch, failing, seen):
    """Let the layer-th call of a run, counted over prefill and steps, raise; the tensors it holds are watched."""
    decoder, calls = engine.runner.decoder, []
    attention_output = decoder.attention_output

    def output(layer, attention, *rest):
        calls.append(layer)
        seen.append(weakref.ref(attention))
        if len(calls) == failing:
            raise Broken
        return attention_output(layer, attention, *rest)

    monkeypatch.setattr(decoder, "attention_output", output)


@pytest.mark.parametrize(
    "failing", [2, 3 * 3 + 2], ids=["layer 1 of the prefill", "layer 1 of decode step 3"]
)  # counted over the 3 layers of the prefill, one chunk each, and of the steps
@pytest.mark.parametrize("decode_policy", ["grow", "hold"])
def test_after_a_failure_the_engine_is_as_good_as_new(model_folder, monkeypatch, random_ids, failing, decode_policy):
    folder = model_folder()
    options = {"budget": 24, "decode_policy": decode_policy}
    expected = [load(folder, **options).generate(ids=random_ids(n), max_new_tokens=9).ids for n in (50, 200)]
    engine, seen = load(folder, **options), []
    with monkeypatch.context() as patch:
        fail_in(engine, patch, failing, seen)
        with pytest.raises(Broken):
            engine.generate(ids=random_ids(100), max_new_tokens=9)
        assert len(seen) == failing
    gc.collect()
    assert not any(reference() is not None for reference in seen), "something keeps a failed run's tensors alive"
    assert engine.runner.tenancy._active() is None
    arena = engine.runner.tenancy.arena
    for table in (arena.keys, arena.values, arena.score):
        table.fill_(math.nan)
    arena.position.fill_(-7)
    assert [engine.generate(ids=random_ids(n), max_new_tokens=9).ids for n in (50, 200)] == expected


def test_a_callback_cannot_use_the_engine_that_is_reading(model_folder, random_ids):
    folder = model_folder()
    engine, ids = load(folder, budget=24), random_ids(100)

    def on_progress(progress):
        for attempt in (lambda: engine.generate("x"), lambda: engine.score([5, 6])):
            with pytest.raises(CakeError, match="is reading a text"):
                attempt()

    result = engine.generate(ids=ids, max_new_tokens=5, on_progress=on_progress)
    assert result.ids == load(folder, budget=24).generate(ids=ids, max_new_tokens=5).ids


def test_weights_that_give_nan_are_an_error_and_no_reply(model_folder):
    folder = model_folder()
    change_weights(folder, lambda tensors: tensors["model.layers.1.mlp.down_proj.weight"].fill_(math.nan))
    for options in ({"policy": "full"}, {"policy": "cake", "budget": 24}, {"policy": "auto", "budget": 24}):
        engine = load(folder, **options)
        with pytest.raises(CakeError, match=r"NaN or infinite|not finite|are not numbers"):
            engine.generate(ids=[10] * 60)


def test_a_memory_that_is_not_there_leaves_the_engine_usable(model_folder, monkeypatch):
    folder = model_folder()
    engine = load(folder, budget=24)
    chat = engine.chat()
    replies = [[piece.id for piece in chat.send("one " * 20, max_new_tokens=5)]]
    from cake_infer.engine import tenancy

    arena = tenancy.make_arena

    def refuse(layout, size, device):
        if size.staging > 1000:
            raise MemoryLimit("no memory")
        return arena(layout, size, device)

    monkeypatch.setattr(tenancy, "make_arena", refuse)
    for attempt in (
        lambda: engine.generate(ids=[10] * 2000, max_new_tokens=5),
        lambda: list(chat.send("two " * 1000, max_new_tokens=5)),
    ):
        with pytest.raises(MemoryLimit):
            attempt()
    assert len(engine.generate(ids=[10] * 50, max_new_tokens=5).ids) == 5
    replies.append([piece.id for piece in chat.send("three " * 20, max_new_tokens=5)])
    twin = load(folder, budget=24).chat()
    assert replies == [
        [piece.id for piece in twin.send(text, max_new_tokens=5)] for text in ("one " * 20, "three " * 20)
    ]


@pytest.fixture
def tokenized(monkeypatch):
    """How many characters each call of the tokenizer was given."""
    lengths, encode = [], Tokenizer.encode_with_literals

    def counted(self, text, *arguments, **keywords):
        lengths.append(len(text))
        return encode(self, text, *arguments, **keywords)

    monkeypatch.setattr(Tokenizer, "encode_with_literals", counted)
    return lengths


def test_a_text_that_cannot_fit_is_refused_after_a_part_of_it(model_folder, tokenized):
    with load(model_folder(), context=4000) as engine:
        chat = engine.chat()
        message = r"at least [\d,]+ tokens, but the model's context is 4,000.*the option rope_scaling"
        tokenized.clear()
        asks = (engine.stream, lambda text: engine.stream(messages=[{"role": "user", "content": text}]), chat.send)
        for ask in asks:
            with pytest.raises(PromptError, match=message):
                ask("the ferry leaves at seven, " * 100_000)
        assert sum(tokenized) < 3 * 100_000, "more was tokenized than was needed to see that it is too long"


@pytest.mark.parametrize("words", ["the ferry leaves at seven, ", "a", "\u00e9\u4e2d", "x  \n"])
def test_a_text_counted_in_pieces_never_has_more_tokens_than_the_whole(model_folder, words):
    with load(model_folder()) as engine:
        text = words * (300_000 // len(words))
        whole = len(engine.tokenizer.encode(text, add_bos=False))
        counted = list(token_counts(engine.tokenizer, text))
        assert counted[-1][0] == len(text)
        assert whole * 0.99 <= sum(tokens for _, tokens in counted) <= whole


def test_counting_a_long_text_can_be_broken_off(model_folder, tokenized):
    def leave(progress):
        assert progress.stage == "tokenize"
        raise KeyboardInterrupt

    with load(model_folder(max_position_embeddings=4_000_000)) as engine:
        chat = engine.chat()
        tokenized.clear()
        with pytest.raises(KeyboardInterrupt):
            chat.send("the ferry leaves at seven, " * 100_000, on_progress=leave)
        assert sum(tokenized) < 100_000
        assert chat.messages == []


def test_every_prompt_of_a_list_is_looked_at_before_the_first_reply(model_folder, monkeypatch):
    with load(model_folder()) as engine:
        monkeypatch.setattr(type(engine.runner), "generate", lambda *_, **__: pytest.fail("a reply was begun"))
        with pytest.raises(PromptError, match="not 3"):
            engine.generate(["a", 3])
        with pytest.raises(PromptError, match="lone surrogate"):
            engine.generate(["a", "\ud800"])
        with pytest.raises(OptionError, match="exactly one"):
            engine.generate(["a"], ids=[5])


def test_a_list_of_prompts_gives_what_each_gives_alone(model_folder):
    with load(model_folder()) as engine:
        results = engine.generate(["one of them", "and two"], max_new_tokens=4)
        alone = [engine.generate(text, max_new_tokens=4) for text in ("one of them", "and two")]
        assert [(result.ids, result.prompt_ids) for result in results] == [(r.ids, r.prompt_ids) for r in alone]


@pytest.mark.parametrize("use", ["__enter__", "chat", "stream"])
def test_a_closed_engine_says_so_at_once(model_folder, use):
    engine = load(model_folder())
    engine.close()
    with pytest.raises(CakeError, match="closed"):
        getattr(engine, use)(*["text"] * (use == "stream"))


def test_a_percentage_of_a_short_prompt_keeps_the_window_with_a_notice(model_folder, caplog):
    with load(model_folder(), budget="3.2%") as engine, caplog.at_level(logging.INFO):
        first = engine.generate(ids=[10] * 5, max_new_tokens=3)
        assert (first.stats.budget, first.stats.kept_tokens) == (8, 5)
        assert caplog.text.count("3.2% of 5 tokens is less than the window") == 1
        caplog.clear()
        assert engine.generate(ids=[10] * 1000, max_new_tokens=3).stats.budget == 32
        assert "window" not in caplog.text


def test_the_compiled_step_is_refused_before_weights_are_read_where_numba_is_missing(model_folder, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "numba" else found(name, *a))
    monkeypatch.setattr("cake_infer.engine.loading.load_decoder", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(BackendError, match=r"cake-infer\[cpu\]"):
        Engine.load(model_folder(), step="compiled")


def test_a_format_that_the_compiled_step_lacks_is_refused_at_load(model_folder):
    pytest.importorskip("numba")
    with pytest.raises(BackendError, match="float16"):
        Engine.load(model_folder(), step="compiled", kv_dtype="float16")


@pytest.mark.parametrize("name", ["config.json", "tiny.json"])
def test_random_weights_are_called_by_a_name(model_folder, caplog, name, tmp_path):
    folder = model_folder()
    file = folder / name
    if name != "config.json":
        file = tmp_path / name
        file.write_text((folder / "config.json").read_text())
    with caplog.at_level(logging.INFO):
        Engine.load(file, random_weights=True, step="eager").close()
    assert f"{'tiny' if name == 'tiny.json' else folder.name}: float32 weights" in caplog.text
