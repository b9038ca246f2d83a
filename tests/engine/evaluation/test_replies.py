"""A reply out of what a policy kept is the one that an engine with that policy gives, whoever is decoded beside it."""

from __future__ import annotations

import pytest
from cake_infer.cache.config import CacheConfig
from cake_infer.cache.policies import make_policy
from cake_infer.engine.engine import Engine
from cake_infer.engine.evaluation import memory, replies
from cake_infer.engine.evaluation.replies import greedy_replies
from cake_infer.engine.evaluation.study import Cell, read
from cake_infer.engine.sequence import Sequence

WINDOW, TOKENS = 8, 12
OPTIONS = [
    {"policy": "full"},
    {"policy": "cake"},
    {"policy": "snapkv"},
    {"policy": "cake", "heads": "adaptive"},
    {"policy": "full"},
]


def cells(runner, budget):
    configs = [CacheConfig(window=WINDOW, **one) for one in OPTIONS]
    return [Cell(make_policy(config, runner.model, budget), budget) for config in configs]


@pytest.mark.parametrize("step", ["eager", "compiled"])
@pytest.mark.parametrize("suffix", [0, 4])
def test_replies_are_those_of_the_engine_with_that_policy(
    tmp_path, write_checkpoint, make_runner, random_ids, suffix, step
):
    if step == "compiled":
        pytest.importorskip("numba")
    folder = write_checkpoint(tmp_path / "model", seed=5)
    prefix, question = random_ids(120), random_ids(suffix, seed=1)
    runner = make_runner(folder, policy="full", window=WINDOW, step=step)
    reading = read(runner, prefix, cells(runner, 14), new_tokens=suffix + TOKENS)
    found = greedy_replies(runner, reading, reading.kept, question, TOKENS)
    assert len({tuple(reply) for reply in found}) > 2, "the policies say the same: nothing is compared"
    again = greedy_replies(runner, reading, reading.kept, question, TOKENS)
    assert again == found, "a reply has changed the full cache"
    for options, reply in zip(OPTIONS, found, strict=True):
        budget = {} if options["policy"] == "full" else {"budget": 14}
        real = make_runner(folder, window=WINDOW, step=step, **budget, **options)
        sequence = Sequence()
        limit = real.prepare(sequence, len(prefix), suffix + TOKENS)
        logits = real.feed(sequence, prefix, limit)
        arena, expected = real.tenancy.arena, []
        for token in question:
            logits = real.step(arena, sequence, token, window=WINDOW)
        for _ in range(TOKENS):
            expected.append(int(logits.argmax()))
            logits = real.step(arena, sequence, expected[-1], window=WINDOW)
        assert reply == expected, options


def test_as_many_are_decoded_together_as_hold_no_more_than_the_full_cache(
    tmp_path, write_checkpoint, make_runner, random_ids, monkeypatch
):
    runner = make_runner(write_checkpoint(tmp_path / "model", seed=5), policy="full", window=WINDOW, step="eager")
    reading = read(runner, random_ids(120), cells(runner, 50), new_tokens=TOKENS)
    sizes, shared = [], replies.SharedArena

    def counted(*args, batch, **options):
        sizes.append(batch)
        return shared(*args, batch=batch, **options)

    monkeypatch.setattr(replies, "SharedArena", counted)
    one_by_one = [greedy_replies(runner, reading, [kept], [], TOKENS)[0] for kept in reading.kept]
    sizes.clear()
    assert greedy_replies(runner, reading, reading.kept, [], TOKENS) == one_by_one
    assert sizes == [2, 1, 1], "two of 50 tokens are less than 120, three are not; the full cache speaks once"


def test_a_stop_token_is_left_out_and_an_end_of_ones_own_is_not(tmp_path, write_checkpoint, make_runner, random_ids):
    runner = make_runner(write_checkpoint(tmp_path / "model", seed=5), policy="full", window=WINDOW, step="eager")
    reading = read(runner, random_ids(60), cells(runner, 14)[:2], new_tokens=TOKENS)
    whole, other = greedy_replies(runner, reading, reading.kept, [], TOKENS)
    stop = next(token for token in whole[3:] if token not in other and token != whole[0])
    place = whole.index(stop)
    found = greedy_replies(runner, reading, reading.kept, [], TOKENS, stop_ids=frozenset({stop}))
    assert found == [whole[:place], other], "one is over before the other"
    found = greedy_replies(runner, reading, reading.kept, [], TOKENS, ended=lambda ids: len(ids) == 3)
    assert found == [whole[:3], other[:3]]
    found = greedy_replies(runner, reading, [None], [], 1, not_first=frozenset(whole[:1]))
    assert whole[0] not in found[0]


def test_the_caches_that_replies_are_written_from_are_counted(model_folder, monkeypatch):
    plans = []
    monkeypatch.setattr(memory, "check_memory", lambda plan, available: plans.append(plan))
    with Engine.load(model_folder(), policy="full", step="eager") as engine:
        for written in (False, True):
            memory.check_study(engine, 300, 20, [], 1, replies=written)
        one, more = (memory.check_study(engine, 300, 20, [engine.cache] * n, n) for n in (1, 2))
    assert plans[1].chunk - plans[0].chunk == 2 * plans[0].arena > 0
    assert "with 1 policy at 1 budget it needs" in one
    assert "with 2 policies at 2 budgets it needs" in more
