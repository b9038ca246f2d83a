"""Slicing the cake anew while a reply is written: slots stay as many, and who has them is what the formulas say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cake_infer.cache.config import CacheConfig
from cake_infer.engine.batch import Batch
from cake_infer.engine.engine import Engine
from cake_infer.engine.sequence import Sequence
from cake_infer.errors import OptionError

WINDOW, BUDGET, EVERY = 8, 24, 12


def start(runner, ids, new_tokens):
    sequence = Sequence()
    runner.feed(sequence, ids, runner.prepare(sequence, len(ids), new_tokens))
    return sequence


def positions(arena):
    layers, heads = arena.length.shape
    return {(a, b): arena.row(a, b)[2].tolist() for a in range(layers) for b in range(heads)}


@pytest.mark.parametrize("options", [{}, {"model_type": "mistral", "sliding_window": 30}])
@pytest.mark.parametrize("prompt", [120, 20])
def test_rows_and_logits_are_those_of_a_masked_float64_model(
    tmp_path, write_checkpoint, make_runner, dense, random_ids, prompt, options
):
    """Each token sees what the rows held when it was fed; what they hold is given up as the definition has it."""
    folder = write_checkpoint(tmp_path / "model", **options)
    runner = make_runner(
        folder,
        policy="cake",
        budget=BUDGET,
        window=WINDOW,
        decode_policy="hold",
        recascade=EVERY,
        tau1=1.0,
        tau2=1.0,
    )
    new, ids = random_ids(61, seed=1), random_ids(prompt)
    sequence = start(runner, ids, len(new) + 1)
    arena, slots, nbytes = runner.tenancy.arena, max(runner.tenancy.arena.length.sum(), 6 * BUDGET), 0
    kept, total = positions(arena), prompt + len(new)
    visible = {row: torch.zeros(total, total, dtype=torch.bool) for row in kept}
    for row in kept:
        visible[row][:prompt, :prompt] = True
    logits, moments, nbytes = [], [], arena.nbytes
    for index, token in enumerate(new):
        before, limit = positions(arena), sequence.limit.copy()
        at = prompt + index
        logits.append(runner.step(arena, sequence, token, window=WINDOW))
        assert arena.length.sum() <= slots
        assert runner.tenancy.arena.nbytes == nbytes
        if not np.array_equal(limit, sequence.limit):
            assert index % EVERY == 0
            assert sequence.limit.sum() == limit.sum() == slots
            moments.append((at, before, limit, sequence.limit.copy(), dict(positions(arena))))
        after = positions(arena)
        for row in kept:
            assert len(set(after[row])) == len(after[row])
            assert set(range(max(0, at + 1 - WINDOW), at + 1)) <= set(after[row])
            held = set(before[row]) if not moments or moments[-1][0] != at else None
            seen = held if held is not None else None
            visible[row][at, sorted(seen if seen is not None else set())] = True
            visible[row][at, at] = True
        if moments and moments[-1][0] == at:  # what this token saw: rows after the cut, before its own exchange
            model = dense(folder)
            model.logits([*ids, *new[:index]], {row: one[:at, :at] for row, one in visible.items()})
            expected = sliced(model, before, at, options.get("sliding_window"))
            assert {row: len(one) for row, one in expected.items()} == {
                row: min(len(before[row]), int(sequence.limit[row])) for row in before
            }
            for row in kept:
                visible[row][at, sorted(expected[row])] = True
    assert len(moments) >= 3
    assert any((new_limit != old).any() for _, _, old, new_limit, _ in moments)
    model = dense(folder)
    reference = model.logits([*ids, *new], visible)
    for index in range(len(new)):
        torch.testing.assert_close(logits[index].double(), reference[prompt + index], rtol=1e-3, atol=1e-3)


def sliced(model, held, total, sliding):
    """What is kept of held rows: seats dealt by preferences of the last run's queries, one seat at a time."""
    columns = {row: list(positions) for row, positions in held.items()}
    layers, heads = model.layers, model.kv_heads
    window = set(range(max(0, total - WINDOW), total))
    lengths = [len(columns[layer, 0]) for layer in range(layers)]
    model.cake(columns, total, budget=BUDGET, window=WINDOW)  # for its scores
    weights = preferences(model, columns, total)
    caps = [min(length + EVERY, sliding or length + EVERY) - len(window) for length in lengths]
    candidates = sorted((-weights[a] / (j - 0.5), a) for a in range(layers) for j in range(1, caps[a] + 1))
    seats = [0] * layers
    for _, layer in candidates[: sum(lengths) - layers * len(window)]:
        seats[layer] += 1
    kept = {}
    for layer in range(layers):
        for head in range(heads):
            scores = model.scores[layer, head]
            best = sorted(scores, key=lambda position: (-scores[position], position))
            kept[layer, head] = set(best[: min(seats[layer], len(best))]) | window
    return kept


def preferences(model, columns, total):
    found, group = [], model.heads // model.kv_heads
    rows = torch.arange(total - WINDOW, total)
    for layer in range(model.layers):
        dispersion = shift = 0.0
        for head in range(model.heads):
            position = torch.tensor(sorted(columns[layer, head // group]))
            z = model.queries[layer][head, rows] @ model.keys[layer][head // group, position].T * model.head_dim**-0.5
            mask = model.causal(total, layer)[rows][:, position]
            a = torch.softmax(z.masked_fill(~mask, -torch.inf), -1)[:, position < total - WINDOW]
            dispersion += float(-torch.special.xlogy(a, a).sum())
            shift += float(a.var(0).sum())
        found.append(dispersion * shift)
    return found


def test_the_compiled_step_slices_as_the_plain_one(tmp_path, write_checkpoint, make_runner, random_ids):
    pytest.importorskip("numba")
    folder = write_checkpoint(tmp_path / "model", head_dim=16)
    options = {"policy": "cake", "budget": BUDGET, "window": WINDOW, "decode_policy": "hold", "recascade": EVERY}
    plain, compiled = (make_runner(folder, step=step, **options) for step in ("eager", "compiled"))
    found = []
    for runner in (plain, compiled):
        sequence, limits = start(runner, random_ids(90), 60), []
        for token in random_ids(50, seed=3):
            logits = runner.step(runner.tenancy.arena, sequence, token, window=WINDOW)
            limits.append(sequence.limit[:, 0].tolist())
        found.append((logits, limits, positions(runner.tenancy.arena)))
    assert found[0][1:] == found[1][1:]
    assert len({tuple(limit) for limit in found[0][1]}) >= 3
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-4, atol=1e-4)


def test_a_conversation_and_its_undo_with_new_slices(model_folder):
    options = {"policy": "cake", "step": "eager", "budget": 24, "window": 8, "decode_policy": "hold", "recascade": 5}
    engine = Engine.load(model_folder(), **options)
    assert ", recascade 5" in engine.runner.policy(24).describe()
    chat = engine.chat()
    first = [piece.id for piece in chat.send("the first of them was not this one", max_new_tokens=40, temperature=0)]
    second = [piece.id for piece in chat.send("and all that is left", max_new_tokens=40, temperature=0)]
    chat.undo()
    assert [piece.id for piece in chat.send("and all that is left", max_new_tokens=40, temperature=0)] == second
    assert len(first) > 30
    assert engine.runner.tenancy.arena.length.sum() == 24 * 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recascade": 0}, "recascade must be a whole number between 1 and"),
        ({"recascade": 5, "decode_policy": "grow"}, "no effect with the decode policy grow"),
        ({"recascade": 5, "policy": "snapkv"}, "no form for the allocation uniform"),
        ({"recascade": 5, "heads": "adaptive"}, "no form for the heads adaptive"),
        ({"recascade": 5, "policy": "auto"}, "no form for the heads adaptive: take the policy cake"),
        ({"recascade": 5, "indicator": "h2o"}, "no form for the indicator h2o"),
        ({"recascade": 5, "merge": "cam"}, "no form for the merge cam"),
        ({"recascade": 5, "hold_by": "tova"}, "no form for hold by tova"),
        ({"recascade": 5, "hold_by": "attention,interval=4"}, "no form for hold by attention"),
        ({"recascade": 5, "policy": "full"}, "recascade has no effect with the policy full"),
    ],
)
def test_what_cannot_be_sliced_anew_is_refused(options, message):
    with pytest.raises(OptionError, match=message):
        CacheConfig(**{"policy": "cake", "decode_policy": "hold", **options})


def test_batches_and_documents_do_without(model_folder):
    options = {"policy": "cake", "budget": 24, "window": 8, "decode_policy": "hold", "recascade": 5}
    engine = Engine.load(model_folder(), step="eager", **options)
    with pytest.raises(OptionError, match="decoded together"):
        Batch(engine.runner)
    with pytest.raises(OptionError, match="recascade"):
        engine.generate(["a", "b"], max_new_tokens=3)
    document = engine.compress("the first of them was not this one, and all that is left " * 4)
    with pytest.raises(OptionError, match="a document's rows keep their lengths"):
        engine.generate("What?", cache=document)
