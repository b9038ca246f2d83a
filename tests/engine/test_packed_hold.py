"""Packed rows at their limit: what they give up, what is packed anew and what is not, and at which memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cake_infer import CacheConfig, Engine
from cake_infer.cache.layout import arena_bytes, arena_size
from cake_infer.engine.sequence import Sequence
from cake_infer.errors import OptionError

G, WINDOW = 32, 8
SHAPES = {
    "llama": {},
    "sliding": {"model_type": "mistral", "sliding_window": 50},
    "odd heads": {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48, "head_dim": 10},
}


def start(runner, sequence, ids, new_tokens):
    runner.feed(sequence, ids, runner.prepare(sequence, len(ids), new_tokens))


def through(numbers: np.ndarray, bits: int) -> np.ndarray:
    """What is left of a group of keys `[n, columns]`, each column with a scale of its own."""
    numbers, levels = numbers.astype(np.float32), np.float32(2**bits - 1)
    minimum = np.float16(numbers.min(0)).astype(np.float32)
    scale = np.float16((numbers.max(0) - minimum) / levels).astype(np.float32)
    codes = np.clip(np.round((numbers - minimum) / np.where(scale > 0, scale, np.float32(1))), 0, levels)
    return minimum.astype(np.float64) + codes.astype(np.float64) * scale


def bytes_of(arena, layer, head):
    """What is packed of a row, group by group: numbers and positions, copied."""
    packed, found = arena.packed, []
    for at in range(0, int(packed.length[layer, head]), G):
        first = int(packed.offset[layer, head]) + at
        found.append(
            [
                t[first // (len(packed.store.position) // len(t)) :][
                    : G if len(t) == len(packed.store.position) else 1
                ].clone()
                for t in packed.store.tables
            ]
        )
    return found


def worth_of(rule, attention, layer, head, positions):
    """By position what a token is worth, in the words of the rule."""
    own = attention[layer, head]
    if rule == "attention":
        return {at: own[at] for at in positions}
    if rule == "tova":  # heads have equally many query heads: sums and means are in the same order
        others = [row for (of, _), row in attention.items() if of == layer]
        return {at: sum(row.get(at, 0.0) for row in others) for at in positions}
    return {at: sum(own.get(at + i, 0.0) for i in range(-2, 3)) for at in positions}


@pytest.mark.parametrize(
    ("shape", "bits", "rule", "options"),
    [
        ("llama", 4, "attention", {"policy": "cake", "budget": 90}),
        ("sliding", 8, "cake", {"policy": "cake", "heads": "adaptive", "budget": 90}),
        ("odd heads", 2, "tova", {"policy": "snapkv", "budget": 72}),
    ],
)
def test_the_group_that_is_worth_least_goes_and_no_byte_of_another_is_touched(
    tmp_path, write_checkpoint, dense, dense_step, make_runner, random_ids, rendered, shape, bits, rule, options
):
    """Against float64 over the rows as their bytes say: the logits, whose worth is least, and what is packed anew."""
    folder = write_checkpoint(tmp_path / "model", **SHAPES[shape])
    runner = make_runner(
        folder, kv_bits=bits, window=WINDOW, chunk=16, step="eager", decode_policy="hold", hold_by=rule, **options
    )
    sequence, new = Sequence(), random_ids(140, seed=1)
    start(runner, sequence, random_ids(150), len(new) + 1)
    arena, model = runner.tenancy.arena, dense(folder)
    rows, nbytes, cuts, packed = list(np.ndindex(*arena.length.shape)), arena.nbytes, 0, set()
    wanted = -(-(arena.held - WINDOW) // G) * G  # whole groups
    for token in new:
        arena.flush()  # rows that may still grow, as the step would
        if not (arena.length == WINDOW + G - 1).any() and sequence.total % 20:
            with torch.inference_mode():
                runner.step(arena, sequence, token, window=WINDOW)
            continue
        before = {row: bytes_of(arena, *row) for row in rows}
        numbers = {row: rendered(arena, *row) for row in rows}
        lengths, newest = arena.packed.length.copy(), sequence.total
        expected, attention = dense_step(model, arena, token, newest)
        with torch.inference_mode():
            logits = runner.step(arena, sequence, token, window=WINDOW)
        torch.testing.assert_close(logits.double(), expected, rtol=0, atol=1e-4)
        assert (arena.held <= sequence.limit + G - 1).all()
        assert (sequence.limit == wanted + WINDOW).all()
        for row in rows:
            held = rendered(arena, *row)
            assert len(set(held[2])) == len(held[2])
            assert set(range(newest - WINDOW + 1, newest + 1)) <= set(held[2])
            old = numbers[row]
            if set(held[2]) == {*old[2], newest} or lengths[row] < wanted[row]:
                continue
            cuts += 1
            outside = old[2][: int(lengths[row]) + G]
            groups = [outside[at : at + G] for at in range(0, len(outside), G)]
            worth = worth_of(rule, attention, *row, outside)
            sums = [sum(worth[at] for at in group) for group in groups]
            gone = set(old[2]) - set(held[2])
            place = [set(group) for group in groups].index(gone)
            assert sums[place] == pytest.approx(min(sums), rel=1e-4, abs=1e-9)
            packed.add(place < len(groups) - 1)
            for at, (one, other) in enumerate(zip(before[row], bytes_of(arena, *row), strict=True)):
                if at != place:
                    assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))
                    continue
                assert held[2][at * G : at * G + G] == groups[-1]
                exact = old[0][int(lengths[row]) : int(lengths[row]) + G]
                np.testing.assert_allclose(held[0][at * G : at * G + G], through(exact, bits), rtol=1e-5, atol=1e-5)
    assert cuts >= 3 * len(rows)
    # packed groups went, and newcomers; but behind a sliding window there is always one that is seen no more
    assert packed == ({True} if shape == "sliding" else {True, False})
    assert arena.nbytes == nbytes


@pytest.mark.parametrize("prompt", [150, 20])
@pytest.mark.parametrize(
    ("bits", "shape"),
    [(4, {"num_attention_heads": 2}), (8, {"num_attention_heads": 6, "model_type": "mistral", "sliding_window": 48})],
)
def test_the_compiled_step_is_that_of_plain_torch_over_the_same_rows_and_gives_up_the_same(
    tmp_path, write_checkpoint, make_runner, random_ids, rendered, bits, shape, prompt
):
    folder = write_checkpoint(tmp_path / "model", head_dim=32, **shape)
    options = {"kv_bits": bits, "window": WINDOW, "decode_policy": "hold", "heads": "adaptive", "budget": 90}
    slow, fast = (make_runner(folder, step=step, **options) for step in ("eager", "compiled"))
    assert type(fast.step).__name__ == "IntervalStep"
    sequences, cuts = (Sequence(), Sequence()), 0
    for turn, tokens in enumerate((prompt, 30)):  # the second turn goes on from held rows
        for runner, sequence in zip((slow, fast), sequences, strict=True):
            start(runner, sequence, random_ids(tokens, seed=turn), 150)
        arenas = slow.tenancy.arena, fast.tenancy.arena
        for token in random_ids(149, seed=10 + turn):
            # a key that is rounded before it is packed may fall to the next level, of which there are few
            arenas[0].load(arenas[1].save())
            sequences[0].ring.restore(sequences[1].ring.copy())
            before = arenas[1].length.copy()
            with torch.inference_mode():
                logits = [
                    runner.step(arena, sequence, token, window=WINDOW)
                    for runner, arena, sequence in zip((slow, fast), arenas, sequences, strict=True)
                ]
            torch.testing.assert_close(*logits, rtol=0, atol=1e-4 * max(1.0, float(logits[0].abs().max()) / 10))
            cuts += int((arenas[1].length < before).sum())
            for row in np.ndindex(*before.shape):
                assert rendered(arenas[0], *row)[2] == rendered(arenas[1], *row)[2]
    assert cuts > 5 * before.size


@pytest.mark.parametrize("step", ["eager", "compiled"])
@pytest.mark.parametrize(("budget", "prompt"), [(75, 100), (75, 9), (WINDOW, 30)])
def test_memory_stays_as_it_is_for_a_thousand_tokens(
    tmp_path, write_checkpoint, make_runner, random_ids, rendered, step, budget, prompt
):
    folder = write_checkpoint(tmp_path / "model", head_dim=32, num_attention_heads=2, num_hidden_layers=2)
    runner = make_runner(folder, kv_bits=4, window=WINDOW, step=step, decode_policy="hold", budget=budget)
    sequence, new = Sequence(), random_ids(1000, seed=1)
    start(runner, sequence, random_ids(prompt), 3000)
    arena = runner.tenancy.arena
    packed = -(-(budget - WINDOW) // G) * G  # of rows that are equally long
    nbytes, rows = arena.nbytes, arena.length.size
    for token in new:
        with torch.inference_mode():
            assert runner.step(arena, sequence, token, window=WINDOW).isfinite().all()
        assert (arena.held < sequence.limit + G).all()
        assert (arena.packed.length <= arena.packed.capacity).all()
    assert arena.nbytes == nbytes
    assert runner.tenancy.arena is arena
    assert (arena.packed.length == sequence.limit - WINDOW).all()
    assert abs(int(arena.packed.length.sum()) - rows * packed) <= rows * (G - 1)
    for row in np.ndindex(*arena.length.shape):
        positions = rendered(arena, *row)[2]
        assert len(set(positions)) == len(positions)
        assert set(range(prompt + 1000 - WINDOW, prompt + 1000)) <= set(positions)
        assert max(positions) == prompt + 999


def test_alone_and_in_a_batch_a_reply_is_the_same_and_a_chat_stays_within_its_bytes(model_folder, random_ids):
    options = {"kv_bits": 4, "budget": 60, "window": WINDOW, "decode_policy": "hold", "policy": "snapkv"}
    folder = model_folder(head_dim=32, num_attention_heads=2)
    prompts = [random_ids(n, seed=n) for n in (20, 150, 90)]
    found = {}
    for step in ("eager", "compiled"):
        with Engine.load(folder, step=step, **options) as engine:
            alone = [engine.generate(ids=prompt, max_new_tokens=120, temperature=0.0) for prompt in prompts]
            together = engine.generate(prompts, max_new_tokens=120, temperature=0.0)
            found[step] = [one.ids for one in alone]
            assert [one.ids for one in together] == found[step]
            chat, layout = engine.chat(), engine.runner.layout
            rows, most = layout.num_layers * layout.num_kv_heads, 60 + 2 * (G - 1)
            for turn in range(6):
                before = chat.tokens_used
                for _ in chat.send("and what? " * (9 - turn), max_new_tokens=100):
                    arena = engine.runner.tenancy.arena
                    assert (arena.held <= most).all()
                fed = chat.tokens_used - before
                size = arena_size(
                    layout, budget=60, tokens=fed, new_tokens=100, hold=1, held=rows * most, held_longest=most
                )
                assert arena.nbytes <= arena_bytes(layout, size)
    assert found["eager"] == found["compiled"]


@pytest.mark.parametrize("step", ["eager", "compiled"])
def test_a_document_keeps_its_rows_and_each_question_gets_the_same_answer(tmp_path, model_folder, random_ids, step):
    options = {"kv_bits": 8, "budget": 60, "window": WINDOW, "decode_policy": "hold", "step": step}
    folder = model_folder(head_dim=32, num_attention_heads=6)
    with Engine.load(folder, **options) as engine:
        document = engine.compress(ids=random_ids(300))
        document.save(tmp_path / "a.cake")
        questions = [random_ids(n, seed=n) for n in (30, 7)]

        def answers(found, asked):
            return [engine.generate(ids=ids, cache=found, max_new_tokens=90, temperature=0.0).ids for ids in asked]

        first = answers(document, questions)
        arena = engine.runner.tenancy.arena
        assert (arena.held < document.snapshot.rows.held + 7 + 2 * G).all()
        assert answers(document, questions[::-1]) == first[::-1]
        assert answers(engine.load_document(tmp_path / "a.cake"), questions) == first


def test_what_has_no_form_is_refused_and_says_what_has():
    hold = {"kv_bits": 4, "decode_policy": "hold"}
    for by in (None, "attention", "tova", "cake,pool=3", "attention,interval=32"):
        CacheConfig(**hold, hold_by=by)
    for by in ("h2o", "g-kv", "r-kv", "streaming-llm"):
        with pytest.raises(OptionError, match=rf"hold by {by} has no form for the option kv_bits.*attention, tova"):
            CacheConfig(**hold, hold_by=by)
    for more in (
        {"hold_by": "cake,interval=5"},
        {"hold_by": "attention,interval=1"},
        {"policy_options": ["interval=1"]},
    ):
        with pytest.raises(
            OptionError, match=r"packed rows are cut every 32 tokens, not every [15]: leave interval out"
        ):
            CacheConfig(**hold, **more)
    with pytest.raises(OptionError, match=r"recascade .* has no form for the option kv_bits"):
        CacheConfig(**hold, policy="cake", recascade=64)
