"""A reply out of what a policy kept is the one that an engine with that policy gives."""

from __future__ import annotations

import pytest
from cake_infer.cache.config import CacheConfig
from cake_infer.cache.policies import make_policy
from cake_infer.engine.evaluation.replies import greedy_reply
from cake_infer.engine.evaluation.study import Cell, read
from cake_infer.engine.sequence import Sequence

WINDOW, TOKENS = 8, 12
OPTIONS = [{"policy": "cake"}, {"policy": "snapkv"}, {"policy": "cake", "heads": "adaptive"}, {"policy": "full"}]


def cells(runner, budget):
    configs = [CacheConfig(window=WINDOW, **one) for one in OPTIONS]
    return [Cell(make_policy(config, runner.model, budget), budget) for config in configs]


def ids_of(tokens):
    return [token.id for token in tokens]


@pytest.mark.parametrize("suffix", [0, 4])
def test_replies_are_those_of_the_engine_with_that_policy(tmp_path, write_checkpoint, make_runner, random_ids, suffix):
    folder = write_checkpoint(tmp_path / "model", seed=5)
    prefix, question = random_ids(120), random_ids(suffix, seed=1)
    runner = make_runner(folder, policy="full", window=WINDOW, step="eager")
    reading = read(runner, prefix, cells(runner, 14), new_tokens=suffix + TOKENS)
    found = [greedy_reply(runner, reading, kept, question, TOKENS) for kept in reading.kept]
    assert len({tuple(reply) for reply in found}) > 2, "the policies say the same: nothing is compared"
    again = [greedy_reply(runner, reading, kept, question, TOKENS) for kept in reading.kept]
    assert again == found, "a reply has changed the full cache"
    for options, reply in zip(OPTIONS, found, strict=True):
        budget = {} if options["policy"] == "full" else {"budget": 14}
        real = make_runner(folder, window=WINDOW, step="eager", **budget, **options)
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


def test_a_stop_token_is_left_out_and_an_end_of_ones_own_is_not(tmp_path, write_checkpoint, make_runner, random_ids):
    runner = make_runner(write_checkpoint(tmp_path / "model", seed=5), policy="full", window=WINDOW, step="eager")
    reading = read(runner, random_ids(60), [], new_tokens=TOKENS)
    whole = greedy_reply(runner, reading, None, [], TOKENS)
    place = whole.index(whole[4])
    assert greedy_reply(runner, reading, None, [], TOKENS, stop_ids=frozenset({whole[4]})) == whole[:place]
    assert greedy_reply(runner, reading, None, [], TOKENS, ended=lambda ids: len(ids) == 3) == whole[:3]
    assert whole[0] not in greedy_reply(runner, reading, None, [], 1, not_first=frozenset(whole[:1]))
