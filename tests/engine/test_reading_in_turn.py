"""Prompts of a batch that are read in turn: each reply is what it would be alone, and a short one does not wait."""

from __future__ import annotations

import random

import pytest
import torch
from cake_infer.engine.batch import Batch
from cake_infer.engine.generation import GenerationConfig, resolve_generation
from cake_infer.engine.sequence import Sequence
from cake_infer.errors import ArenaFull

CACHES = {
    "grow": {"budget": 12, "window": 4},
    "hold": {"budget": 12, "window": 4, "decode_policy": "hold"},
    "full": {"policy": "full"},
}


def options(seed, new):
    return resolve_generation(GenerationConfig(max_new_tokens=new, temperature=0.9, seed=seed, logprobs=1), {})


def run(batch, coming, chance=None):
    """Let requests join at random moments; the tokens of each, and the order in which their first ones came."""
    tokens, order, sequences = {}, [], {}
    coming = list(coming)
    while coming or len(batch):
        while coming and (chance is None or not len(batch) or chance.random() < 0.3) and len(batch) < batch.most:
            number, ids, config = coming[0]
            sequence = Sequence()
            try:
                batch.join(sequence, ids, config)
            except ArenaFull:  # it waits until others have left
                assert len(batch)
                break
            sequences[id(sequence)] = (number, sequence)
            del coming[0]
        poison(batch)
        for outcome in batch.step():
            assert outcome.error is None
            number = sequences[id(outcome.sequence)][0]
            order += [number] * (number not in tokens)
            tokens.setdefault(number, []).append((outcome.token.id, outcome.token.logprobs))
    return tokens, order


def poison(batch):
    """Fill every slot that belongs to nobody with NaN; a span that is being read is left alone."""
    arena = batch.arena
    free = torch.ones(arena.store.keys.shape[0], dtype=torch.bool)
    for member in arena.members:
        if member.unsettled:
            assert free[member.first : member.span_end].all(), "a span that is read begins inside of another one"
            free[member.first : member.span_end] = False
        for start, length in zip(member.offset.flat, member.length.flat, strict=True):
            free[start : start + length] = False
    arena.store.keys[free] = arena.store.values[free] = float("nan")


@pytest.mark.parametrize("cache", list(CACHES))
def test_in_turn_each_gets_what_it_would_get_alone(tmp_path, write_checkpoint, make_runner, random_ids, cache):
    runner = make_runner(write_checkpoint(tmp_path / "model"), chunk=8, context=256, step="eager", **CACHES[cache])
    chance = random.Random(cache)
    requests = [
        (n, random_ids(chance.choice([2, 9, 40, 120]), seed=n), options(n, chance.randint(1, 9))) for n in range(9)
    ]
    alone = {
        n: [(token.id, token.logprobs) for token in runner.generate(Sequence(), ids, config)]
        for n, ids, config in requests
    }
    for limit in (1_000_000, 160_000):  # in the smaller one there is not always room for two that are read
        with Batch(runner, most=4, limit=limit, fixed=True, readers=2, slice_s=0.0) as batch:
            tokens, _ = run(batch, requests, random.Random(1))
        assert tokens == alone


def test_a_short_prompt_is_read_beside_a_long_one_and_equal_ones_in_order(
    tmp_path, write_checkpoint, make_runner, random_ids
):
    runner = make_runner(write_checkpoint(tmp_path / "model"), chunk=8, context=1024, step="eager", budget=12, window=4)

    def first_tokens(lengths, readers, limit=2_000_000):
        requests = [(n, random_ids(length, seed=n), options(n, 1)) for n, length in enumerate(lengths)]
        with Batch(runner, most=4, limit=limit, fixed=True, readers=readers) as batch:
            sequence = Sequence()
            batch.join(sequence, requests[0][1], requests[0][2])
            batch.step()  # the first one is being read when the others come
            steps, order = {}, []
            others = {id(sequence): (0, sequence)}
            for number, ids, config in requests[1:]:
                other = Sequence()
                others[id(other)] = (number, other)
                batch.join(other, ids, config)
            count = 0
            while len(batch):
                count += 1
                for outcome in batch.step():
                    number = others[id(outcome.sequence)][0]
                    steps[number] = count
                    order.append(number)
        return order, steps

    order, steps = first_tokens([400, 9, 300], readers=2)
    assert order == [1, 2, 0] or order == [1, 0, 2]
    assert steps[1] <= 4, "two chunks of its own, in turn with the long one's"
    assert first_tokens([400, 9], readers=1)[0] == [0, 1]
    assert first_tokens([40, 40, 40], readers=2)[0] == [0, 1, 2]
    # without room behind the long one the short one waits, and nothing is lost
    assert first_tokens([400, 9], readers=2, limit=66_000)[0] == [0, 1]


def test_a_slice_ends_a_chunk_early_while_others_are_written(
    tmp_path, write_checkpoint, make_runner, random_ids, monkeypatch
):
    """By a clock that the test moves: every piece takes a second."""
    runner = make_runner(write_checkpoint(tmp_path / "model"), chunk=8, context=512, step="eager", budget=12, window=4)
    layers = runner.decoder.config.num_layers
    now = [0.0]
    monkeypatch.setattr("cake_infer.engine.batch.time.perf_counter", lambda: now[0])

    def tick(layer, done, tokens):
        now[0] += 1.0
        pieces.append(layer)

    for slice_s, expected in ((0.0, 1), (1.5, 2), (None, layers)):
        pieces: list[int] = []
        with Batch(runner, most=2, limit=1_000_000, fixed=True, slice_s=slice_s) as batch:
            batch.join(Sequence(), random_ids(5), options(0, 50))
            batch.read()
            batch.join(Sequence(), random_ids(100), options(0, 1), on_chunk=tick)
            batch.step()
            assert len(pieces) == expected
        pieces.clear()
        with Batch(runner, most=2, limit=1_000_000, fixed=True, slice_s=slice_s) as batch:
            batch.join(Sequence(), random_ids(100), options(0, 1), on_chunk=tick)
            batch.step()
            assert len(pieces) == layers, "nobody waits for it"


def test_several_short_prompts_are_read_in_one_slice(tmp_path, write_checkpoint, make_runner, random_ids, monkeypatch):
    runner = make_runner(write_checkpoint(tmp_path / "model"), chunk=8, context=512, step="eager", budget=12, window=4)
    layers = runner.decoder.config.num_layers
    now = [0.0]
    monkeypatch.setattr("cake_infer.engine.batch.time.perf_counter", lambda: now[0])

    def tick(layer, done, tokens):
        now[0] += 1.0

    for slice_s, expected in ((None, 1), (layers - 0.5, 1), (2 * layers - 0.5, 2), (10.0 * layers, 4)):
        with Batch(runner, most=5, limit=1_000_000, fixed=True, slice_s=slice_s) as batch:
            batch.join(Sequence(), random_ids(5), options(0, 50))
            batch.read()
            for number in range(4):
                batch.join(Sequence(), random_ids(6, seed=number), options(number, 2), on_chunk=tick)
            assert len(batch.step()) == 1 + expected, slice_s
