"""What a policy asks for is what a dense float64 model has, whatever the chunks; the rest is not there."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from cake_infer.cache.cascade import Cascade
from cake_infer.cache.inputs import INPUTS
from cake_infer.cache.policies.base import LayerScore
from cake_infer.cache.view import LayerView
from cake_infer.engine.inputs import unrotated
from cake_infer.engine.sequence import Sequence
from cake_infer.models.rope import RopeConfig, Rotary, apply_rotary_

WINDOW, BUDGET = 8, 24
OF_VIEW = {name: (name,) for name in INPUTS} | {"window_queries": ()}


class Probe:
    """Asks for inputs, keeps what it is shown, and scores by a number that is another one in every head."""

    name, evicts, late, merger = "probe", True, False, None

    def __init__(self, needs):
        self.needs, self.views = frozenset(needs), []

    def score(self, view):
        copied = {
            field.name: value.clone() if isinstance(value := getattr(view, field.name), torch.Tensor) else value
            for field in dataclasses.fields(view)
        }
        self.views.append(LayerView(**copied))
        heads = torch.arange(view.keys.shape[0])[:, None]
        score = torch.sin(view.positions * (7.0 + view.layer) + heads * 3)
        return LayerScore(score, 1.0, score * 2 + 5)

    def cascade(self, num_layers, kv_heads, budget, window):
        return Cascade(num_layers, kv_heads, budget, window)

    def describe(self):
        return "probe"


@pytest.fixture
def probe(monkeypatch):
    def use(runner, needs=tuple(INPUTS)):
        made = Probe(needs)
        monkeypatch.setattr(type(runner), "policy", lambda self, budget: made)
        monkeypatch.setattr(type(runner), "separators", frozenset({7, 9}))
        return made

    return use


def feed(runner, sequence, ids):
    runner.feed(sequence, ids, runner.prepare(sequence, len(ids), 1))


OPTIONS = {
    "plain": {},
    "sliding": {"model_type": "mistral", "sliding_window": 20},
}


@pytest.mark.parametrize("options", list(OPTIONS))
@pytest.mark.parametrize("chunk", [7, 16, 200])
@pytest.mark.parametrize("turns", ["one prompt", "two turns", "two turns, ragged"])
def test_inputs_equal_a_dense_float64_model(
    tmp_path, write_checkpoint, dense, make_runner, random_ids, kept_positions, probe, options, chunk, turns
):
    folder = write_checkpoint(tmp_path / "model", **OPTIONS[options])
    runner = make_runner(folder, budget=BUDGET, window=WINDOW, chunk=chunk)
    seen = probe(runner)
    ids, first = random_ids(90), 0
    sequence, visible = Sequence(), None
    model = dense(folder)
    carried = {}
    if turns != "one prompt":
        first = 53
        feed(runner, sequence, ids[:first])
        arena = runner.tenancy.arena
        if "ragged" in turns:
            arena.length[1, 0] -= 5
        visible = {}
        for row, held in kept_positions(runner).items():
            mask = torch.ones(90, 90, dtype=torch.bool)
            mask[first:, :first] = False
            mask[first:, held] = True
            visible[row] = mask
            scores = torch.sin(torch.tensor(held, dtype=torch.float32) * (7.0 + row[0]) + row[1] * 3) * 2 + 5
            carried[row] = dict(zip(held, scores.tolist(), strict=True))
        seen.views.clear()
    feed(runner, sequence, ids[first:])
    model.logits(ids, visible)
    new = torch.arange(first, 90)
    assert len(seen.views) == model.layers
    for layer, view in enumerate(seen.views):
        assert view.first == first
        assert view.token_ids.tolist() == ids
        assert view.separators == {7, 9}
        group = model.heads // model.kv_heads
        torch.testing.assert_close(view.hidden_states.double(), model.normed[layer][new], rtol=0, atol=1e-4)
        assert view.hidden_similarity == pytest.approx(float(model.similarity[layer][new].mean()), abs=1e-5)
        queries = model.plain_queries[layer][:, max(first, 4) :]
        torch.testing.assert_close(view.query_mean.double(), queries.mean(1), rtol=0, atol=1e-4)
        covariance = torch.stack([torch.cov(one.T, correction=0) for one in queries])
        torch.testing.assert_close(view.query_covariance.double(), covariance, rtol=0, atol=1e-4)
        weight = model.weights[f"model.layers.{layer}.self_attn.o_proj.weight"]
        torch.testing.assert_close(view.output_projection.double(), weight, rtol=0, atol=1e-6)
        for kv, length in enumerate(view.columns):
            at = view.positions[kv, :length].long()
            assert sorted(at.tolist()) == sorted([*carried.get((layer, kv), []), *new.tolist()])
            torch.testing.assert_close(
                view.values[kv, :length].double(), model.values[layer][kv, at], rtol=0, atol=1e-4
            )
            attention = model.attention[layer][kv * group : (kv + 1) * group][:, new][:, :, at]
            found = view.column_sums[kv * group : (kv + 1) * group, :length].double()
            torch.testing.assert_close(found, attention.sum(1), rtol=0, atol=1e-4)
            squares = attention.mean(0).square().sum(0)
            torch.testing.assert_close(view.column_squares[kv, :length].double(), squares, rtol=0, atol=1e-4)
            expected = [carried.get((layer, kv), {}).get(position, 0.0) for position in at.tolist()]
            assert view.carried[kv, :length].tolist() == pytest.approx(expected, abs=1e-5)


def test_a_reply_carries_nothing_into_the_next_turn(tmp_path, write_checkpoint, make_runner, random_ids, probe):
    """Neither the score of the row whose slot a newcomer took, nor what lay in a slot that was not used before."""
    for decode_policy in ("grow", "hold"):
        folder = write_checkpoint(tmp_path / decode_policy)
        runner = make_runner(folder, budget=BUDGET, window=WINDOW, decode_policy=decode_policy)
        seen = probe(runner)
        sequence = Sequence()
        runner.feed(sequence, random_ids(60), runner.prepare(sequence, 60, 12))
        runner.tenancy.arena.score[:] += 100.0
        with torch.inference_mode():
            for token in random_ids(10, seed=3):
                runner.step(runner.tenancy.arena, sequence, token, window=WINDOW)
        seen.views.clear()
        feed(runner, sequence, random_ids(5, seed=4))
        for view in seen.views:
            assert (view.carried[view.positions >= 60] == 0).all()
            old = view.carried[view.positions < 60]
            assert len(old)
            assert (old > 50).all()


@pytest.mark.parametrize("name", list(INPUTS))
def test_what_is_not_asked_for_is_not_worked_out(
    tmp_path, write_checkpoint, make_runner, random_ids, probe, monkeypatch, name
):
    folder = write_checkpoint(tmp_path / "model")
    runner = make_runner(folder, budget=BUDGET, window=WINDOW, chunk=32)
    seen = probe(runner, [name])
    rows, mlp = [], type(runner.decoder).mlp
    monkeypatch.setattr(
        type(runner.decoder), "mlp", lambda self, layer, x, work=None: rows.append(len(x)) or mlp(self, layer, x, work)
    )
    feed(runner, Sequence(), random_ids(60))
    there = {field for field in OF_VIEW if field != "window_queries" and getattr(seen.views[-1], field) is not None}
    assert there == set(OF_VIEW[name])
    layers = runner.decoder.config.num_layers
    assert sum(rows) == (60 * layers if INPUTS[name].all_queries else 60 * (layers - 1) + 1)


def test_a_prompt_within_the_budget_works_nothing_out(tmp_path, write_checkpoint, make_runner, random_ids, probe):
    folder = write_checkpoint(tmp_path / "model")
    runner = make_runner(folder, budget=200, window=WINDOW)
    seen = probe(runner)
    feed(runner, Sequence(), random_ids(60))
    assert seen.views == []


def test_the_last_hidden_state_is_the_same_with_and_without_the_shortcut(
    tmp_path, write_checkpoint, make_runner, random_ids, probe
):
    folder = write_checkpoint(tmp_path / "model")
    logits = []
    for needs in ((), tuple(INPUTS)):
        runner = make_runner(folder, budget=BUDGET, window=WINDOW, chunk=32)
        probe(runner, needs)
        sequence = Sequence()
        logits.append(runner.feed(sequence, random_ids(60), runner.prepare(sequence, 60, 1)))
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["default", "yarn"])
def test_queries_are_turned_back_to_what_they_were(kind):
    rope = RopeConfig(
        theta=10000.0,
        head_dim=16,
        max_position_embeddings=128,
        kind=kind,
        factor=4.0,
        original_max_position_embeddings=32,
    )
    rotary = Rotary(rope, 128)
    queries = torch.randn(3, 20, 16, generator=torch.Generator().manual_seed(0))
    cos, sin = rotary.cos_sin(torch.arange(40, 60))
    turned = apply_rotary_(queries.clone(), cos, sin)
    assert kind == "default" or not math.isclose(rotary.attention_factor, 1.0)
    torch.testing.assert_close(unrotated(turned, cos, sin), queries, rtol=0, atol=1e-5)
