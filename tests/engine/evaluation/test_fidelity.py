"""KL, agreement and answer loss against a dense float64 model to which a policy's evicted rows are hidden."""

from __future__ import annotations

import math

import pytest
import torch
from cake_infer.cache.config import CacheConfig
from cake_infer.cache.policies import make_policy
from cake_infer.engine.evaluation.fidelity import Example, divergence, fidelity
from cake_infer.engine.evaluation.replay import Branches
from cake_infer.engine.evaluation.study import Cell, read

WINDOW, BUDGET, TOKENS = 8, 24, 10
OPTIONS = [{"policy": "cake"}, {"policy": "snapkv"}, {"policy": "cake", "heads": "adaptive"}]


def cells(runner, budget=BUDGET):
    return [Cell(make_policy(CacheConfig(window=WINDOW, **one), runner.model, budget), budget) for one in OPTIONS]


def hidden_after(kept, layout, prefix, total):
    """Masks in which what comes after the prefix sees, of it, only what was kept."""
    masks = {}
    for layer in range(layout.num_layers):
        for head in range(layout.num_kv_heads):
            mask = torch.ones(total, total, dtype=torch.bool)
            mask[prefix:, :prefix] = False
            mask[prefix:, kept.columns(layer, head)] = True
            masks[layer, head] = mask
    return masks


def greedy_continuation(model, prompt, count):
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model.logits(ids)[-1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("family", ["llama", "sliding"])
@pytest.mark.parametrize("suffix", [0, 5])
def test_the_figures_are_those_of_the_masked_dense_model(
    tmp_path, write_checkpoint, make_runner, random_ids, dense, family, suffix
):
    options = {"model_type": "mistral", "sliding_window": 50} if family == "sliding" else {}
    folder = write_checkpoint(tmp_path / "model", **options)
    prefix, question, answer = random_ids(90), random_ids(suffix, seed=1), random_ids(4, seed=2)
    runner = make_runner(folder, policy="full", window=WINDOW, step="eager")
    found = fidelity(runner, Example(tuple(prefix), tuple(question), tuple(answer)), cells(runner), tokens=TOKENS)
    kept = read(runner, prefix, cells(runner), new_tokens=1).kept
    model = dense(folder)
    prompt = prefix + question
    continuation = greedy_continuation(model, prompt, TOKENS)
    first = len(prompt) - 1 if suffix else len(prompt)  # inside, the first token comes out of the prefill
    for one, result in zip(kept, found, strict=True):
        ids = prompt + continuation[:-1]
        full = torch.log_softmax(model.logits(ids), -1)
        squeezed = torch.log_softmax(model.logits(ids, hidden_after(one, runner.layout, len(prefix), len(ids))), -1)
        kl = (full.exp() * (full - squeezed)).sum(-1)[first:]
        assert result.tokens == len(kl) == (TOKENS if suffix else TOKENS - 1)
        assert result.kl == pytest.approx(float(kl.mean()), rel=2e-3, abs=1e-6)
        assert result.kl > 1e-3, "the budget changes nothing: nothing is compared"
        assert result.top1 == pytest.approx(float((full.argmax(-1) == squeezed.argmax(-1))[first:].double().mean()))
        ids = prompt + answer[:-1]
        at = torch.arange(len(prompt) - 1, len(ids))
        masks = hidden_after(one, runner.layout, len(prefix), len(ids))
        losses = []
        for logits in (model.logits(ids), model.logits(ids, masks)):
            losses.append(-float(torch.log_softmax(logits, -1)[at, answer].mean()))
        assert result.answer_nll == pytest.approx(losses[1], rel=1e-4)
        assert result.answer_loss == pytest.approx(losses[1] - losses[0], rel=1e-2, abs=1e-5)
        assert result.answer_tokens == 4
        assert result.kept == pytest.approx(BUDGET / 90)
    assert len({result.kl for result in found}) == len(found)


def test_a_budget_that_keeps_everything_loses_nothing(tmp_path, write_checkpoint, make_runner, random_ids):
    runner = make_runner(write_checkpoint(tmp_path / "model"), policy="full", window=WINDOW, step="eager")
    example = Example(tuple(random_ids(50)), (), tuple(random_ids(3, seed=1)))
    for result in fidelity(runner, example, cells(runner, budget=50), tokens=6):
        assert (result.kl, result.top1, result.answer_loss, result.kept) == (0.0, 1.0, 0.0, 1.0)


def test_a_continuation_ends_with_a_stop_token_and_may_be_empty_but_for_it(
    tmp_path, write_checkpoint, make_runner, random_ids, dense
):
    folder = write_checkpoint(tmp_path / "model")
    prompt = random_ids(50)
    continuation = greedy_continuation(dense(folder), prompt, 5)
    runner = make_runner(folder, policy="full", window=WINDOW, step="eager")
    for place in (0, 3):
        stop = frozenset({continuation[place]})
        place = continuation.index(continuation[place])
        results = fidelity(runner, Example(tuple(prompt)), cells(runner), tokens=6, stop_ids=stop)
        for result in results:
            assert result.tokens == place
            assert (result.kl is None) == (place == 0)
            assert (result.answer_loss, result.answer_tokens) == (None, 0)


def test_groups_of_any_size_give_the_same(tmp_path, write_checkpoint, make_runner, random_ids, monkeypatch):
    from cake_infer.engine.evaluation import fidelity as module

    runner = make_runner(write_checkpoint(tmp_path / "model"), policy="full", window=WINDOW, step="eager")
    example = Example(tuple(random_ids(70)), tuple(random_ids(3, seed=1)), tuple(random_ids(4, seed=2)))
    whole = fidelity(runner, example, cells(runner), tokens=6)
    replay = module.replay
    monkeypatch.setattr(module, "replay", lambda *a, **k: replay(*a, **k, rows_at_once=1))
    single = fidelity(runner, example, cells(runner), tokens=6)
    for one, other in zip(whole, single, strict=True):
        assert one.kl == pytest.approx(other.kl, rel=1e-3)
        assert one.answer_nll == pytest.approx(other.answer_nll, rel=1e-5)


def test_divergence_is_that_of_the_formula_in_float64():
    generator = torch.Generator().manual_seed(0)
    full, other = torch.randn(5, 300, generator=generator) * 4, torch.randn(5, 300, generator=generator) * 4
    full[:, 7] = other[:, 7] = -math.inf
    p, q = torch.softmax(full.double(), -1), torch.softmax(other.double(), -1)
    expected = [
        sum(float(a) * math.log(float(a) / float(b)) for a, b in zip(x, y, strict=True) if a > 0)
        for x, y in zip(p, q, strict=True)
    ]
    found = divergence(torch.log_softmax(full, -1), other)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=0)


def test_branches_see_their_shared_beginning_and_themselves():
    tree = Branches.make(100, [1, 2], [3, 4], [5])
    assert tree.ids.tolist() == [1, 2, 3, 4, 5]
    assert tree.positions.tolist() == [100, 101, 102, 103, 102]
    assert tree.visible.int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 0, 0, 1],
    ]
