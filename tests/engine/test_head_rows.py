"""Rows of unequal lengths per head, end to end: chosen, stored, read and counted at their true lengths."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from cake_infer.engine.compiled import CompiledStep
from cake_infer.engine.sequence import Sequence

WINDOW, BUDGET, PROMPT = 8, 24, 120
SHARINGS = {
    "cake, adaptive heads": {"policy": "cake", "heads": "adaptive"},
    "ada-kv": {"policy": "ada-kv"},
    "auto": {"policy": "auto"},
    "global": {"policy": "snapkv", "allocation": "global"},
    "table": {"policy": "snapkv", "allocation": "table"},
    "squeeze, adaptive heads": {"policy": "squeeze", "indicator": "snapkv", "heads": "adaptive"},
}


@pytest.fixture(params=["llama", "sliding"])
def folder(request, tmp_path, write_checkpoint):
    shape = {"num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48}
    options = {"llama": {}, "sliding": {"model_type": "mistral", "sliding_window": 50}}
    return write_checkpoint(tmp_path / "model", **shape, **options[request.param])


@pytest.fixture
def runner_with(tmp_path, folder, make_runner):
    def make(name, **options):
        chosen = dict(SHARINGS[name])
        if name == "table":
            values = np.random.default_rng(0).random((4, 3)).tolist()
            (tmp_path / "table.json").write_text(json.dumps(values))
            chosen["policy_options"] = {"table": str(tmp_path / "table.json")}
        return make_runner(folder, budget=BUDGET, window=WINDOW, **chosen, **options)

    return make


def feed(runner, sequence, ids, new_tokens=1):
    return runner.feed(sequence, ids, runner.prepare(sequence, len(ids), new_tokens))


def assert_ragged(runner, total, always=True):
    """Heads differ, the budget is used up to the slot, and the arena is no larger than the rows and one layer."""
    arena, (layers, heads) = runner.tenancy.arena, runner.tenancy.arena.length.shape
    if always:
        assert any(len(set(row)) > 1 for row in arena.length.tolist()), "heads are equal: nothing was tested"
    assert (arena.length >= WINDOW).all()
    assert arena.kept_slots == int(arena.length.sum()) == BUDGET * layers * heads
    assert [len(set(row)) for row in kept_windows(arena, total)] == [1] * layers


def kept_windows(arena, total):
    layers, heads = arena.length.shape
    for layer in range(layers):
        rows = [arena.row(layer, head)[2].tolist() for head in range(heads)]
        yield [tuple(sorted(p for p in row if p >= total - WINDOW)) for row in rows]


@pytest.mark.parametrize("floor", [0.2, 0.7])
def test_adaptive_heads_keep_a_floor_each_and_the_best_of_the_rest_of_a_layer_of_cake(
    folder, dense, make_runner, random_ids, kept_positions, floor
):
    prompt = random_ids(PROMPT)
    runner = make_runner(
        folder, policy="cake", heads="adaptive", budget=BUDGET, window=WINDOW, policy_options={"floor": floor}
    )
    feed(runner, Sequence(), prompt)
    kept = kept_positions(runner)
    model = dense(folder)
    model.logits(prompt)
    equal = model.cake({row: list(range(PROMPT)) for row in kept}, PROMPT, budget=BUDGET, window=WINDOW)
    expected = {}
    for layer in range(4):
        seats = len(equal[layer, 0]) - WINDOW
        ranked = {
            head: sorted(scores, key=lambda p, scores=scores: (-scores[p], p))
            for head in range(3)
            for scores in [model.scores[layer, head]]
        }
        forced = {head: row[: int(floor * seats)] for head, row in ranked.items()}
        rest = sorted(
            (-model.scores[layer, head][p], head, p) for head, row in ranked.items() for p in row[int(floor * seats) :]
        )[: 3 * seats - sum(map(len, forced.values()))]
        for head in range(3):
            window = range(PROMPT - WINDOW, PROMPT)
            expected[layer, head] = {*window, *forced[head], *(p for _, h, p in rest if h == head)}
    assert len({len(row) for row in kept.values()}) > 4
    model.assert_chosen(kept, expected)


@pytest.mark.parametrize("compiled", [False, True], ids=["torch", "compiled"])
@pytest.mark.parametrize("name", SHARINGS)
def test_decoding_over_ragged_heads_is_that_of_the_dense_model_with_the_evicted_hidden(
    runner_with, folder, dense, random_ids, kept_positions, name, compiled, poison, visible_after
):
    from cake_infer.engine import decode

    if compiled:
        pytest.importorskip("numba", reason="the compiled step needs the extra cpu")
    prompt, new = random_ids(PROMPT), random_ids(16, seed=1)
    runner, sequence = runner_with(name), Sequence()
    first = feed(runner, sequence, prompt, len(new) + 1)
    arena = runner.tenancy.arena
    assert_ragged(runner, PROMPT)
    kept = kept_positions(runner)
    poison(arena)
    step = CompiledStep(runner.decoder, torch.float32, 2) if compiled else None
    logits = [first]
    with torch.inference_mode():
        for token in new:
            run = step or (lambda *a, **k: decode.step(runner.decoder, *a, **k))
            logits.append(run(arena, sequence, token, window=WINDOW).clone())
    ids = prompt + new
    model = dense(folder)
    reference = model.logits(ids, visible_after(kept, PROMPT, len(ids)))[PROMPT - 1 :]
    torch.testing.assert_close(torch.stack(logits).double(), reference, rtol=0, atol=1e-4)
    assert (arena.length == np.array([len(row) for row in kept.values()]).reshape(arena.length.shape) + len(new)).all()


@pytest.mark.parametrize("name", SHARINGS)
def test_a_further_piece_is_read_over_ragged_rows_and_ends_within_the_budget(
    runner_with, folder, dense, random_ids, kept_positions, name, poison
):
    pieces = [random_ids(PROMPT), random_ids(5, seed=1), random_ids(40, seed=2)]
    runner, sequence, model, ids, masks = runner_with(name), Sequence(), dense(folder), [], {}
    held = {}
    total = sum(map(len, pieces))
    for piece in pieces:
        before = len(ids)
        ids = ids + piece
        logits = feed(runner, sequence, piece)
        # after a few tokens auto protects whole rows of a model of random weights, and its heads may agree
        assert_ragged(runner, len(ids), always=name != "auto" or len(piece) == PROMPT)
        for row in kept_positions(runner):
            mask = masks.setdefault(row, torch.ones(total, total, dtype=torch.bool))
            mask[before:, :before] = False
            mask[before:, held.get(row, [])] = True
        reference = model.logits(ids, {row: mask[: len(ids), : len(ids)] for row, mask in masks.items()})
        torch.testing.assert_close(logits.double(), reference[-1], rtol=0, atol=1e-4)
        held = kept_positions(runner)
        poison(runner.tenancy.arena)


def test_ragged_rows_come_back_from_a_checkpoint_as_they_were(runner_with, random_ids, kept_positions):
    runner, sequence = runner_with("global"), Sequence()
    feed(runner, sequence, random_ids(PROMPT), 4)
    kept, lengths = kept_positions(runner), runner.tenancy.arena.length.copy()
    saved = runner.checkpoint(sequence)
    feed(runner, sequence, random_ids(30, seed=1), 4)
    assert kept_positions(runner) != kept
    runner.restore(sequence, saved)
    runner.tenancy.activate(sequence)
    assert kept_positions(runner) == kept
    assert (runner.tenancy.arena.length == lengths).all()


@pytest.mark.parametrize("compiled", [False, True], ids=["torch", "compiled"])
def test_a_held_ragged_row_stays_at_its_own_length(runner_with, random_ids, compiled):
    from cake_infer.engine import decode

    if compiled:
        pytest.importorskip("numba", reason="the compiled step needs the extra cpu")
    runner, sequence = runner_with("ada-kv", decode_policy="hold"), Sequence()
    new = random_ids(60, seed=1)
    feed(runner, sequence, random_ids(PROMPT), len(new) + 1)
    arena = runner.tenancy.arena
    lengths, nbytes = arena.length.copy(), arena.nbytes
    assert any(len(set(row)) > 1 for row in lengths.tolist())
    step = CompiledStep(runner.decoder, torch.float32, 2) if compiled else None
    with torch.inference_mode():
        for token in new:
            (step or (lambda *a, **k: decode.step(runner.decoder, *a, **k)))(arena, sequence, token, window=WINDOW)
            assert (arena.length == lengths).all()
    assert arena.nbytes == nbytes
    total = PROMPT + len(new)
    assert [len(set(row)) for row in kept_windows(arena, total)] == [1] * len(lengths)


@pytest.mark.parametrize("name", ["ada-kv", "global", "table"])
def test_an_arena_for_ragged_rows_has_the_slots_of_equal_ones(runner_with, make_runner, folder, random_ids, name):
    """Equal budgets are equal bytes: rows at their true lengths and one layer of incoming tokens, nothing padded."""
    runner = runner_with(name)
    feed(runner, Sequence(), random_ids(PROMPT))
    equal = make_runner(folder, policy="snapkv", budget=BUDGET, window=WINDOW)
    feed(equal, Sequence(), random_ids(PROMPT))
    assert runner.tenancy.arena.nbytes == equal.tenancy.arena.nbytes
    layers, heads = runner.tenancy.arena.length.shape
    slots = heads * (layers * BUDGET + PROMPT)
    assert runner.tenancy.arena.nbytes == slots * runner.layout.kept_slot_bytes


def test_the_step_reads_a_row_at_its_true_length(runner_with, random_ids, monkeypatch):
    """Not by masks: the keys that attention is given are as many as each head keeps, and the newcomer."""
    from cake_infer.engine import decode
    from cake_infer.engine.attention import sdpa

    runner, sequence = runner_with("global"), Sequence()
    feed(runner, sequence, random_ids(PROMPT), 3)
    arena, seen = runner.tenancy.arena, []
    lengths = arena.length.copy()
    original = sdpa.decode_attention

    def watched(queries, keys, values, **keywords):
        seen.extend([keys.shape[1]] * keys.shape[0])
        return original(queries, keys, values, **keywords)

    monkeypatch.setattr(sdpa, "decode_attention", watched)
    with torch.inference_mode():
        decode.step(runner.decoder, arena, sequence, 7, window=WINDOW)
    assert seen == [n + 1 for n in lengths.reshape(-1).tolist()]


def test_an_allocation_that_waits_for_all_layers_has_room_for_all_of_them_and_says_so(
    runner_with, folder, make_runner, random_ids
):
    from cake_infer.cache.config import CacheConfig
    from cake_infer.engine.memory import plan_run
    from cake_infer.models.config import read_config

    runner = runner_with("squeeze, adaptive heads")
    assert runner.policy(BUDGET).late
    feed(runner, Sequence(), random_ids(PROMPT))
    layers, heads = runner.tenancy.arena.length.shape
    slots = heads * (layers * PROMPT + PROMPT)
    assert runner.tenancy.arena.nbytes == slots * runner.layout.kept_slot_bytes
    cache = CacheConfig(budget=BUDGET, window=WINDOW, **SHARINGS["squeeze, adaptive heads"])
    plan = plan_run(
        read_config(folder), cache, weights=0, stored=torch.float32, prompt_tokens=PROMPT, new_tokens=1, chunk=64
    )
    assert plan.arena == runner.tenancy.arena.nbytes
    again = Sequence()
    feed(runner, again, random_ids(PROMPT))
    feed(runner, again, random_ids(30, seed=1))
    assert runner.tenancy.arena.kept_slots == BUDGET * layers * heads


def test_the_statistics_count_rows_at_their_true_lengths(model_folder):
    from cake_infer import Engine

    folder = model_folder(num_attention_heads=6, num_key_value_heads=3, hidden_size=48)
    with Engine.load(folder, policy="ada-kv", budget=BUDGET, window=WINDOW) as engine:
        stats = engine.generate("word " * 40, max_new_tokens=2).stats
        slot = 2 * engine.runner.layout.head_dim * engine.runner.layout.kv_dtype.itemsize
    lengths = stats.layer_lengths
    assert any(len(set(row)) > 1 for row in lengths)
    assert stats.kept_bytes == sum(map(sum, lengths)) * slot == BUDGET * len(lengths) * 3 * slot
    assert stats.kept_tokens == BUDGET
    assert "heads adaptive 0.2" in stats.policy
    assert f"(heads {min(lengths[0])}-{max(lengths[0])})" in stats.layers_text().splitlines()[0]


def test_a_batch_of_ragged_sequences_writes_what_each_writes_alone(model_folder):
    from cake_infer import Engine

    folder = model_folder(num_attention_heads=6, num_key_value_heads=3, hidden_size=48)
    prompts = ["one two " * 20, "three " * 45, "four five six " * 15]
    options = {"policy": "cake", "heads": "adaptive", "budget": BUDGET, "window": WINDOW}
    with Engine.load(folder, **options) as engine:
        alone = [engine.generate(prompt, max_new_tokens=12, temperature=0.0) for prompt in prompts]
        together = engine.generate(prompts, max_new_tokens=12, temperature=0.0)
    assert [reply.ids for reply in together] == [reply.ids for reply in alone]
    lengths = [reply.stats.layer_lengths for reply in together]
    assert lengths == [reply.stats.layer_lengths for reply in alone]
    assert all(any(len(set(row)) > 1 for row in one) for one in lengths)
