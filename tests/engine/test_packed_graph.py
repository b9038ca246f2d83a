"""Decoding ahead over packed rows: ids, rows and bytes are those of the eager step, across groups that are packed."""

from __future__ import annotations

import pytest
import torch
from cake_infer.engine.attention import Sdpa
from cake_infer.engine.batch import Batch
from cake_infer.engine.capture import Uncaptured
from cake_infer.engine.generation import GenerationConfig, resolve_generation
from cake_infer.engine.graph import Ahead
from cake_infer.engine.sequence import Sequence
from cake_infer.engine.stepper import GraphStep

G, WINDOW = 32, 4


class Ragged(Sdpa):
    """The plain form of ragged attention, over both parts of a row."""

    ragged = True


class Counted(Uncaptured):
    """Runs the body as a capture would, where nobody sits, and counts."""

    def __init__(self):
        self.captured = 0

    def __call__(self, body):
        self.captured += 1
        body()
        body()
        return body


@pytest.fixture
def make_graphed(make_runner):
    """A runner whose step is a graph's, uncaptured, with the keywords of `make_runner` and an attention."""

    def make(folder, attention, **options):
        runner = make_runner(folder, step="eager", **options)
        runner.attention = attention
        ahead = Ahead(
            runner.decoder,
            attention,
            window=runner.cache.window,
            hold=False,
            valid=runner.valid_ids,
            unused=runner.unused,
            rule=runner.rule,
            capture=Counted(),
        )
        runner.step = GraphStep(runner.decoder, attention, ahead, runner.rule)
        return runner

    return make


def generation(**options):
    return resolve_generation(GenerationConfig(**{"max_new_tokens": 80, "seed": 5, **options}), {})


def state_of(runner, sequence):
    """All that a reply leaves behind: ids, both parts of the rows, and the ring."""
    with runner.access.alone():
        runner.tenancy.activate(sequence)
    saved = runner.tenancy.arena.save()
    ring = sequence.ring.copy() if sequence.ring is not None else torch.zeros(0)
    return list(sequence.ids), saved, ring


def assert_same(ours, theirs, close):
    assert ours[0] == theirs[0]
    assert ours[1].length.tolist() == theirs[1].length.tolist()
    assert ours[1].packed.length.tolist() == theirs[1].packed.length.tolist()
    assert ours[1].position.tolist() == theirs[1].position.tolist()
    assert ours[1].packed.tables[6].tolist() == theirs[1].packed.tables[6].tolist()
    for one, other in ((ours[1].keys, theirs[1].keys), (ours[1].values, theirs[1].values), (ours[2], theirs[2])):
        torch.testing.assert_close(one, other, rtol=0, atol=close)
    for one, other in zip(ours[1].packed.tables[:2], theirs[1].packed.tables[:2], strict=True):
        # a number at the border of two levels may be rounded either way
        assert (one != other).double().mean() < 1e-2


CASES = {
    "grow": ({}, {"policy": "snapkv", "budget": 50, "kv_bits": 8}),  # 46 are packed: 18 more fill the second group
    "sliding": ({"model_type": "mistral", "sliding_window": 16}, {"budget": 50, "kv_bits": 8, "heads": "adaptive"}),
    "hold": (
        {"model_type": "mistral", "sliding_window": 40},
        {"budget": 60, "kv_bits": 8, "heads": "adaptive", "decode_policy": "hold"},
    ),
    "full": ({"head_dim": 32, "num_attention_heads": 2}, {"policy": "full", "kv_bits": 4}),
}


@pytest.mark.parametrize(
    ("case", "backend"), [*((case, "plain") for case in CASES), ("grow", "triton"), ("sliding", "triton")]
)
def test_replies_and_what_they_leave_are_those_of_the_eager_step(
    tmp_path, write_checkpoint, make_runner, make_graphed, random_ids, case, backend
):
    """Two turns of two groups and more each: to the limit, and closed by the caller in the middle. In the interpreter
    one, of which a group is filled up."""
    shape, options = CASES[case]
    attention = Ragged()
    if backend == "triton":
        pytest.importorskip("triton")
        from cake_infer.engine.attention.ragged import RaggedTriton

        attention = RaggedTriton()
    folder = write_checkpoint(tmp_path / "model", num_hidden_layers=2, **shape)
    options = {"chunk": 16, "context": 512, "window": WINDOW, **options}
    eager, graphed = make_runner(folder, step="eager", **options), make_graphed(folder, attention, **options)
    plan = generation(max_new_tokens=75 if backend == "plain" else 22)  # the interpreter takes its time
    sequences = Sequence(), Sequence()
    prompts = (random_ids(70), random_ids(9, seed=1))
    for turn, prompt in enumerate(prompts if backend == "plain" else prompts[:1]):
        found = []
        for runner, sequence in zip((eager, graphed), sequences, strict=True):
            tokens = []
            for token in runner.generate(sequence, prompt, plan):
                tokens.append(token.id)
                if turn == len(prompts) - 1 and len(tokens) == plan.max_new_tokens - 3:  # a step runs ahead of it
                    break
            found.append(tokens)
        assert found[0] == found[1]
        assert_same(state_of(graphed, sequences[1]), state_of(eager, sequences[0]), 1e-4)
    assert graphed.ahead.captures <= 2


@pytest.mark.parametrize("decode_policy", ["grow", "hold"])
def test_a_batch_over_packed_rows_gives_what_each_gets_alone(
    tmp_path, write_checkpoint, make_runner, make_graphed, random_ids, decode_policy
):
    """Some join while others are decoded; their rows are packed at different steps, and spans move between them."""
    folder = write_checkpoint(tmp_path / "model", num_hidden_layers=2)
    options = {
        "chunk": 16,
        "context": 512,
        "window": WINDOW,
        "budget": 50,
        "kv_bits": 4,
        "decode_policy": decode_policy,
    }
    prompts = [random_ids(n, seed=n) for n in (70, 20, 45)]
    eager = make_runner(folder, step="eager", **options)
    plans = [generation(max_new_tokens=count) for count in (70, 45, 60)]
    alone = [
        [token.id for token in eager.generate(Sequence(), list(prompt), plan)]
        for prompt, plan in zip(prompts, plans, strict=True)
    ]
    graphed = make_graphed(folder, Ragged(), **options)
    sequences, found = [Sequence() for _ in prompts], {}
    with Batch(graphed, most=3) as batch:
        waiting = list(zip(sequences, prompts, plans, strict=True))
        steps = 0
        while waiting or len(batch):
            if waiting and steps % 10 == 0:
                sequence, prompt, plan = waiting.pop(0)
                batch.join(sequence, prompt, plan)
            for outcome in [*batch.read(), *batch.step()]:
                assert outcome.error is None
                if outcome.token is not None:
                    found.setdefault(id(outcome.sequence), []).append(outcome.token.id)
            steps += 1
    assert [found[id(sequence)] for sequence in sequences] == alone


def test_steps_over_ragged_tables_are_those_over_one_row_after_another(
    tmp_path, write_checkpoint, make_runner, random_ids
):
    folder = write_checkpoint(tmp_path / "model", model_type="mistral", sliding_window=30, num_hidden_layers=2)
    options = {"window": WINDOW, "budget": 50, "kv_bits": 8, "heads": "adaptive", "step": "eager"}
    logits = []
    for attention in (Sdpa(), Ragged()):
        runner, sequence = make_runner(folder, **options), Sequence()
        runner.attention = attention
        runner.feed(sequence, random_ids(90), runner.prepare(sequence, 90, 60))
        with torch.inference_mode():
            steps = [runner.step(runner.tenancy.arena, sequence, t, window=WINDOW) for t in random_ids(50, seed=1)]
        logits.append(torch.stack(steps))
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=1e-4 * max(1.0, float(logits[0].abs().max()) / 10))
