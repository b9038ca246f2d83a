"""Every policy in the engine: it keeps what its scores say, equal bytes, in a cascade as at once, every turn."""

from __future__ import annotations

import pytest
import torch
from cake_infer.cache.indicators import INDICATORS
from cake_infer.cache.policies import POLICIES
from cake_infer.cache.policies.composed import ComposedPolicy
from cake_infer.engine.sequence import Sequence
from safetensors.torch import save_file

WINDOW, BUDGET = 8, 24
OPTIONS = {"lagkv": {"lag": 16}, "nexus": {"block": 4}, "chunkkv": {"chunk": 4}}


@pytest.fixture
def policy_runner(tmp_path, write_checkpoint, make_runner, monkeypatch):
    """A function `(policy, **options)` that gives a small model's runner and the list of scores that it will see."""

    def make(name, *, model=None, **options):
        folder = write_checkpoint(tmp_path / f"model-{name}-{len(options)}-{bool(model)}", **(model or {}))
        given = dict(OPTIONS.get(name, {}), **options.pop("policy_options", {}))
        if name == "gate":
            gates = {
                f"layers.{i}.weight": torch.randn(2, 32, generator=torch.Generator().manual_seed(i)) for i in range(9)
            }
            save_file(gates, tmp_path / "gates.safetensors")
            given["file"] = str(tmp_path / "gates.safetensors")
        runner = make_runner(
            folder, budget=BUDGET, window=WINDOW, chunk=32, policy=name, policy_options=given, **options
        )
        monkeypatch.setattr(type(runner), "separators", frozenset({7, 9, 30}))
        seen, score = [], ComposedPolicy.score

        def watched(policy, view):
            scored = score(policy, view)
            seen.append((view, scored.indicator.clone(), view.positions.clone()))
            return scored

        monkeypatch.setattr(ComposedPolicy, "score", watched)
        return runner, seen

    return make


def feed(runner, sequence, ids, new_tokens=1):
    return runner.feed(sequence, ids, runner.prepare(sequence, len(ids), new_tokens))


def assert_kept_is_best(kept, seen, total):
    """Each row is the window and the best of the rest, of equals the earlier, as if all layers had been cut at once."""
    for layer, (view, indicator, positions) in enumerate(seen):
        for kv, length in enumerate(view.columns):
            row = kept[layer, kv]
            old = [
                (-float(indicator[kv, column]), int(positions[kv, column]))
                for column in range(length)
                if positions[kv, column] < total - WINDOW
            ]
            best = {position for _, position in sorted(old)[: len(row) - WINDOW]}
            assert set(row) == best | set(range(total - WINDOW, total)), (layer, kv)


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "full"])
@pytest.mark.parametrize("model", [{}, {"model_type": "mistral", "sliding_window": 40}], ids=["plain", "sliding"])
def test_a_policy_keeps_the_best_by_its_scores_within_the_budget_turn_after_turn(
    policy_runner, random_ids, kept_positions, name, model
):
    runner, seen = policy_runner(name, model=model)
    sequence, total = Sequence(), 0
    layers, heads = runner.tenancy.arena.length.shape
    for count in (70, 1, 19, 45):
        seen.clear()
        total += count
        logits = feed(runner, sequence, random_ids(count, seed=count), 2)
        assert logits.isfinite().all()
        assert runner.tenancy.arena.kept_slots == BUDGET * layers * heads
        assert_kept_is_best(kept_positions(runner), seen, total)
        with torch.inference_mode():
            runner.step(runner.tenancy.arena, sequence, 5, window=WINDOW)
        total += 1


@pytest.mark.parametrize("name", list(INDICATORS))
def test_an_indicator_goes_with_rows_of_unequal_lengths(policy_runner, random_ids, kept_positions, name):
    runner, seen = policy_runner(name, heads="adaptive")
    sequence, total = Sequence(), 0
    ragged = False
    for count in (70, 3, 30):
        seen.clear()
        total += count
        assert feed(runner, sequence, random_ids(count, seed=count), 2).isfinite().all()
        length = runner.tenancy.arena.length
        assert int(length.sum()) == BUDGET * length.size
        ragged |= bool((length[:, 0] != length[:, 1]).any())
        assert_kept_is_best(kept_positions(runner), seen, total)
    assert ragged or name in ("streaming-llm", "tova", "chunkkv", "nexus", "lagkv"), "heads got unequal shares"


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "full"])
def test_the_chunks_of_a_prefill_change_nothing(policy_runner, random_ids, kept_positions, name):
    kept = []
    for chunk in (9, 200):
        runner, _ = policy_runner(name)
        runner.chunk = chunk
        feed(runner, Sequence(), random_ids(80))
        kept.append({row: sorted(positions) for row, positions in kept_positions(runner).items()})
    changed = sum(len(set(kept[0][row]) ^ set(kept[1][row])) for row in kept[0])
    assert changed <= 2, "but for one tie that rounding turned over"


@pytest.mark.parametrize("name", list(INDICATORS))
def test_an_indicator_goes_with_the_allocation_cake(policy_runner, random_ids, name):
    runner, _ = policy_runner(name, allocation="cake")
    feed(runner, Sequence(), random_ids(80))
    length = runner.tenancy.arena.length
    assert int(length.sum()) == BUDGET * length.size
    assert len(set(length[:, 0].tolist())) > 1, "layers get unequal shares"
    assert runner.policy(BUDGET).describe().startswith("cake tau" if name == "cake" else f"{name}, allocation cake tau")
