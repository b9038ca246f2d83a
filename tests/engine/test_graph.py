"""Decoding ahead: the step of a CUDA graph, run uncaptured on a CPU, against the eager step, and what is undone."""

from __future__ import annotations

import logging
import random

import pytest
import torch
from cake_infer.cache.config import CacheConfig
from cake_infer.engine.attention import Sdpa
from cake_infer.engine.attention import rows as plain
from cake_infer.engine.batch import Batch
from cake_infer.engine.capture import Uncaptured
from cake_infer.engine.device_sampling import DeviceSampler, Kind
from cake_infer.engine.device_step import DeviceState, DeviceStep
from cake_infer.engine.generation import GenerationConfig, resolve_generation
from cake_infer.engine.graph import Ahead
from cake_infer.engine.picker import Picker
from cake_infer.engine.runner import Runner
from cake_infer.engine.sampling import NOT_FINITE, sample
from cake_infer.engine.sequence import Sequence
from cake_infer.engine.stepper import GraphStep
from cake_infer.errors import BackendError, CakeError
from cake_infer.models.config import read_config
from cake_infer.models.packed import as_quantised
from cake_infer.models.weights import load_decoder
from torch.utils._python_dispatch import TorchDispatchMode

FAMILIES = {
    "llama": {},
    "mistral, sliding": {"model_type": "mistral", "sliding_window": 16},
    "qwen3": {"model_type": "qwen3"},
    "gemma": {"model_type": "gemma"},
    "dynamic rope": {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 64},
}
CACHES = {
    "grow": {"budget": 12, "window": 4},
    "hold": {"budget": 12, "window": 4, "decode_policy": "hold"},
    "full": {"policy": "full"},
}
OPTIONS = {
    "greedy": {},
    "greedy, penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "sampled": {"temperature": 1.0},
    "filtered": {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    "all": {"temperature": 1.3, "top_k": 100, "top_p": 0.95, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
}


class Ragged(Sdpa):
    """The plain form of ragged attention."""

    ragged = True
    store_newcomers = staticmethod(plain.store_newcomers)
    attend_rows = staticmethod(plain.attend_rows)
    exchange_least_attended = staticmethod(plain.exchange_least_attended)


class Counted(Uncaptured):
    """Runs the body as a capture would, where nobody sits, and counts."""

    def __init__(self):
        self.captured = self.forgotten = 0

    def __call__(self, body):
        self.captured += 1
        body()
        body()
        return body

    def forget(self):
        self.forgotten += 1


@pytest.fixture
def make_graphed(make_runner):
    """A runner whose step is a graph's, uncaptured, with the keywords of `make_runner` and a `capture`."""

    def make(folder, *, capture=None, attention=None, **options):
        runner = make_runner(folder, step="eager", **options)
        runner.attention = attention or Ragged()
        ahead = Ahead(
            runner.decoder,
            runner.attention,
            window=runner.cache.window,
            hold=runner.hold,
            valid=runner.valid_ids,
            unused=runner.unused,
            capture=capture or Counted(),
        )
        runner.step = GraphStep(runner.decoder, runner.attention, ahead)
        return runner

    return make


def generation(**options):
    return resolve_generation(GenerationConfig(**{"max_new_tokens": 12, "seed": 5, **options}), {})


def reply(runner, sequence, ids, options, stop_ids=frozenset()):
    return list(runner.generate(sequence, list(ids), options, stop_ids=stop_ids))


def state_of(runner, sequence):
    """Everything that a reply leaves behind for the next turn; rows in an order of their own."""
    with runner.access.alone():
        runner.tenancy.activate(sequence)
    arena, rows = runner.tenancy.arena, {}
    for layer in range(arena.layout.num_layers):
        for head in range(arena.layout.num_kv_heads):
            keys, values, position = arena.row(layer, head)
            order = position.argsort()
            rows[layer, head] = (position[order].tolist(), keys[order].clone(), values[order].clone())
    ring = None if sequence.ring is None else sequence.ring.copy()
    return list(sequence.ids), rows, ring


def assert_same_state(ours, theirs):
    assert ours[0] == theirs[0]
    for row, (position, keys, values) in theirs[1].items():
        assert ours[1][row][0] == position, row
        torch.testing.assert_close(ours[1][row][1], keys)
        torch.testing.assert_close(ours[1][row][2], values)
    if theirs[2] is not None:
        torch.testing.assert_close(ours[2], theirs[2])


@pytest.mark.parametrize("cache", list(CACHES))
@pytest.mark.parametrize("family", list(FAMILIES))
def test_replies_and_what_they_leave_are_those_of_the_eager_step(
    tmp_path, write_checkpoint, make_runner, make_graphed, random_ids, family, cache
):
    """Two turns: at their limit, at a stop token in the middle, closed by the caller in the middle."""
    folder = write_checkpoint(tmp_path / "model", **FAMILIES[family])
    options = {"chunk": 16, "context": 256, **CACHES[cache]}
    eager, graphed = make_runner(folder, step="eager", **options), make_graphed(folder, **options)
    eager.attention = Ragged()
    for number, name in enumerate(random.Random(family + cache).sample(list(OPTIONS), 2)):
        choice = OPTIONS[name]
        first, second = random_ids(30, seed=number), random_ids(7, seed=number + 50)
        plan = generation(**choice)
        whole = [token.id for token in reply(eager, Sequence(), first, plan)]
        for end in ("limit", "stop", "closed"):
            stop_ids = frozenset({whole[5]} if end == "stop" else ())
            states, replies = [], []
            for runner in (eager, graphed):
                sequence = Sequence()
                tokens, running = [], runner.generate(sequence, list(first), plan, stop_ids=stop_ids)
                for token in running:
                    tokens.append(token)
                    if end == "closed" and len(tokens) == 6:
                        running.close()
                states.append(state_of(runner, sequence))
                tokens += reply(runner, sequence, second, plan)
                replies.append([(token.id, token.finish_reason) for token in tokens])
                states.append(state_of(runner, sequence))
            assert replies[0] == replies[1], (name, end)
            assert_same_state(states[2], states[0])
            assert_same_state(states[3], states[1])


@pytest.mark.parametrize("cache", ["grow", "hold"])
def test_the_triton_kernels_decode_ahead_as_plain_attention_does(
    tmp_path, write_checkpoint, make_runner, make_graphed, random_ids, cache
):
    """In Triton's interpreter, two replies of a batch with an empty seat beside them."""
    pytest.importorskip("triton")
    from cake_infer.engine.attention.ragged import RaggedTriton

    folder = write_checkpoint(tmp_path / "model", num_hidden_layers=2)
    options = {"context": 256, **CACHES[cache]}
    eager = make_runner(folder, step="eager", **options)
    graphed = make_graphed(folder, attention=RaggedTriton(), **options)
    plan, prompts = generation(max_new_tokens=4), [random_ids(n, seed=n) for n in (5, 30, 20)]
    expected = [[token.id for token in reply(eager, Sequence(), ids, plan)] for ids in prompts]
    sequences = [Sequence() for _ in prompts]
    with Batch(graphed, most=4) as batch:
        for sequence, ids in zip(sequences, prompts, strict=True):
            batch.join(sequence, ids, plan)
        got = batch.read()
        while len(batch):
            got += batch.step()
    for sequence, ids in zip(sequences, expected, strict=True):
        assert [outcome.token.id for outcome in got if outcome.sequence is sequence] == ids


def test_int8_weights_are_multiplied_as_they_are_stored(tmp_path, write_checkpoint, random_ids):
    pytest.importorskip("triton")
    folder = write_checkpoint(tmp_path / "model", num_hidden_layers=2)
    decoder = as_quantised(load_decoder(folder, read_config(folder)), "int8")
    with pytest.raises(BackendError, match="no products with these packed weights"):
        DeviceStep(decoder, Ragged(), window=4, hold=False)
    decoder.int8_products = True  # as on a GPU
    runner = Runner(decoder, CacheConfig(budget=12, window=4), context=256, chunk=64, step="eager")
    plan = generation(max_new_tokens=5)
    expected = reply(runner, Sequence(), random_ids(20), plan)
    runner.attention = Ragged()
    runner.step = GraphStep(decoder, runner.attention, runner.make_ahead())
    assert runner.ahead._step._layers[0].q_proj is decoder.layers[0].q_proj
    assert reply(runner, Sequence(), random_ids(20), plan) == expected


def test_hold_puts_back_what_the_step_ahead_exchanged_at_every_length(
    tmp_path, write_checkpoint, make_runner, make_graphed, random_ids
):
    folder = write_checkpoint(tmp_path / "model")
    options = {"context": 256, "budget": 10, "window": 3, "decode_policy": "hold"}
    eager, graphed = make_runner(folder, step="eager", **options), make_graphed(folder, **options)
    for prompt in (4, 40):  # rows that fill up on the way, and rows that are full from the start
        for count in range(1, 12):
            states = []
            for runner in (eager, graphed):
                sequence = Sequence()
                running = runner.generate(sequence, random_ids(prompt), generation(max_new_tokens=20))
                for _ in range(count):
                    next(running)
                running.close()
                states.append(state_of(runner, sequence))
            assert_same_state(states[1], states[0])


def test_interleaved_replies_undo_one_another_and_go_on(
    tmp_path, write_checkpoint, make_runner, make_graphed, random_ids
):
    folder = write_checkpoint(tmp_path / "model")
    for cache in CACHES.values():
        options = {"context": 256, **cache}
        eager, graphed = make_runner(folder, step="eager", **options), make_graphed(folder, **options)
        plans = [generation(max_new_tokens=9, **OPTIONS["all"]), generation(max_new_tokens=14)]
        prompts = [random_ids(30), random_ids(20, seed=1)]
        alone = [[t.id for t in reply(eager, Sequence(), *pair)] for pair in zip(prompts, plans, strict=True)]
        sequences = [Sequence(), Sequence()]
        running = [graphed.generate(s, p, plan) for s, p, plan in zip(sequences, prompts, plans, strict=True)]
        got = [[], []]
        chance = random.Random(0)
        while any(len(got[i]) < len(alone[i]) for i in range(2)):
            i = chance.choice([i for i in range(2) if len(got[i]) < len(alone[i])])
            got[i].append(next(running[i]).id)
            assert sequences[i].ids == prompts[i] + got[i][:-1], "the last token is not fed"
        assert got == alone


@pytest.mark.parametrize("cache", ["grow", "hold"])
def test_a_document_without_a_ring_of_queries_is_answered_as_by_the_eager_step(
    tmp_path, write_checkpoint, make_runner, make_graphed, random_ids, cache
):
    """Such as one that was read with everything kept, between turns of a conversation, whose ring stays its own."""
    folder = write_checkpoint(tmp_path / "model")
    reader, whole = make_runner(folder, step="eager", context=256, policy="full"), Sequence()
    with torch.inference_mode():
        reader.feed(whole, random_ids(40), reader.prepare(whole, 40, 1))
    kept, plan = reader.copy(whole), generation(**OPTIONS["all"])
    assert kept.ring is None
    options = {"context": 256, **CACHES[cache]}
    eager, graphed = make_runner(folder, step="eager", **options), make_graphed(folder, **options)
    eager.attention = Ragged()
    replies, states = [], []
    for runner in (eager, graphed):
        talk, got = Sequence(), []
        for turn in range(3):
            got += reply(runner, talk, random_ids(15, seed=turn), plan)
            states.append(state_of(runner, talk))
            document = Sequence(ids=list(kept.ids), rotary=kept.rotary, parked=kept.parked, kept_by="full")
            got += reply(runner, document, random_ids(6, seed=turn + 9), plan)
            states.append(state_of(runner, document))
            assert document.ring is None
        replies.append([(token.id, token.finish_reason) for token in got])
    assert replies[0] == replies[1]
    for theirs, ours in zip(states[:6], states[6:], strict=True):
        assert_same_state(ours, theirs)
    assert len(states[0][1][0, 0][0]) < 15 + 12 < len(states[1][1][0, 0][0]), "evicted there, and nothing here"


@pytest.mark.parametrize("cache", list(CACHES))
def test_a_batch_of_different_lengths_finishes_independently(
    tmp_path, write_checkpoint, make_runner, make_graphed, random_ids, cache
):
    """Joins, leaves, stop tokens and penalties of each; 1 to 5 seats in tables of 1 to 8 rows."""
    folder = write_checkpoint(tmp_path / "model")
    options = {"chunk": 8, "context": 256, **CACHES[cache]}
    eager, graphed = make_runner(folder, step="eager", **options), make_graphed(folder, **options)
    for seed in range(3):
        chance = random.Random(seed)
        prompts = [random_ids(chance.randint(1, 60), seed=n) for n in range(8)]
        plans = [
            generation(max_new_tokens=chance.randint(1, 12), **OPTIONS[chance.choice(list(OPTIONS))]) for _ in prompts
        ]
        whole = [[t.id for t in reply(eager, Sequence(), *pair)] for pair in zip(prompts, plans, strict=True)]
        stop_ids = frozenset({whole[0][len(whole[0]) // 2]})
        single = [
            [(t.id, t.finish_reason) for t in reply(eager, Sequence(), *pair, stop_ids)]
            for pair in zip(prompts, plans, strict=True)
        ]
        got, sequences, left, coming = [[] for _ in prompts], [Sequence() for _ in prompts], set(), list(range(8))
        with Batch(graphed, most=5) as batch:
            while coming or len(batch):
                if coming and len(batch) < 5 and chance.random() < 0.5:
                    number = coming.pop(0)
                    batch.join(sequences[number], prompts[number], plans[number], stop_ids=stop_ids)
                elif len(batch) and chance.random() < 0.05:
                    number = sequences.index(chance.choice(batch._members).sequence)
                    batch.leave(sequences[number])
                    left.add(number)
                for outcome in batch.step():
                    assert outcome.error is None
                    number = next(n for n, one in enumerate(sequences) if one is outcome.sequence)
                    if outcome.token is not None:
                        got[number].append((outcome.token.id, outcome.token.finish_reason))
            assert not batch.arena.members
        for number, expected in enumerate(single):
            assert got[number] == (expected[: len(got[number])] if number in left else expected), (seed, number)
        assert len(left) < 8


@pytest.mark.parametrize("cache", ["grow", "hold"])
def test_rows_kept_from_a_batch_are_those_of_a_reply_alone(
    tmp_path, write_checkpoint, make_runner, make_graphed, random_ids, cache
):
    folder = write_checkpoint(tmp_path / "model")
    options = {"context": 256, **CACHES[cache]}
    eager, graphed = make_runner(folder, step="eager", **options), make_graphed(folder, **options)
    plan = generation(max_new_tokens=15)
    prompts = [random_ids(count, seed=count) for count in (3, 9, 40)]  # of 4 seats one is empty
    stop = reply(eager, Sequence(), prompts[2], plan)[6].id
    expected, sequences = [], [Sequence() for _ in prompts]
    for prompt in prompts:
        sequence = Sequence()
        reply(eager, sequence, prompt, plan, frozenset({stop}))
        expected.append(state_of(eager, sequence))
    with Batch(graphed) as batch:
        for sequence, prompt in zip(sequences, prompts, strict=True):
            batch.join(sequence, prompt, plan, stop_ids=frozenset({stop}), keep=True)
        while len(batch):
            batch.step()
    for sequence, state in zip(sequences, expected, strict=True):
        assert_same_state(state_of(graphed, sequence), state)


@pytest.mark.parametrize("cache", ["grow", "hold", "full"])
def test_lengths_that_fit_the_arena_need_no_other_capture(
    tmp_path, write_checkpoint, make_runner, make_graphed, random_ids, cache, caplog
):
    """Prompts of 5, 500, 37 and 5 tokens, 40 new each, twice."""
    folder = write_checkpoint(tmp_path / "model")
    options = {"chunk": 128, "context": 1024, **({} if cache == "full" else {"budget": 48, "window": 8})}
    options |= {"policy": "full"} if cache == "full" else {"decode_policy": cache}
    capture = Counted()
    eager = make_runner(folder, step="eager", **options)
    graphed = make_graphed(folder, capture=capture, **options)
    plan, counts, replies, places = generation(max_new_tokens=40), [], [], []
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            for count in (5, 500, 37, 5):
                ids = random_ids(count, seed=count)
                replies.append([token.id for token in reply(graphed, Sequence(), ids, plan)])
                assert replies[-1] == [token.id for token in reply(eager, Sequence(), ids, plan)]
                counts.append(capture.captured)
                state = vars(graphed.ahead._state)
                places.append({name: t.data_ptr() for name, t in state.items() if isinstance(t, torch.Tensor)})
    assert replies[0] == replies[3] == replies[4] == replies[7]
    assert counts == [1] + [2] * 7, "once, and once more where the arena grew"
    assert sum("the KV arena has changed" in record.message for record in caplog.records) == 1
    assert graphed.ahead.captures == 2
    assert all(place == places[0] for place in places), "a graph reads and writes where it was captured"


def test_a_replay_keeps_no_old_arena_alive(tmp_path, write_checkpoint, make_graphed, random_ids):
    import weakref

    runner = make_graphed(write_checkpoint(tmp_path / "model"), context=256)
    suspended = runner.generate(Sequence(), random_ids(5), generation())
    next(suspended), next(suspended)
    store = weakref.ref(runner.tenancy.arena.store)
    list(runner.generate(Sequence(), random_ids(100), generation()))
    assert store() is None
    assert len(list(suspended)) == 10


def test_what_cannot_be_captured_is_launched_kernel_by_kernel_with_a_notice(
    tmp_path, write_checkpoint, make_runner, make_graphed, random_ids, caplog
):
    class Failing(Uncaptured):
        def __call__(self, body):
            raise RuntimeError("operation not permitted when stream is capturing\nand more")

    folder = write_checkpoint(tmp_path / "model")
    runner = make_graphed(folder, capture=Failing())
    tokens = reply(runner, Sequence(), random_ids(20), generation())
    assert tokens == reply(make_runner(folder, step="eager"), Sequence(), random_ids(20), generation())
    notices = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert notices == [
        "the decode step could not be captured, so it is launched kernel by kernel: operation not permitted when "
        "stream is capturing"
    ]


def test_logprobs_are_those_of_the_eager_step(tmp_path, write_checkpoint, make_runner, make_graphed, random_ids):
    folder = write_checkpoint(tmp_path / "model")
    plan = generation(logprobs=3, **OPTIONS["all"])
    ours, theirs = (
        reply(make(folder, **keywords), Sequence(), random_ids(20), plan)
        for make, keywords in ((make_graphed, {}), (make_runner, {"step": "eager"}))
    )
    assert [token.id for token in ours] == [token.id for token in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert one.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=1e-5)
        assert [token for token, _ in one.logprobs.top] == [token for token, _ in other.logprobs.top]


def test_logits_that_are_no_numbers_end_that_reply_alone(tmp_path, write_checkpoint, make_graphed, random_ids):
    runner = make_graphed(write_checkpoint(tmp_path / "model"), context=256)
    plan = generation()
    expected = [token.id for token in reply(runner, Sequence(), random_ids(9), plan)]
    with Batch(runner) as batch:
        good, bad = Sequence(), Sequence()
        for sequence in (good, bad):
            batch.join(sequence, random_ids(9), plan)
        ids = [outcome.token.id for outcome in batch.read() if outcome.sequence is good]
        next(m.arena for m in batch._members if m.sequence is bad).row(0, 0)[1].fill_(float("nan"))
        failed = []
        while len(batch):
            for outcome in batch.step():
                if outcome.sequence is good:
                    ids.append(outcome.token.id)
                elif outcome.error is not None:
                    failed.append(str(outcome.error))
        assert ids == expected
        assert len(failed) == 1
        assert "NaN or infinite logits at new token 2" in failed[0]
    running = runner.generate(Sequence(), random_ids(9), plan)
    assert [next(running).id, next(running).id] == expected[:2]
    with runner.access.alone():
        runner.tenancy.arena.row(0, 0)[1].fill_(float("nan"))
    with pytest.raises(CakeError, match="at new token 3"):
        next(running)
    assert [token.id for token in reply(runner, Sequence(), random_ids(9), plan)] == expected


def test_a_step_that_is_broken_off_leaves_a_usable_engine(
    tmp_path, write_checkpoint, make_graphed, random_ids, monkeypatch
):
    runner = make_graphed(write_checkpoint(tmp_path / "model"), budget=12, window=4, decode_policy="hold")
    plan = generation()
    expected = reply(runner, Sequence(), random_ids(30), plan)
    sequence = Sequence()
    running = runner.generate(sequence, random_ids(30), plan)
    assert [next(running), next(running)] == expected[:2]

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Ahead, "_wait", stop)
        with pytest.raises(KeyboardInterrupt):
            next(running)
    assert sequence.spoilt
    assert reply(runner, Sequence(), random_ids(30), plan) == expected


class NoHost(TorchDispatchMode):
    """Fails where the host reads a value of the device, or sends one there."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "lift_fresh", "unique", "equal")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        assert name not in self.FORBIDDEN, f"the step calls {name}"
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma", "qwen3"])
def test_the_step_reads_nothing_on_the_host_and_empty_seats_change_nothing(
    tmp_path, write_checkpoint, make_graphed, random_ids, family, hold
):
    """With the Triton kernels, which the interpreter runs beside torch's dispatcher."""
    pytest.importorskip("triton")
    from cake_infer.engine.attention.ragged import RaggedTriton

    folder = write_checkpoint(tmp_path / "model", **FAMILIES[family])
    options = {"context": 256, "budget": 12, "window": 4, "decode_policy": "hold" if hold else "grow"}
    runner = make_graphed(folder, attention=RaggedTriton(), **options)
    sequence = Sequence()
    runner.feed(sequence, random_ids(30), runner.prepare(sequence, 30, 8))
    arena, decoder = runner.tenancy.arena, runner.decoder
    sampler = DeviceSampler(2, 320, 310, torch.tensor([3]), decoder.device)
    step = DeviceStep(decoder, runner.attention, window=4, hold=hold)
    kind = Kind.NOISE | Kind.FILTERS | Kind.PENALTIES | Kind.LOGITS
    with torch.inference_mode():
        state = DeviceState(decoder, 2, 4, sampler)
        state.logits = torch.zeros(2, 320)
        sampler.histories()
        before = [table.clone() for table in (arena.keys, arena.values, arena.position)]
        ring = state.ring[:, :, 1:]  # but for the slot of the present position, which is still to be written
        tables = [state.tables, state.position, state.token, ring, sampler._integers, *sampler.histories()]
        empty = [table.clone() for table in tables]
        with NoHost():
            step(state, arena.store, arena.position.numel(), kind)
        for table, copy in zip([*tables, arena.keys, arena.values, arena.position], [*empty, *before], strict=True):
            assert torch.equal(table, copy)


def test_rows_of_a_batch_choose_as_each_would_alone():
    """Against `sampling.sample`, with logits that have many equals, padding, and rows that are no numbers."""
    generator = torch.Generator().manual_seed(0)
    vocab, valid, unused = 200, 190, torch.tensor([0, 7, 50])
    chance = random.Random(0)
    for _ in range(60):
        rows = chance.randint(1, 5)
        sampler = DeviceSampler(rows, vocab, valid, unused, torch.device("cpu"))
        logits = torch.randn(rows, vocab, generator=generator) * 3
        if chance.random() < 0.5:
            logits = logits.round()
        pickers, kind = [], Kind.GREEDY
        for row in range(rows):
            plan = generation(
                seed=chance.choice([0, 3, 2**64 - 1]),
                temperature=chance.choice([0.0, 0.3, 1.0, 1.7]),
                top_k=chance.choice([0, 1, 5, 500]),
                top_p=chance.choice([1.0, 0.01, 0.5, 0.9]),
                min_p=chance.choice([0.0, 0.1, 1.0]),
                repetition_penalty=chance.choice([1.0, 1.4]),
                presence_penalty=chance.choice([0.0, 0.7, -0.4]),
                frequency_penalty=chance.choice([0.0, 0.3]),
            )
            picker = Picker(
                plan,
                99,
                stop_ids=frozenset(),
                prompt_ids=[chance.randrange(vocab) for _ in range(50)],
                vocab_size=vocab,
                valid=valid,
                unused=unused,
                device=torch.device("cpu"),
            )
            for _ in range(chance.randint(0, 30)):
                picker.accept(chance.randrange(valid), None)
            pickers.append(picker)
            sampler.put(row, picker)
            kind |= Kind.of(plan)
        for _ in range(3):
            if chance.random() < 0.2:
                logits[chance.randrange(rows)] = chance.choice([float("nan"), float("inf"), float("-inf")])
            active = torch.tensor([chance.random() < 0.8 for _ in range(rows)])
            got = sampler.choose(logits, active, kind).tolist()
            for row, picker in enumerate(pickers):
                expected = int(
                    sample(
                        logits[row].index_fill(0, unused, float("-inf")),
                        picker.generation,
                        picker.history,
                        picker.generation.seed,
                        picker.picked,
                        valid=valid,
                    )
                )
                assert got[row] == expected
                if active[row] and expected != NOT_FINITE:
                    picker.accept(expected, None)
            if NOT_FINITE in got:
                break


def test_a_graph_is_refused_where_there_is_no_gpu_for_it(tmp_path, write_checkpoint, make_runner):
    runner = make_runner(write_checkpoint(tmp_path / "model"), step="graph")
    with pytest.raises(BackendError, match="step graph needs a CUDA device, this is cpu"):
        _ = runner.step
