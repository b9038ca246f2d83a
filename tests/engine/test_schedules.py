"""Evicting late keeps what the cascade keeps, in the memory of a full cache; merged values are folded once."""

from __future__ import annotations

import json

import pytest
import torch
from cake_infer.cache.budget import parse_bytes
from cake_infer.cache.config import CacheConfig
from cake_infer.cache.merges.base import Tokens
from cake_infer.cache.merges.cam import CamMerge
from cake_infer.cache.merges.d2o import D2OMerge
from cake_infer.engine import keeping
from cake_infer.engine.memory import plan_run
from cake_infer.engine.sequence import Sequence
from cake_infer.errors import BudgetError
from cake_infer.models.config import read_config

WINDOW, BUDGET, PROMPT, LAYERS, HEADS = 8, 24, 120, 4, 3
FORMS = {"cam": CamMerge(), "d2o": D2OMerge()}


@pytest.fixture(params=["llama", "sliding"])
def folder(request, tmp_path, write_checkpoint):
    shape = {
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2 * HEADS,
        "num_key_value_heads": HEADS,
        "hidden_size": 48,
    }
    options = {"llama": {}, "sliding": {"model_type": "mistral", "sliding_window": 50}}
    return write_checkpoint(tmp_path / "model", **shape, **options[request.param])


def feed(runner, sequence, ids, new_tokens=1):
    return runner.feed(sequence, ids, runner.prepare(sequence, len(ids), new_tokens))


def rows(runner):
    """Every row as it is stored: positions, keys, values."""
    arena = runner.tenancy.arena
    return {
        (layer, head): [table.clone() for table in arena.row(layer, head)]
        for layer in range(LAYERS)
        for head in range(HEADS)
    }


@pytest.mark.parametrize(
    "parts",
    [
        {"policy": "cake"},
        {"policy": "cake", "heads": "adaptive"},
        {"policy": "snapkv", "allocation": "xkv"},
        {"policy": "layer-defensivekv"},
        {"policy": "nacl", "allocation": "composite", "heads": "adaptive"},
        {"policy": "h2o", "allocation": "d2o"},
        {"policy": "criticalkv", "allocation": "table"},
        {"policy": "tova", "allocation": "pyramid"},
    ],
    ids=lambda parts: " ".join(parts.values()),
)
def test_a_late_schedule_keeps_the_same_rows_as_the_cascade_turn_after_turn(
    folder, make_runner, random_ids, tmp_path, parts
):
    options = {}
    if parts.get("allocation") == "table":
        (tmp_path / "table.json").write_text(json.dumps([[3, 1, 2], [1, 1, 1], [0.5, 4, 1], [2, 1, 0]]))
        options["policy_options"] = {"table": str(tmp_path / "table.json")}
    found = {}
    for schedule in ("cascade", "late"):
        runner = make_runner(folder, budget=BUDGET, window=WINDOW, schedule=schedule, **parts, **options)
        sequence, turns = Sequence(), []
        for turn, count in enumerate((PROMPT, 5, 40)):
            logits = feed(runner, sequence, random_ids(count, seed=turn))
            assert runner.tenancy.arena.kept_slots == BUDGET * LAYERS * HEADS
            turns.append((logits, rows(runner)))
        found[schedule] = turns
    for (logits, cascaded), (late_logits, late) in zip(found["cascade"], found["late"], strict=True):
        assert torch.equal(logits, late_logits)
        for row, tables in cascaded.items():
            assert all(torch.equal(one, other) for one, other in zip(tables, late[row], strict=True)), row


@pytest.mark.parametrize("form", FORMS)
def test_a_late_merge_folds_everything_that_a_row_loses_once(tmp_path, write_checkpoint, make_runner, random_ids, form):
    """What the cascade does not do: there a value is folded at every cut."""
    shape = {
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2 * HEADS,
        "num_key_value_heads": HEADS,
        "hidden_size": 48,
    }
    folder, ids, scores = write_checkpoint(tmp_path / "model", **shape), random_ids(PROMPT), []
    full = make_runner(folder, policy="full", window=WINDOW)
    feed(full, Sequence(), ids)
    everything = rows(full)
    original, patch = keeping.Chosen.__init__, pytest.MonkeyPatch()
    patch.setattr(
        keeping.Chosen,
        "__init__",
        lambda self, scored, *rest: (scores.append(scored.indicator.clone()), original(self, scored, *rest))[1],
    )
    found = {}
    for schedule in ("late", "cascade"):
        runner = make_runner(folder, budget=BUDGET, window=WINDOW, merge=form, schedule=schedule)
        feed(runner, Sequence(), ids)
        found[schedule] = rows(runner)
    patch.undo()
    for (layer, head), (keys, values, positions) in found["late"].items():
        assert torch.equal(found["cascade"][layer, head][2], positions)
        all_keys, all_values, at = everything[layer, head]  # a full row lies in order of position
        kept = positions.long()
        score = scores[layer][head]
        stay = Tokens(
            keys, all_values[kept].clone(), positions, score[kept].masked_fill(kept >= PROMPT - WINDOW, float("inf"))
        )
        gone = torch.tensor(sorted({*range(PROMPT)} - {*kept.tolist()}))
        FORMS[form].fold(stay, Tokens(all_keys, all_values, at, score, gone))
        torch.testing.assert_close(values, stay.values, rtol=1e-4, atol=1e-5)
    assert any(not torch.allclose(found["cascade"][row][1], found["late"][row][1]) for row in found["late"])


def test_a_late_schedule_takes_the_memory_of_a_full_cache_and_the_plan_counts_it(folder, make_runner, random_ids):
    found = {}
    for schedule in ("cascade", "late"):
        runner = make_runner(folder, budget=BUDGET, window=WINDOW, policy="snapkv", schedule=schedule)
        feed(runner, Sequence(), random_ids(PROMPT))
        cache = CacheConfig(budget=BUDGET, window=WINDOW, policy="snapkv", schedule=schedule)
        plan = plan_run(
            read_config(folder), cache, weights=0, stored=torch.float32, prompt_tokens=PROMPT, new_tokens=1, chunk=64
        )
        assert plan.arena == runner.tenancy.arena.nbytes
        found[schedule] = plan.arena // runner.layout.kept_slot_bytes
    assert found == {"cascade": HEADS * (LAYERS * BUDGET + PROMPT), "late": HEADS * (LAYERS * PROMPT + PROMPT)}


def test_kv_memory_counts_the_whole_cache_of_a_late_schedule(folder, make_runner, random_ids):
    ids, budgets = random_ids(100), {}
    for schedule, memory in (("cascade", "64KiB"), ("late", "64KiB"), ("late", "120KiB")):
        runner, sequence = make_runner(folder, kv_memory=memory, window=WINDOW, schedule=schedule), Sequence()
        if (schedule, memory) == ("late", "64KiB"):
            with pytest.raises(BudgetError, match="too small"):
                runner.prepare(sequence, len(ids), 1)
            continue
        feed(runner, sequence, ids)
        assert runner.tenancy.arena.nbytes <= parse_bytes(memory)
        budgets[schedule] = sequence.budget
    assert WINDOW < budgets["cascade"] < budgets["late"] >= len(ids)
