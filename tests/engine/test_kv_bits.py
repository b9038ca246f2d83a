"""Packed rows in a model: what is packed, what a step reads of it, and what turns, files and figures make of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cake_infer import CacheConfig, Engine
from cake_infer.cache.layout import arena_bytes, shared_size
from cake_infer.engine.batch import Batch
from cake_infer.engine.sequence import Sequence
from cake_infer.errors import BackendError, OptionError, SnapshotError

G, WINDOW = 32, 8


def through(numbers: np.ndarray, bits: int) -> np.ndarray:
    """What is left of numbers `[n, columns]`, each column a group."""
    numbers, levels = numbers.astype(np.float32), np.float32(2**bits - 1)  # roundings are those of fp32
    minimum = np.float16(numbers.min(0)).astype(np.float32)
    scale = np.float16((numbers.max(0) - minimum) / levels).astype(np.float32)
    codes = np.clip(np.round((numbers - minimum) / np.where(scale > 0, scale, np.float32(1))), 0, levels)
    return minimum.astype(np.float64) + codes.astype(np.float64) * scale


def feed(runner, sequence, ids, new_tokens=1):
    return runner.feed(sequence, ids, runner.prepare(sequence, len(ids), new_tokens))


@pytest.fixture(params=["llama", "sliding", "odd heads"])
def folder(request, tmp_path, write_checkpoint):
    options = {
        "llama": {},
        "sliding": {"model_type": "mistral", "sliding_window": 50},
        "odd heads": {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48, "head_dim": 10},
    }
    return write_checkpoint(tmp_path / "model", **options[request.param])


@pytest.mark.parametrize(
    ("bits", "options"),
    [
        (4, {"policy": "cake", "budget": 60}),
        (2, {"policy": "cake", "heads": "adaptive", "budget": 60}),
        (8, {"policy": "full"}),
    ],
)
def test_a_step_attends_over_the_packed_rows_as_their_bytes_say(
    folder, dense, dense_step, make_runner, random_ids, bits, options
):
    runner = make_runner(folder, kv_bits=bits, window=WINDOW, chunk=16, step="eager", **options)
    sequence, prompt, new = Sequence(), random_ids(120), random_ids(45, seed=1)
    feed(runner, sequence, prompt, len(new) + 1)
    arena, model = runner.tenancy.arena, dense(folder)
    kept = arena.kept_slots
    assert kept <= (120 if options["policy"] == "full" else 60) * arena.held.size
    assert (arena.length == WINDOW).all()
    for number, token in enumerate(new):
        arena.flush()
        with torch.inference_mode():
            expected = dense_step(model, arena, token, sequence.total)[0] if number % 15 in (0, 14) else None
            logits = runner.step(arena, sequence, token, window=WINDOW)
        if expected is not None:
            torch.testing.assert_close(logits.double(), expected, rtol=0, atol=1e-4)
    assert (arena.packed.length + arena.length == arena.held).all()
    assert arena.kept_slots == kept + len(new) * arena.held.size
    assert (arena.length <= WINDOW + G).all()


@pytest.mark.parametrize("policy", ["snapkv", "cake", "full"])
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_what_was_kept_is_packed_from_what_was_computed(folder, make_runner, random_ids, rendered, policy, bits):
    """In groups of 32 by worth, from staging: the KV dtype rounds nothing of it first."""
    prompt = random_ids(150)
    options = {"policy": policy, "window": WINDOW} | ({} if policy == "full" else {"budget": 75})
    plain = make_runner(folder, **options)
    feed(plain, Sequence(), prompt)
    runner = make_runner(folder, kv_bits=bits, kv_dtype=torch.bfloat16, **options)
    feed(runner, Sequence(), prompt)
    arena = runner.tenancy.arena
    for layer in range(plain.layout.num_layers):
        for head in range(plain.layout.num_kv_heads):
            exact = [table.double().numpy() for table in plain.tenancy.arena.row(layer, head)]
            place = {int(position): i for i, position in enumerate(exact[2])}
            keys, values, positions = rendered(arena, layer, head)
            assert sorted(positions) == sorted(place)
            n = int(arena.packed.length[layer, head])
            order = [place[position] for position in positions[:n]]
            cut = policy != "full" and layer < plain.layout.num_layers - 1  # later layers may have cut the last group
            whole = n // G * G if cut else n
            wanted = [through(exact[0][order[at : at + G]][: whole - at], bits) for at in range(0, whole, G)]
            np.testing.assert_allclose(keys[:whole], np.concatenate(wanted), rtol=1e-5, atol=1e-5)
            dim = plain.layout.head_dim
            rows = exact[1][order].reshape(n, -1, G if dim % G == 0 else dim)
            wanted = np.stack([through(row.T, bits).T.reshape(-1) for row in rows])
            np.testing.assert_allclose(values[:n], wanted, rtol=1e-5, atol=1e-5)
            window = [place[position] for position in positions[n:]]
            rounded = torch.from_numpy(exact[0][window]).to(torch.bfloat16).double().numpy()
            np.testing.assert_array_equal(keys[n:], rounded)


def test_8_bits_are_close_to_all_of_them_and_fewer_less_so(tmp_path, write_checkpoint, make_runner, random_ids):
    folder, prompt, new = write_checkpoint(tmp_path / "model"), random_ids(120), random_ids(8, seed=1)

    def logits(**options):
        runner = make_runner(folder, budget=60, window=WINDOW, step="eager", **options)
        sequence = Sequence()
        feed(runner, sequence, prompt, len(new) + 1)
        with torch.inference_mode():
            return torch.stack([runner.step(runner.tenancy.arena, sequence, token, window=WINDOW) for token in new])

    exact = logits()
    errors = [float((logits(kv_bits=bits) - exact).abs().max()) for bits in (8, 4, 2)]
    assert errors[0] < 0.02 * float(exact.abs().max())
    assert errors[0] < errors[1] < errors[2]


def test_turns_stay_within_the_budget_and_the_bytes_that_were_promised(
    tmp_path, write_checkpoint, make_runner, random_ids, rendered
):
    folder = write_checkpoint(tmp_path / "model", max_position_embeddings=2048)
    runner = make_runner(folder, budget=64, window=WINDOW, kv_bits=4)
    sequence = Sequence()
    for turn, tokens in enumerate((150, 3, 90)):
        feed(runner, sequence, random_ids(tokens, seed=turn), 50)
        arena = runner.tenancy.arena
        assert arena.kept_slots <= 64 * arena.held.size
        taken = arena.store.nbytes + arena.packed.store.nbytes
        assert arena.nbytes == taken == arena_bytes(arena.layout, arena.size)
        with torch.inference_mode():
            for token in random_ids(45, seed=turn + 100):
                logits = runner.step(arena, sequence, token, window=WINDOW)
        assert logits.isfinite().all()
        saved = runner.checkpoint(sequence)
        before = [rendered(arena, 1, 0)[0], arena.held.copy()]
        feed(runner, sequence, random_ids(30, seed=turn + 200), 3)
        runner.restore(sequence, saved)
        runner.tenancy.activate(sequence)
        np.testing.assert_array_equal(rendered(runner.tenancy.arena, 1, 0)[0], before[0])
        np.testing.assert_array_equal(runner.tenancy.arena.held, before[1])


@pytest.mark.parametrize("policy", ["cake", "full"])
def test_a_saved_document_is_packed_and_answers_as_the_one_in_memory(tmp_path, model_folder, random_ids, policy):
    folder, file = model_folder(max_position_embeddings=1024), tmp_path / "doc.cake"
    options = {"policy": policy, "window": WINDOW} | ({} if policy == "full" else {"budget": 100})
    with Engine.load(folder, kv_bits=4, **options) as engine:
        document = engine.compress(ids=random_ids(300))
        document.save(file)
        question = random_ids(20, seed=5)
        first = engine.generate(ids=question, cache=document, max_new_tokens=50, temperature=0.0)
        again = engine.generate(ids=question, cache=engine.load_document(file), max_new_tokens=50, temperature=0.0)
        assert first.ids == again.ids
        assert document.nbytes < 0.5 * 4 * 2 * engine.config.head_dim * document.snapshot.rows.held.sum()
        size = file.stat().st_size
    with Engine.load(folder, kv_bits=4, **options) as other:
        third = other.generate(ids=question, cache=other.load_document(file), max_new_tokens=50, temperature=0.0)
        assert third.ids == first.ids
    with Engine.load(folder, **options) as plain:
        with pytest.raises(SnapshotError, match="kv_bits 4"):
            plain.generate(ids=question, cache=plain.load_document(file))
        wide = plain.compress(ids=random_ids(300))
        wide.save(file)
        assert file.stat().st_size > 1.5 * size
    with (
        Engine.load(folder, kv_bits=4, **options) as engine,
        pytest.raises(SnapshotError, match="without the option kv_bits"),
    ):
        engine.generate(ids=question, cache=engine.load_document(file))


def test_statistics_and_plan_count_packed_bytes(model_folder, random_ids):
    folder = model_folder(max_position_embeddings=1024)
    results = {}
    for bits in (None, 8, 4, 2):
        with Engine.load(folder, budget=200, window=WINDOW, kv_bits=bits) as engine:
            results[bits] = engine.generate(ids=random_ids(400), max_new_tokens=40, temperature=0.0).stats
            layout, arena = engine.runner.layout, engine.runner.tenancy.arena
            assert arena.nbytes == arena_bytes(layout, arena.size)
    rows = len(results[None].layer_lengths) * len(results[None].layer_lengths[0])
    dim = layout.head_dim
    assert results[None].kept_bytes == 200 * rows * 2 * dim * 4
    for bits in (8, 4, 2):
        stats = results[bits]
        assert stats.layer_lengths == results[None].layer_lengths
        assert stats.full_bytes == results[None].full_bytes
        packed = sum(-(-(n - WINDOW) // G) * G for row in stats.layer_lengths for n in row)
        codes = packed * 2 * dim * bits // 8
        scales = packed // G * dim * 4 + packed * 4 * (dim // G or 1)
        assert stats.kept_bytes == rows * WINDOW * 2 * dim * 4 + codes + scales
        assert f"{bits} bits" in stats.line()


def test_what_cannot_be_is_refused_before_a_weight_is_read(model_folder):
    for bits in (3, 0, 16, True, "4"):
        with pytest.raises(OptionError, match="kv_bits must be one of 8, 4, 2"):
            CacheConfig(kv_bits=bits)
    folder = model_folder()
    (folder / "model.safetensors").write_bytes(b"")
    wanted = (
        ({"step": "graph"}, "needs a CUDA device"),
        ({"attention": "flash_attn"}, "packed rows of kv_bits"),
        ({"step": "graph", "decode_policy": "hold"}, "needs a CUDA device"),
    )
    for options, reason in wanted:
        with pytest.raises(BackendError, match=reason):
            Engine.load(folder, kv_bits=4, device="cpu", **options)


def test_a_list_of_prompts_gets_what_each_would_get_alone(model_folder, random_ids):
    prompts = [random_ids(n, seed=n) for n in (20, 150, 90)]
    with Engine.load(model_folder(), kv_bits=4, budget=60, window=WINDOW) as engine:
        alone = [engine.generate(ids=prompt, max_new_tokens=40, temperature=0.0) for prompt in prompts]
        together = engine.generate(prompts, max_new_tokens=40, temperature=0.0)
    assert [one.ids for one in together] == [one.ids for one in alone]
    assert [one.stats.kept_bytes for one in together] == [one.stats.kept_bytes for one in alone]


@pytest.mark.parametrize(("decode_policy", "new"), [("grow", 3), ("hold", 80)])
def test_a_fixed_store_has_room_for_the_longest_prompts(model_folder, random_ids, decode_policy, new):
    """A server makes its store once: packed rows and what is read beside them share it as such prompts do."""
    options = {"kv_bits": 4, "budget": 100, "window": WINDOW, "decode_policy": decode_policy}
    with Engine.load(model_folder(max_position_embeddings=600), **options) as engine:
        runner, generation = engine.runner, engine.resolved(max_new_tokens=new, temperature=0.0)
        size = runner.fit(Sequence(), 300, 300).size
        limit = shared_size(runner.layout, [size] * 3).nbytes(runner.layout) + 1000
        alone = [
            engine.generate(ids=random_ids(290, seed=n), max_new_tokens=new, temperature=0.0).ids for n in range(3)
        ]
        with Batch(runner, most=3, limit=limit, fixed=True) as batch:
            store, found, sequences = batch.arena.packed, {}, []
            assert batch.arena.nbytes <= limit
            for n in range(3):
                sequences.append(sequence := Sequence())
                batch.join(sequence, random_ids(290, seed=n), generation)
                found[id(sequence)] = []
            while len(batch):
                for outcome in batch.step():
                    if outcome.token is not None:
                        found[id(outcome.sequence)].append(outcome.token.id)
            assert batch.arena.packed is store
    assert [tuple(ids) for ids in found.values()] == alone
