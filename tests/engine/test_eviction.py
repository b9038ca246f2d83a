"""What is kept is what the paper says, and decoding over it equals a dense model to which the rest is hidden."""

from __future__ import annotations

import pytest
import torch
from cake_infer.engine.sequence import Sequence

WINDOW = 8


def feed(runner, sequence, ids, new_tokens=0):
    limit = runner.prepare(sequence, len(ids), max(new_tokens, 1))
    return runner.feed(sequence, ids, limit)


@torch.inference_mode()
def decode(runner, sequence, ids):
    from cake_infer.engine import decode as steps

    arena = runner.tenancy.arena
    return torch.stack(
        [steps.step(runner.decoder, arena, sequence, token, window=runner.cache.window) for token in ids]
    )


@pytest.fixture(params=["llama", "sliding", "deep"])
def folder(request, tmp_path, write_checkpoint):
    options = {
        "llama": {},
        "sliding": {"model_type": "mistral", "sliding_window": 50},
        "deep": {"num_hidden_layers": 6, "num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48},
    }
    return write_checkpoint(tmp_path / "model", **options[request.param])


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_kept_rows_are_those_of_the_paper_and_decoding_equals_the_masked_dense_model(
    folder, dense, make_runner, random_ids, kept_positions, chunk, poison, visible_after
):
    prompt, new = random_ids(120), random_ids(20, seed=1)
    runner = make_runner(folder, policy="cake", budget=24, window=WINDOW, chunk=chunk)
    sequence = Sequence()
    first = feed(runner, sequence, prompt, len(new) + 1)
    kept = kept_positions(runner)
    model = dense(folder)
    full = model.logits(prompt)
    torch.testing.assert_close(first.double(), full[-1], rtol=0, atol=1e-4)
    everything = {key: list(range(len(prompt))) for key in kept}
    expected = model.cake(everything, len(prompt), budget=24, window=WINDOW)
    model.assert_chosen(kept, expected)
    assert len({len(positions) for positions in kept.values()}) > 1, (
        "every layer kept the same: the budget does not bind"
    )
    layers = runner.layout.num_layers
    assert sum(len(positions) for positions in kept.values()) == 24 * layers * runner.layout.num_kv_heads
    poison(runner.tenancy.arena)
    logits = decode(runner, sequence, new)
    ids = prompt + new
    reference = model.logits(ids, visible_after(kept, len(prompt), len(ids)))[len(prompt) :]
    torch.testing.assert_close(logits.double(), reference, rtol=0, atol=1e-4)


def test_a_row_is_stored_window_first_and_then_by_worth(folder, make_runner, random_ids, kept_positions):
    runner = make_runner(folder, policy="cake", budget=24, window=WINDOW)
    feed(runner, Sequence(), random_ids(120))
    arena = runner.tenancy.arena
    for (layer, head), positions in kept_positions(runner).items():
        assert positions[:WINDOW] == list(range(120 - WINDOW, 120))
        start = int(arena.offset[layer, head])
        score = arena.score[start + WINDOW : start + len(positions)]
        assert torch.all(score[:-1] >= score[1:])


def test_rows_of_different_lengths_per_head_decode_as_the_masked_dense_model(
    folder, dense, make_runner, random_ids, kept_positions, poison, visible_after
):
    prompt, new = random_ids(100), random_ids(20, seed=1)
    runner = make_runner(folder, budget=40, window=WINDOW)
    sequence = Sequence()
    feed(runner, sequence, prompt, len(new) + 1)
    arena, generator = runner.tenancy.arena, torch.Generator().manual_seed(0)
    for layer in range(runner.layout.num_layers):
        for head in range(runner.layout.num_kv_heads):
            drop = int(torch.randint(0, int(arena.length[layer, head]) - WINDOW + 1, (1,), generator=generator))
            arena.length[layer, head] -= drop
    assert not all(arena.agrees(layer) for layer in range(runner.layout.num_layers))
    kept = kept_positions(runner)
    poison(runner.tenancy.arena)
    logits = decode(runner, sequence, new)
    ids = prompt + new
    reference = dense(folder).logits(ids, visible_after(kept, len(prompt), len(ids)))[len(prompt) :]
    torch.testing.assert_close(logits.double(), reference, rtol=0, atol=1e-4)


@pytest.mark.parametrize("lengths", [(10, 50, 3)])
def test_forced_lengths_per_layer_write_behind_each_row(
    tmp_path, write_checkpoint, dense, make_runner, random_ids, kept_positions, lengths, poison, visible_after
):
    folder = write_checkpoint(tmp_path / "model")
    prompt, new = random_ids(60), random_ids(30, seed=1)
    runner = make_runner(folder, policy="full", window=3)
    sequence = Sequence()
    feed(runner, sequence, prompt, len(new) + 1)
    arena = runner.tenancy.arena
    for layer, length in enumerate(lengths):
        arena.length[layer] = length
    kept, offset = kept_positions(runner), arena.offset.copy()
    poison(runner.tenancy.arena)
    logits = decode(runner, sequence, new)
    for layer, length in enumerate(lengths):
        for head in range(2):
            written = arena.position[offset[layer, head] + length :][: len(new)]
            assert written.tolist() == list(range(len(prompt), len(prompt) + len(new)))
    ids = prompt + new
    reference = dense(folder).logits(ids, visible_after(kept, len(prompt), len(ids)))[len(prompt) :]
    torch.testing.assert_close(logits.double(), reference, rtol=0, atol=1e-4)


@pytest.mark.parametrize("piece", [1, WINDOW - 1, WINDOW, 100, 1000])
def test_a_continued_prefill_keeps_what_one_dealing_over_old_rows_and_new_tokens_keeps(
    folder, dense, make_runner, random_ids, kept_positions, piece
):
    pieces = [random_ids(90), random_ids(piece, seed=1), random_ids(11, seed=2)]
    runner = make_runner(folder, policy="cake", budget=24, window=WINDOW, chunk=37)
    model, sequence, ids = dense(folder), Sequence(), []
    held: dict = {}
    masks: dict = {}
    total = sum(map(len, pieces))
    for part in pieces:
        before = len(ids)
        ids = ids + part
        logits = feed(runner, sequence, part)
        kept = kept_positions(runner)
        if not masks:
            held = {key: [] for key in kept}
            masks = {row: torch.ones(total, total, dtype=torch.bool) for row in kept}
        for row, mask in masks.items():
            mask[before:, :before] = False
            mask[before:, held[row]] = True
        reference = model.logits(ids, {row: mask[: len(ids), : len(ids)] for row, mask in masks.items()})
        torch.testing.assert_close(logits.double(), reference[-1], rtol=0, atol=1e-4)
        columns = {row: [*held[row], *range(before, len(ids))] for row in kept}
        expected = model.cake(columns, len(ids), budget=24, window=WINDOW)
        model.assert_chosen(kept, expected)
        held = kept


def test_decoded_tokens_are_voted_on_and_vote_themselves(
    dense, make_runner, random_ids, kept_positions, folder, visible_after
):
    prompt, reply, turn = random_ids(90), random_ids(13, seed=1), random_ids(3, seed=2)
    runner = make_runner(folder, policy="cake", budget=24, window=WINDOW)
    model, sequence = dense(folder), Sequence()
    feed(runner, sequence, prompt, len(reply) + 1)
    held = kept_positions(runner)
    decode(runner, sequence, reply)
    ids, total = prompt + reply + turn, len(prompt) + len(reply) + len(turn)
    feed(runner, sequence, turn)
    model.logits(ids, visible_after(held, len(prompt), total))
    columns = {row: [*held[row], *range(len(prompt), total)] for row in held}
    expected = model.cake(columns, total, budget=24, window=WINDOW)
    model.assert_chosen(kept_positions(runner), expected)


@pytest.mark.parametrize("prompt", [1, 7, 8, 9, 15, 16, 17, 31, 32, 33])
def test_prompts_around_window_and_budget(tmp_path, write_checkpoint, make_runner, random_ids, kept_positions, prompt):
    folder = write_checkpoint(tmp_path / "model")
    ids, new = random_ids(prompt), random_ids(5, seed=1)
    runner, full = make_runner(folder, budget=16, window=8), make_runner(folder, policy="full", window=8)
    logits = []
    for one in (runner, full):
        sequence = Sequence()
        first = feed(one, sequence, ids, 6)
        if one is runner:
            kept = kept_positions(runner)
        logits.append(torch.cat([first[None], decode(one, sequence, new)]))
    if prompt <= 16:
        assert all(len(positions) == prompt for positions in kept.values())
        torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=1e-5)
        assert logits[0].argmax(-1).tolist() == logits[1].argmax(-1).tolist()
    else:
        assert sum(map(len, kept.values())) == 16 * len(kept)
        assert all(8 <= len(positions) <= prompt for positions in kept.values())
        torch.testing.assert_close(logits[0][0], logits[1][0], rtol=0, atol=1e-5)


def test_a_budget_far_above_the_prompt_neither_evicts_nor_allocates(
    tmp_path, write_checkpoint, make_runner, random_ids
):
    folder = write_checkpoint(tmp_path / "model")
    runner = make_runner(folder, budget=10_000)
    feed(runner, Sequence(), random_ids(20), 4)
    arena = runner.tenancy.arena
    assert (arena.length == 20).all()
    assert arena.keys.shape[0] <= 3 * 2 * (20 + 4) + 2 * 20


@pytest.mark.parametrize("chunk", [500, 128, 37, 1])
def test_the_budget_holds_for_any_chunk_size_and_the_kept_rows_do_not_depend_on_it(
    tmp_path, write_checkpoint, make_runner, random_ids, kept_positions, chunk
):
    folder = write_checkpoint(tmp_path / "model")
    runner = make_runner(folder, budget=40, window=8, chunk=chunk)
    feed(runner, Sequence(), random_ids(500))
    kept = kept_positions(runner)
    assert sum(map(len, kept.values())) == 40 * 3 * 2
    assert all(set(range(492, 500)) <= set(positions) for positions in kept.values())
    whole = make_runner(folder, budget=40, window=8, chunk=500)
    feed(whole, Sequence(), random_ids(500))
    assert kept == kept_positions(whole)


def test_the_arena_holds_rows_per_kv_head_not_per_query_head(tmp_path, write_checkpoint, make_runner, random_ids):
    folder = write_checkpoint(tmp_path / "model", num_attention_heads=8, num_key_value_heads=2)
    runner = make_runner(folder, budget=20, window=8)
    feed(runner, Sequence(), random_ids(100), 1)
    arena = runner.tenancy.arena
    assert arena.kept_slots == 20 * 3 * 2
    slots = 3 * 20 * 2 + 100 * 2  # kept rows and one layer of staging, each per KV head
    assert arena.nbytes == slots * (2 * 8 * 4 + 8)
