"""One prefill for many policies keeps, of each, what a prefill with that policy and budget keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cake_infer.cache.config import CacheConfig
from cake_infer.cache.policies import POLICIES, make_policy
from cake_infer.engine.evaluation.fidelity import _size
from cake_infer.engine.evaluation.study import Cell, read
from cake_infer.engine.sequence import Sequence

WINDOW = 8
COMBINATIONS = [
    {"policy": "cake"},
    {"policy": "snapkv"},
    {"policy": "streaming-llm"},
    {"policy": "snapkv", "allocation": "cake"},
    {"policy": "cake", "allocation": "uniform"},
    {"policy": "cake", "tau1": 0.4},
    {"policy": "cake", "gamma": 3.0},
    {"policy": "cake", "heads": "adaptive"},
    {"policy": "pyramidkv"},
    {"policy": "snapkv", "allocation": "squeeze"},
    {"policy": "snapkv", "allocation": "d2o"},
]


def cells(runner, combinations, budgets):
    configs = [CacheConfig(window=WINDOW, **options) for options in combinations]
    return [Cell(make_policy(config, runner.model, budget), budget) for config in configs for budget in budgets]


def positions(kept, runner):
    rows = {}
    for layer in range(runner.layout.num_layers):
        for head in range(runner.layout.num_kv_heads):
            rows[layer, head] = kept.columns(layer, head).tolist()
    return rows


@pytest.mark.parametrize("sliding", [None, 60])
def test_every_cell_keeps_what_its_own_prefill_keeps(
    tmp_path, write_checkpoint, make_runner, random_ids, kept_positions, sliding
):
    family = {"model_type": "mistral", "sliding_window": sliding} if sliding else {}
    folder = write_checkpoint(tmp_path / "model", num_hidden_layers=4, **family)
    prompt, budgets = random_ids(150), [20, 40]
    runner = make_runner(folder, policy="full", window=WINDOW)
    reading = read(runner, prompt, cells(runner, COMBINATIONS, budgets), new_tokens=4)
    found = [positions(kept, runner) for kept in reading.kept]
    assert len({str(rows) for rows in found}) == len(found), "two cells kept the same: nothing is compared"
    for number, options in enumerate(COMBINATIONS):
        for place, budget in enumerate(budgets):
            real = make_runner(folder, window=WINDOW, budget=budget, **options)
            sequence = Sequence()
            real.feed(sequence, prompt, real.prepare(sequence, len(prompt), 4))
            assert found[number * len(budgets) + place] == kept_positions(real), (options, budget)


def test_every_policy_by_name_keeps_what_its_own_prefill_keeps(
    tmp_path, write_checkpoint, make_runner, random_ids, kept_positions
):
    """Alone and among all others: what one policy asks for must not change what another one sees."""
    folder = write_checkpoint(tmp_path / "model")
    prompt = random_ids(100)
    without = ("full", "gate")  # the one keeps everything, the other needs a file
    names = [name for name in POLICIES if name not in without]
    names = [name for name in names if CacheConfig(policy=name).choice.merge.name == "none"]
    runner = make_runner(folder, policy="full", window=WINDOW)
    runner.__dict__["separators"] = frozenset(range(10, 40))  # what a tokenizer would say
    reading = read(runner, prompt, cells(runner, [{"policy": name} for name in names], [24]), new_tokens=4)
    for name, kept in zip(names, reading.kept, strict=True):
        real = make_runner(folder, window=WINDOW, budget=24, policy=name)
        real.__dict__["separators"] = runner.separators
        sequence = Sequence()
        real.feed(sequence, prompt, real.prepare(sequence, len(prompt), 4))
        assert {row: set(columns) for row, columns in positions(kept, runner).items()} == {
            row: set(columns) for row, columns in kept_positions(real).items()
        }, name


def test_a_cell_with_a_window_of_its_own_keeps_what_a_prefill_with_that_window_keeps(
    tmp_path, write_checkpoint, make_runner, random_ids, kept_positions
):
    folder, prompt, budget = write_checkpoint(tmp_path / "model"), random_ids(100), 24
    runner = make_runner(folder, policy="full", window=WINDOW)
    pairs = [("cake", 8), ("cake", 3), ("snapkv", 5), ("tova", 1), ("snapkv", 8)]
    found = read(
        runner,
        prompt,
        [Cell(make_policy(CacheConfig(policy=name), runner.model, budget), budget, window=own) for name, own in pairs],
        new_tokens=1,
    )
    for (name, own), kept in zip(pairs, found.kept, strict=True):
        real, sequence = make_runner(folder, window=own, budget=budget, policy=name), Sequence()
        real.feed(sequence, prompt, real.prepare(sequence, len(prompt), 1))
        assert {row: set(columns) for row, columns in positions(kept, runner).items()} == {
            row: set(columns) for row, columns in kept_positions(real).items()
        }, (name, own)
        assert kept.slots == budget * runner.layout.num_layers * runner.layout.num_kv_heads


def test_the_full_cache_is_in_the_arena_and_a_wide_budget_keeps_all_of_it(
    tmp_path, write_checkpoint, make_runner, random_ids, kept_positions, dense
):
    folder = write_checkpoint(tmp_path / "model")
    prompt = random_ids(60)
    runner = make_runner(folder, policy="full", window=WINDOW)
    full = make_policy(CacheConfig(policy="full"), runner.model, 0)
    reading = read(runner, prompt, [Cell(full, None), *cells(runner, COMBINATIONS[:1], [60, 59])], new_tokens=4)
    assert reading.kept[:2] == [None, None]
    assert reading.kept[2] is not None
    assert reading.kept[2].slots == 59 * runner.layout.num_layers * runner.layout.num_kv_heads
    assert all(rows == list(range(60)) for rows in kept_positions(runner).values())
    reference = dense(folder).logits(prompt)[-1]
    assert (reading.logits.double() - reference).abs().max() < 1e-4


def test_a_layer_is_scored_once_for_all_budgets_and_an_indicator_once_for_all_allocations(
    tmp_path, write_checkpoint, make_runner, random_ids, monkeypatch
):
    from cake_infer.cache.indicators.snapkv import SnapKVIndicator

    calls = []
    score = SnapKVIndicator.score
    monkeypatch.setattr(SnapKVIndicator, "score", lambda self, view: (calls.append(view.layer), score(self, view))[1])
    runner = make_runner(write_checkpoint(tmp_path / "model"), policy="full", window=WINDOW)
    combinations = [{"policy": "snapkv"}, {"policy": "snapkv", "allocation": "cake"}, {"policy": "pyramidkv"}]
    read(runner, random_ids(80), cells(runner, combinations, [10, 20, 30]), new_tokens=1)
    assert calls == list(range(runner.layout.num_layers))


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_a_packed_cell_has_the_numbers_of_its_own_prefill(tmp_path, write_checkpoint, make_runner, random_ids, bits):
    """To the last cut group, whose scale is from when it was whole."""
    folder, prompt, budget = write_checkpoint(tmp_path / "model", num_hidden_layers=4), random_ids(150), 70
    options = [{"policy": "cake"}, {"policy": "cake", "heads": "adaptive"}, {"policy": "full"}]
    runner = make_runner(folder, policy="full", window=WINDOW, kv_dtype=torch.float32)
    wanted = [replace(cell, bits=bits) for cell in cells(runner, options, [budget])]
    reading = read(runner, prompt, wanted, new_tokens=4)
    arena = runner.tenancy.arena
    for kept, one in zip(reading.kept, options, strict=True):
        asked = {} if one["policy"] == "full" else {"budget": budget}
        real = make_runner(folder, window=WINDOW, kv_bits=bits, kv_dtype=torch.float32, **asked, **one)
        sequence = Sequence()
        real.feed(sequence, prompt, real.prepare(sequence, len(prompt), 4))
        total = 0
        for layer in range(4):
            for head in range(runner.layout.num_kv_heads):
                keys, values, _ = arena.row(layer, head)
                found = kept.numbers(layer, head, keys, values)
                rows = [table[:-1] for table in real.tenancy.arena.widened(layer, head, torch.float32)]
                n = int(real.tenancy.arena.packed.length[layer, head])
                order = torch.arange(len(rows[2])).roll(-n)  # the window first
                assert rows[2][order].tolist() == kept.columns(layer, head).tolist()
                for table, exact in zip(found, rows[:2], strict=True):
                    torch.testing.assert_close(table, exact[order], rtol=0, atol=0)
                total += 2 * 4 * WINDOW * 8 + 8 * WINDOW
                total += -(-n // 32) * (32 * (2 * bits * 8 // 8 + 4 + 8) + 4 * 8)  # a head has 8 channels
        assert _size(runner, kept, len(prompt))[1] == total
