"""Several sequences over one arena: each gets what it would get alone, whoever joins and leaves."""

from __future__ import annotations

import contextlib
import random

import pytest
import torch
from cake_infer.cache.layout import ArenaSize
from cake_infer.cache.shared import SharedArena
from cake_infer.engine import decode
from cake_infer.engine.batch import Batch
from cake_infer.engine.generation import GenerationConfig, resolve_generation
from cake_infer.engine.sequence import Sequence
from cake_infer.engine.timing import Timing
from cake_infer.errors import ArenaFull, BudgetError, CakeError, MemoryLimit, PromptError

FAMILIES = {
    "llama": {},
    "mistral, sliding": {"model_type": "mistral", "sliding_window": 16},
    "qwen2, half sliding": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 16,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3"},
    "gemma": {"model_type": "gemma"},
    "dynamic rope": {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 64},
}
PLAIN_CACHES = {
    "grow": {"budget": 12, "window": 4},
    "hold": {"budget": 12, "window": 4, "decode_policy": "hold"},
    "full": {"policy": "full"},
}
CACHES = {
    **PLAIN_CACHES,
    "heads that differ": {"budget": 12, "window": 4, "policy": "ada-kv", "decode_policy": "hold"},
    "evicting when all is read": {"budget": 12, "window": 4, "policy": "squeeze"},
}


def generation(**options):
    return resolve_generation(GenerationConfig(**{"max_new_tokens": 6, "seed": 0, **options}), {})


def alone(runner, ids, options, stop_ids=frozenset(), sequence=None):
    return list(runner.generate(sequence or Sequence(), list(ids), options, stop_ids=stop_ids))


class Requests:
    """Requests of a batch, and what has come of each."""

    def __init__(self, batch, stop_ids=frozenset()):
        self.batch, self.stop_ids = batch, stop_ids
        self.sequences, self.tokens, self.over = [], [], []

    def join(self, ids, options, **more):
        sequence = more.pop("sequence", None) or Sequence()
        self.batch.join(sequence, list(ids), options, stop_ids=self.stop_ids, **more)
        self.sequences.append(sequence)
        self.tokens.append([])
        self.over.append(False)
        return len(self.sequences) - 1

    def take(self, outcomes):
        for outcome in outcomes:
            number = next(i for i, sequence in enumerate(self.sequences) if sequence is outcome.sequence)
            assert not self.over[number], "a sequence went on after its end"
            if outcome.error is not None:
                raise outcome.error
            if outcome.token is not None:
                self.tokens[number].append(outcome.token)
            self.over[number] = outcome.finished

    def run(self):
        while len(self.batch):
            self.take(self.batch.step())

    def ids(self, number):
        return [token.id for token in self.tokens[number]]


def poison(batch):
    """Fill every slot in which no row is, spare slots too, with NaN."""
    arena = batch.arena
    free = torch.ones(arena.store.keys.shape[0], dtype=torch.bool)
    for member in arena.members:
        for start, length in zip(member.offset.flat, member.length.flat, strict=True):
            assert free[start : start + length].all(), "two rows share a slot"
            free[start : start + length] = False
    arena.store.keys[free] = arena.store.values[free] = float("nan")


@pytest.mark.parametrize("step", ["eager", "auto"])
@pytest.mark.parametrize("cache", list(PLAIN_CACHES))
@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_batch_gives_each_prompt_what_it_would_get_alone(
    tmp_path, write_checkpoint, make_runner, random_ids, family, cache, step
):
    compare_with_alone(tmp_path, write_checkpoint, make_runner, random_ids, family, cache, step)


@pytest.mark.parametrize("cache", ["heads that differ", "evicting when all is read"])
def test_rows_of_a_batch_may_differ_by_head_and_be_evicted_late(
    tmp_path, write_checkpoint, make_runner, random_ids, cache
):
    compare_with_alone(tmp_path, write_checkpoint, make_runner, random_ids, "llama", cache, "eager")


def compare_with_alone(tmp_path, write_checkpoint, make_runner, random_ids, family, cache, step):
    """Prompts of 1 to 70 tokens, each with its own reply length, sampling and stop tokens, eviction on."""
    folder = write_checkpoint(tmp_path / "model", **FAMILIES[family])
    runner = make_runner(folder, chunk=16, context=256, step=step, **CACHES[cache])
    chance = random.Random(f"{family} {cache}")
    for count in (1, 2, 5):
        prompts = [random_ids(chance.choice([1, 3, 9, 40, chance.randint(1, 70)]), seed=n) for n in range(count)]
        options = [
            generation(
                max_new_tokens=chance.randint(1, 12),
                temperature=chance.choice([0.0, 1.0]),
                seed=n,
                repetition_penalty=chance.choice([1.0, 1.3]),
                logprobs=2,
            )
            for n in range(count)
        ]
        plain = [alone(runner, *pair) for pair in zip(prompts, options, strict=True)]
        # some reply ends early: at a token that is in the middle of it
        stop_ids = frozenset({plain[0][len(plain[0]) // 2].id})
        single = [alone(runner, *pair, stop_ids) for pair in zip(prompts, options, strict=True)]
        with Batch(runner) as batch:
            requests = Requests(batch, stop_ids)
            for pair in zip(prompts, options, strict=True):
                requests.join(*pair)
            requests.take(batch.read())
            while len(batch):
                poison(batch)
                requests.take(batch.step())
        for number, expected in enumerate(single):
            got = requests.tokens[number]
            assert [(t.id, t.finish_reason) for t in got] == [(t.id, t.finish_reason) for t in expected], number
            for ours, theirs in zip(got, expected, strict=True):
                assert ours.logprobs == theirs.logprobs, "not bit for bit"


@pytest.mark.parametrize("family", list(FAMILIES))
def test_products_with_all_tokens_at_once_give_the_same_to_rounding(
    tmp_path, write_checkpoint, make_runner, random_ids, family
):
    """As on a GPU, where one product serves all."""
    runner = make_runner(write_checkpoint(tmp_path / "model", **FAMILIES[family]), budget=12, window=4, step="eager")
    counts = (30, 1, 9)

    def logits(together):
        with Batch(runner) as batch, torch.inference_mode():
            requests = Requests(batch)
            for count in counts:
                requests.join(random_ids(count), generation(max_new_tokens=20))
            batch.read()
            members, found = batch._members, []
            for step in range(5):
                arenas, sequences = [m.arena for m in members], [m.sequence for m in members]
                found.append(
                    decode.batch_step(runner.decoder, arenas, sequences, [step + 5, 9, 7], window=4, together=together)
                )
            return torch.stack(found)

    apart, at_once = logits(False), logits(True)
    assert apart.shape == (5, 3, 320)
    torch.testing.assert_close(at_once, apart, atol=1e-4, rtol=0)


@pytest.mark.parametrize("cache", list(PLAIN_CACHES))
def test_joins_and_leaves_midway_change_nothing_for_the_others(
    tmp_path, write_checkpoint, make_runner, random_ids, cache
):
    runner = make_runner(write_checkpoint(tmp_path / "model"), chunk=8, context=256, **CACHES[cache])
    for seed in range(4):
        chance = random.Random(seed)
        kinds = [(random_ids(chance.randint(1, 70), seed=n), chance.randint(1, 14)) for n in range(7)]
        options = [
            generation(max_new_tokens=new, temperature=chance.choice([0.0, 0.9]), seed=n)
            for n, (_, new) in enumerate(kinds)
        ]
        single = [[t.id for t in alone(runner, ids, option)] for (ids, _), option in zip(kinds, options, strict=True)]
        left = set()
        with Batch(runner, most=4) as batch:
            requests, coming = Requests(batch), list(range(7))
            while coming or len(batch):
                if coming and len(batch) < 4 and chance.random() < 0.6:
                    number = coming.pop(0)
                    assert requests.join(kinds[number][0], options[number]) == number
                elif len(batch) and chance.random() < 0.08:
                    number = chance.choice([n for n, over in enumerate(requests.over) if not over])
                    batch.leave(requests.sequences[number])
                    requests.over[number] = True
                    left.add(number)
                if all(member.reading is None for member in batch._members):
                    poison(batch)
                requests.take(batch.step())
            assert not batch.arena.members
            assert not batch.arena.length.any()
            assert not batch.arena.capacity.any()
        assert len(left) < 7
        for number, expected in enumerate(single):
            got = requests.ids(number)
            assert got == (expected[: len(got)] if number in left else expected), (seed, number)


def test_a_prefill_pauses_after_each_chunk_and_the_others_go_on_meanwhile(
    tmp_path, write_checkpoint, make_runner, random_ids
):
    folder = write_checkpoint(tmp_path / "model", dtype=torch.bfloat16)  # layers are widened by prefill and step both
    runner = make_runner(folder, chunk=8, budget=12, window=4, step="eager")
    option = generation(max_new_tokens=40)
    single = [[t.id for t in alone(runner, random_ids(count), option)] for count in (5, 64)]
    told = []
    with Batch(runner) as batch:
        requests = Requests(batch)
        requests.join(random_ids(5), option)
        requests.take(batch.step())
        before = len(requests.tokens[0])
        requests.join(random_ids(64), option, on_chunk=lambda *done: told.append(done))
        steps = 0
        while not requests.tokens[1]:
            count = len(told)
            requests.take(batch.step())
            steps += 1
            assert len(told) - count <= 3, "more than a chunk of tokens in all layers at once"
            assert len(told) < 24 or requests.tokens[1], "the last piece does not need a step of its own"
        assert told == [(layer, end, 64) for layer in range(3) for end in range(8, 65, 8)]
        assert len(requests.tokens[0]) - before == steps >= 8
        requests.run()
    assert [requests.ids(0), requests.ids(1)] == single


def test_kept_rows_do_not_depend_on_neighbours(tmp_path, write_checkpoint, make_runner, random_ids, kept_positions):
    runner = make_runner(write_checkpoint(tmp_path / "model"), budget=12, window=4)
    prompts, kept = [random_ids(count) for count in (3, 9, 40)], []
    for ids in prompts:
        sequence = Sequence()
        runner.feed(sequence, ids, runner.prepare(sequence, len(ids), 1))
        kept.append(kept_positions(runner))
    with Batch(runner) as batch:
        requests = Requests(batch)
        for ids in prompts:
            requests.join(ids, generation())
        requests.take(batch.read())
        for member, expected in zip(batch.arena.members, kept, strict=True):
            assert member.size == ArenaSize(0, 0, int(member.capacity.sum())), "staging is free again"
            for (layer, head), positions in expected.items():
                assert member.row(layer, head)[2].tolist() == positions


def test_what_does_not_fit_is_told_before_anything_changes(tmp_path, write_checkpoint, make_runner, random_ids):
    runner = make_runner(write_checkpoint(tmp_path / "model"), context=256, budget=16, window=4)
    option = generation(max_new_tokens=8)
    single = [t.id for t in alone(runner, random_ids(60), option)]
    with Batch(runner) as batch:
        requests = Requests(batch)
        requests.join(random_ids(60), option)
        requests.take(batch.read())
        limit = batch.arena.nbytes + 100
    with Batch(runner, limit=limit) as batch:
        requests = Requests(batch)
        requests.join(random_ids(60), option)
        requests.take(batch.step())
        refused = {
            "60 prompt and 190 new": (random_ids(60), generation(max_new_tokens=190), MemoryLimit),
            "as long as the first": (random_ids(60), option, ArenaFull),
            "too long": (random_ids(256), option, PromptError),
            "empty": ([], option, PromptError),
        }
        tables = batch.arena.offset.copy(), batch.arena.capacity.copy(), batch.arena.nbytes
        for ids, wanted, error in refused.values():
            sequence = Sequence()
            with pytest.raises(error) as told:
                requests.join(ids, wanted, sequence=sequence)
            assert type(told.value) is error
            assert sequence == Sequence()
            assert len(batch) == 1
        assert (batch.arena.offset == tables[0]).all()
        assert (batch.arena.capacity == tables[1]).all()
        assert batch.arena.nbytes == tables[2] <= limit
        with pytest.raises(ArenaFull, match=r"needs \d+ KiB .* more than the \d+ KiB allowed"):
            requests.join(random_ids(60), option)
        with pytest.raises(BudgetError, match="the minimum is 4"):
            batch.join(Sequence(budget=2), random_ids(60), option)
        requests.run()
        assert requests.ids(0) == single
        again = requests.join(random_ids(60), option)  # the first one's room is free
        requests.run()
        assert requests.ids(again) == single


def test_more_sequences_than_a_batch_may_have_are_refused(tmp_path, write_checkpoint, make_runner, random_ids):
    runner = make_runner(write_checkpoint(tmp_path / "model"))
    with Batch(runner, most=2) as batch:
        sequence = Sequence()
        batch.join(sequence, random_ids(3), generation())
        with pytest.raises(CakeError, match="in the batch already"):
            batch.join(sequence, random_ids(3), generation())
        batch.join(Sequence(), random_ids(3), generation())
        with pytest.raises(ArenaFull, match="2 sequences"):
            batch.join(Sequence(), random_ids(3), generation())


def test_a_fixed_arena_is_never_moved_and_never_outgrown(tmp_path, write_checkpoint, make_runner, random_ids):
    runner = make_runner(write_checkpoint(tmp_path / "model"), budget=12, window=4, kv_dtype=torch.bfloat16)
    limit = 120_000
    with Batch(runner, limit=limit, fixed=True) as batch:
        store = batch.arena.store
        assert 0.98 * limit < batch.arena.nbytes <= limit
        joined, requests = 0, Requests(batch)
        option = generation(max_new_tokens=20)
        with contextlib.suppress(ArenaFull):
            while True:
                requests.join(random_ids(50, seed=joined), option)
                joined += 1
        assert joined > 1
        with pytest.raises(ArenaFull, match=r"more than the 117 KiB allowed"):
            requests.join(random_ids(50), option)
        requests.run()
        assert batch.arena.store is store
        with pytest.raises(MemoryLimit, match="send a shorter text"):
            requests.join(random_ids(1000), generation())


def test_an_arena_that_grows_as_sequences_come_grows_once_for_all_who_wait(
    tmp_path, write_checkpoint, make_runner, random_ids, monkeypatch
):
    runner = make_runner(write_checkpoint(tmp_path / "model"), budget=12, window=4)
    grown, grow = [], SharedArena._grow
    monkeypatch.setattr(SharedArena, "_grow", lambda self, needed: (grown.append(needed), grow(self, needed))[1])
    option = generation(max_new_tokens=20)
    prompts = [random_ids(30 + 5 * i, seed=i) for i in range(6)]
    alone_ids = [[token.id for token in alone(runner, ids, option)] for ids in prompts]
    with Batch(runner) as batch:
        requests = Requests(batch)
        for ids in prompts[:4]:
            requests.join(ids, option)
        requests.take(batch.read())
        assert len(grown) == 1
        for ids in prompts[4:]:
            requests.join(ids, option)
        requests.run()
        assert len(grown) == 2
    assert [requests.ids(number) for number in range(6)] == alone_ids


def test_a_failing_sequence_leaves_and_the_others_go_on(tmp_path, write_checkpoint, make_runner, random_ids):
    runner = make_runner(write_checkpoint(tmp_path / "model"), context=256)
    single = [t.id for t in alone(runner, random_ids(9), generation(max_new_tokens=9))]
    with Batch(runner) as batch:
        good, bad = Sequence(), Sequence()
        for sequence in (good, bad):
            batch.join(sequence, random_ids(9), generation(max_new_tokens=9))
        ids = [outcome.token.id for outcome in batch.read() if outcome.sequence is good]
        rows = next(member.arena for member in batch._members if member.sequence is bad)
        rows.row(0, 0)[1].fill_(float("nan"))
        outcomes = batch.step()
        failed = next(outcome for outcome in outcomes if outcome.sequence is bad)
        assert "NaN" in str(failed.error)
        assert failed.finished
        assert bad.spoilt
        assert len(batch) == 1
        ids += [outcome.token.id for outcome in outcomes if outcome.sequence is good]
        while len(batch):
            ids += [outcome.token.id for outcome in batch.step()]
    assert ids == single


def test_a_step_or_a_callback_that_raises_leaves_a_usable_engine(
    tmp_path, write_checkpoint, make_runner, random_ids, monkeypatch
):
    runner = make_runner(write_checkpoint(tmp_path / "model"), chunk=8, budget=12, window=4)
    option = generation(max_new_tokens=9)
    single = [[t.id for t in alone(runner, random_ids(count), option)] for count in (9, 30)]

    def stop(*_, **__):
        raise KeyboardInterrupt

    with Batch(runner) as batch:
        requests = Requests(batch)
        requests.join(random_ids(9), option)
        requests.take(batch.read())
        broken = Sequence()
        batch.join(broken, random_ids(30), option, on_chunk=stop)
        with pytest.raises(KeyboardInterrupt):
            batch.read()
        assert broken.spoilt
        assert len(batch) == 1
        requests.join(random_ids(30), option)
        requests.run()
        assert [requests.ids(0), requests.ids(1)] == single
        requests.join(random_ids(9), option)
        requests.take(batch.read())
        step = runner.batch_step
        monkeypatch.setattr(runner, "batch_step", stop, raising=False)
        with pytest.raises(KeyboardInterrupt):
            batch.step()
        monkeypatch.setattr(runner, "batch_step", step, raising=False)
        assert len(batch) == 0
        requests.join(random_ids(30), option)
        requests.run()
        assert requests.ids(3) == single[1]
    assert [t.id for t in alone(runner, random_ids(9), option)] == single[0]


@pytest.mark.parametrize("step", ["eager", "auto"])
@pytest.mark.parametrize("cache", ["grow", "hold"])
def test_a_conversation_goes_on_in_a_batch_and_out_of_it(
    tmp_path, write_checkpoint, make_runner, random_ids, cache, step
):
    """Turns of one text, alone and in a batch by turns, beside others; its rows are set aside in between."""
    folder = write_checkpoint(tmp_path / "model")
    turns = [random_ids(count, seed=count) for count in (50, 3, 20, 1)]
    option = generation(max_new_tokens=5)
    plain = make_runner(folder, context=256, step=step, **CACHES[cache])
    sequence, expected = Sequence(), []
    for turn in turns:
        expected.append([t.id for t in plain.generate(sequence, turn, option)])
    runner = make_runner(folder, context=256, step=step, **CACHES[cache])
    sequence, got = Sequence(), []
    for number, turn in enumerate(turns):
        if number == 2:
            got.append([t.id for t in runner.generate(sequence, turn, option)])
            continue
        with Batch(runner) as batch:
            requests = Requests(batch)
            for count in (30, 4):
                requests.join(random_ids(count), option)
            mine = requests.join(turn, option, sequence=sequence, keep=True)
            requests.run()
            got.append(requests.ids(mine))
    assert got == expected


def test_a_single_reply_may_run_between_the_steps_of_a_batch(tmp_path, write_checkpoint, make_runner, random_ids):
    runner = make_runner(write_checkpoint(tmp_path / "model"), budget=12, window=4)
    option = generation(max_new_tokens=9)
    single = [[t.id for t in alone(runner, random_ids(count), option)] for count in (9, 30)]
    with Batch(runner) as batch:
        requests = Requests(batch)
        requests.join(random_ids(9), option)
        beside = runner.generate(Sequence(), random_ids(30), option)
        ids = []
        while len(batch):
            requests.take(batch.step())
            ids += [token.id for token in [next(beside, None)] if token is not None]
        ids += [token.id for token in beside]
    assert [requests.ids(0), ids] == single


def test_memory_is_given_back_and_counts_beside_single_replies(tmp_path, write_checkpoint, make_runner, random_ids):
    runner = make_runner(write_checkpoint(tmp_path / "model"), budget=12, window=4, kv_memory="200KiB")
    alone(runner, random_ids(30), generation())
    assert runner.tenancy.arena.nbytes > 5_000
    batch = Batch(runner, limit=10**9, fixed=True)
    assert runner.tenancy.arena.nbytes < 1000, "the arena of single replies is free while nobody uses it"
    assert batch.arena.nbytes <= 200 * 1024
    with pytest.raises(MemoryLimit, match=r"200KiB allowed \(\d+ bytes beside a batch\)"):
        alone(runner, random_ids(100), generation())
    batch.close()
    batch.close()
    assert batch.arena.nbytes < 1000
    assert len(alone(runner, random_ids(100), generation())) == 6


def test_no_new_tokens_finish_without_a_token(tmp_path, write_checkpoint, make_runner, random_ids):
    runner = make_runner(write_checkpoint(tmp_path / "model"))
    timing = Timing()
    with Batch(runner) as batch:
        batch.join(Sequence(), random_ids(9), generation(max_new_tokens=0), timing=timing)
        (outcome,) = batch.read()
        assert outcome.token is None
        assert outcome.finished
        assert len(batch) == 0
    assert (timing.prompt_tokens, timing.total, timing.decode_steps) == (9, 9, 0)


def test_a_sequence_whose_rows_are_elsewhere_or_gone_is_not_gone_on_with(
    tmp_path, write_checkpoint, make_runner, random_ids
):
    runner, option = make_runner(write_checkpoint(tmp_path / "model")), generation(max_new_tokens=3)
    sequence = Sequence()
    with Batch(runner) as batch, Batch(runner) as other:
        batch.join(sequence, random_ids(9), option)
        batch.step()
        with pytest.raises(CakeError, match="no rows to go on from"):
            alone(runner, random_ids(3), option, sequence=sequence)
        with pytest.raises(CakeError, match="no rows to go on from"):
            other.join(sequence, random_ids(3), option)
        while len(batch):
            batch.step()
        with pytest.raises(CakeError, match="keep=True"):
            batch.join(sequence, random_ids(3), option)
