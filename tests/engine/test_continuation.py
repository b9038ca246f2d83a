"""Continuations are scored behind what is kept of their context, as the tokens of a reply there would be."""

from __future__ import annotations

import math

import pytest
import torch
from cake_infer import BudgetError, GenerationConfig, PromptError
from cake_infer.engine.continuation import score_continuations
from cake_infer.engine.generation import resolve_generation
from cake_infer.engine.sequence import Sequence

CLOSE = {"rtol": 0, "atol": 1e-4}


def numbers(scored):
    return [torch.tensor(one.logprobs) for one in scored]


def log_likelihoods(logits, ids):
    """`logits` `[n, vocab]` at the places of `ids`."""
    return torch.log_softmax(logits.double(), -1).gather(1, torch.tensor(ids)[:, None])[:, 0]


@pytest.mark.parametrize("policy", ["full", "cake", "ada-kv"])
def test_each_token_sees_what_was_kept_of_the_context_and_its_continuation_so_far(
    model_folder, make_runner, dense, random_ids, kept_positions, policy
):
    folder = model_folder()
    options = {} if policy == "full" else {"budget": 24, "window": 8}
    runner = make_runner(folder, policy=policy, step="eager", **options)
    context, tails = random_ids(150), [random_ids(n, seed=n) for n in (40, 1, 7)]
    scored = score_continuations(runner, context, tails)

    read = make_runner(folder, policy=policy, step="eager", **options)  # which rows a prompt leaves
    sequence = Sequence()
    read.prepare(sequence, len(context), 1)
    read.feed(sequence, context, 1)
    kept = kept_positions(read)
    lengths = {len(row) for row in kept.values()}
    assert lengths == {150} if policy == "full" else sum(map(len, kept.values())) == 24 * len(kept)
    assert policy != "ada-kv" or len({len(kept[0, head]) for head in (0, 1)}) == 2  # ragged within a layer
    for tail, found in zip(tails, numbers(scored), strict=True):
        whole = [*context, *tail]
        masks = {}
        for row, positions in kept.items():
            mask = torch.ones(len(whole), len(whole), dtype=torch.bool)
            mask[len(context) :, : len(context)] = False
            mask[len(context) :, positions] = True
            masks[row] = mask
        # the first token comes out of the prompt itself, before anything is evicted
        reference = log_likelihoods(dense(folder).logits(whole, masks)[len(context) - 1 : -1], tail)
        torch.testing.assert_close(found.double(), reference, **CLOSE)


@pytest.mark.parametrize(
    ("step", "more"),
    [
        ("eager", {"decode_policy": "grow"}),
        ("auto", {"decode_policy": "grow"}),
        ("eager", {"decode_policy": "hold"}),
        ("auto", {"decode_policy": "hold"}),
        ("eager", {"kv_bits": 4}),
        ("eager", {"kv_bits": 4, "decode_policy": "hold"}),
    ],
)
def test_they_are_the_log_likelihoods_that_a_reply_of_these_tokens_has(
    model_folder, make_runner, force, random_ids, step, more
):
    options = {"budget": 64, "window": 32, "step": step, **more}
    folder = model_folder(hidden_size=64, head_dim=32, num_attention_heads=6)
    context, tail = random_ids(150), random_ids(80, seed=1)
    (scored,) = score_continuations(make_runner(folder, **options), context, [tail])
    seen = force(tail)
    reply = make_runner(folder, **options)
    generation = resolve_generation(GenerationConfig(max_new_tokens=80, temperature=0.0), None)
    assert [token.id for token in reply.generate(Sequence(), context, generation)] == tail
    torch.testing.assert_close(numbers([scored])[0].double(), log_likelihoods(torch.stack(seen), tail), **CLOSE)
    other = {**options, "kv_bits": None, "decode_policy": "grow" if more.get("decode_policy") == "hold" else "hold"}
    (different,) = score_continuations(make_runner(folder, **other), context, [tail])
    assert abs(sum(different.logprobs) - sum(scored.logprobs)) > 0.01


@pytest.mark.parametrize("decode_policy", ["grow", "hold"])
def test_continuations_of_one_context_do_not_know_of_each_other(model_folder, make_runner, random_ids, decode_policy):
    folder = model_folder()
    runner = make_runner(folder, budget=24, window=8, decode_policy=decode_policy, step="eager")
    context, tails = random_ids(100), [random_ids(n, seed=n) for n in (9, 30, 1, 2)]
    together = score_continuations(runner, context, tails)
    assert together == score_continuations(runner, context, tails[::-1])[::-1]
    for tail, scored in zip(tails, together, strict=True):
        fresh = make_runner(folder, budget=24, window=8, decode_policy=decode_policy, step="eager")
        alone = score_continuations(fresh, context, [tail])[0]
        torch.testing.assert_close(*numbers([alone, scored]), rtol=0, atol=1e-5)


def test_greedy_means_that_every_token_is_the_likeliest(model_folder, make_runner, random_ids):
    runner = make_runner(model_folder(), budget=24, window=8, step="eager")
    context = random_ids(100)
    generation = resolve_generation(GenerationConfig(max_new_tokens=12, temperature=0.0), None)
    reply = [token.id for token in runner.generate(Sequence(), context, generation)]
    changed = [[*reply[:at], (reply[at] + 1) % 300, *reply[at + 1 :]] for at in (0, 5, 11)]
    scored = score_continuations(runner, context, [reply, reply[:1], *changed])
    assert [one.greedy for one in scored] == [True, True, False, False, False]
    assert all(len(one.logprobs) == n for one, n in zip(scored, (12, 1, 12, 12, 12), strict=True))
    assert all(value < 0 and math.isfinite(value) for one in scored for value in one.logprobs)


def test_a_long_continuation_is_never_kept_layer_by_layer(model_folder, make_runner, random_ids):
    runner = make_runner(model_folder(num_hidden_layers=8), budget=24, window=8, step="eager")
    score_continuations(runner, random_ids(100), [random_ids(2000, seed=1)])
    layout = runner.layout
    one_layer = 2 * layout.num_kv_heads * 2100 * layout.head_dim * 4
    assert runner.tenancy.arena.store.nbytes < 2 * one_layer  # eight would be four times as much


def test_what_does_not_fit_is_refused_and_the_runner_goes_on(model_folder, make_runner, random_ids):
    runner = make_runner(model_folder(max_position_embeddings=128), budget=24, window=8, step="eager")
    before = score_continuations(runner, random_ids(60), [[7, 8, 9]])
    with pytest.raises(PromptError, match="129 tokens, but the model's context is 128"):
        score_continuations(runner, random_ids(100), [[5], random_ids(29)])
    with pytest.raises(PromptError, match="a continuation is empty"):
        score_continuations(runner, random_ids(60), [[5], []])
    with pytest.raises(PromptError, match="the prompt is empty"):
        score_continuations(runner, [], [[5]])
    small = make_runner(model_folder("other"), kv_memory="64KiB", window=8, step="eager")
    with pytest.raises(BudgetError, match="a KV memory of 64 KiB is too small"):
        score_continuations(small, random_ids(100), [random_ids(3000, seed=1)])
    assert score_continuations(runner, random_ids(60), [[7, 8, 9]]) == before
    assert len(score_continuations(small, random_ids(100), [[5, 6]])) == 1
