"""The compiled pass over the window's attention gives what the torch pass gives, and what the formulas give."""

from __future__ import annotations

import math

import pytest
import torch
from cake_infer.cache.scores import cake_statistics, window_moments
from cake_infer.cache.view import LayerView
from cake_infer.engine import window as window_module
from cake_infer.engine.window import WindowWorker

pytest.importorskip("numba", reason="the compiled pass needs the extra cpu")

GAMMA = 200.0


@pytest.fixture(autouse=True)
def any_length(monkeypatch):
    monkeypatch.setattr(window_module, "FEWEST_COLUMNS", 1)


def view_of(n, *, kv_heads=2, group=3, rows=8, head_dim=32, dtype=torch.float32, sliding=None, ragged=False, seed=0):
    """Random keys of `n` tokens, or with gaps, in no order and of two lengths: rows that a cascade left."""
    random = torch.Generator().manual_seed(seed)
    total = n + 40 if ragged else n
    keys = torch.randn(kv_heads, n, head_dim, generator=random).to(dtype)
    positions = torch.arange(n).repeat(kv_heads, 1)
    lengths = None
    if ragged:
        lengths = tuple(n - 5 * head for head in range(kv_heads))
        newest = torch.arange(total - rows, total)
        rest = [torch.randperm(total - rows, generator=random)[: n - rows] for _ in range(kv_heads)]
        positions = torch.stack([torch.cat([newest, own]) for own in rest])
    return LayerView(
        layer=0,
        keys=keys,
        positions=positions.int(),
        queries=2 * torch.randn(kv_heads * group, min(rows, n), head_dim, generator=random),
        query_positions=torch.arange(total - min(rows, n), total),
        window=rows,
        scale=head_dim**-0.5,
        sliding_window=sliding,
        total=total,
        lengths=lengths,
    )


def by_formula(view):
    """Scores before pooling, dispersion and shift in float64, from the definitions."""
    kv_heads, n, _ = view.keys.shape
    group = view.queries.shape[0] // kv_heads
    scores, dispersion, shift = torch.zeros(kv_heads, n, dtype=torch.float64), 0.0, 0.0
    for head, length in enumerate(view.columns):
        where = view.positions[head, :length].long()
        logits = view.queries[head * group : (head + 1) * group].double() @ view.keys[head, :length].double().T
        at = view.query_positions[:, None]
        hidden = where > at
        if view.sliding_window:
            hidden |= where <= at - view.sliding_window
        a = (logits * view.scale).masked_fill(hidden, -math.inf).softmax(-1)
        counted = where < view.total - view.window
        part = a[:, :, counted]
        dispersion -= torch.special.xlogy(part, part).sum().item()
        variance = part.var(1, correction=1) if part.numel() and part.shape[1] > 1 else torch.zeros_like(part[:, 0])
        shift += variance.sum().item()
        scores[head, :length][counted] = (part.mean(1) + GAMMA * variance).mean(0)
    return scores, dispersion, shift


CASES = {
    "a prompt": {"n": 300},
    "whole blocks": {"n": 256},
    "one column more": {"n": 257},
    "shorter than a block": {"n": 20},
    "the window alone": {"n": 8},
    "fewer than the window": {"n": 5},
    "one query": {"n": 90, "rows": 1},
    "a sliding window": {"n": 300, "sliding": 50},
    "rows with gaps": {"n": 150, "ragged": True},
    "rows with gaps, sliding": {"n": 150, "ragged": True, "sliding": 64},
    "heads of 128": {"n": 200, "head_dim": 128, "group": 1},
    "seven query heads": {"n": 100, "group": 7, "rows": 5, "head_dim": 16},
    "bfloat16": {"n": 300, "dtype": torch.bfloat16},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_it_is_the_torch_pass_and_the_formula(case):
    view = view_of(**case)
    worker = WindowWorker(2)
    assert worker.fits(view)
    scores, dispersion, shift = worker(view, GAMMA)
    exact, exact_dispersion, exact_shift = by_formula(view)
    torch.testing.assert_close(scores.double(), exact, rtol=2e-4, atol=1e-7)
    assert dispersion == pytest.approx(exact_dispersion, rel=1e-5, abs=1e-6)
    assert shift == pytest.approx(exact_shift, rel=1e-4, abs=1e-9)
    slow, slow_dispersion, slow_shift = window_moments(view, GAMMA)
    torch.testing.assert_close(scores, slow, rtol=2e-4, atol=1e-6)
    assert dispersion == pytest.approx(slow_dispersion, rel=1e-5, abs=1e-6)
    assert shift == pytest.approx(slow_shift, rel=1e-4, abs=1e-9)


def test_threads_change_no_bit():
    view = view_of(500)
    one, two = (WindowWorker(threads)(view, GAMMA) for threads in (1, 3))
    torch.testing.assert_close(one[0], two[0], rtol=0, atol=0)
    assert one[1:] == two[1:]


def test_what_is_not_valid_is_not_read():
    view = view_of(150, ragged=True)
    wanted = WindowWorker(3)(view, GAMMA)
    view.keys[1, view.columns[1] :] = math.nan
    scores, *sums = WindowWorker(3)(view, GAMMA)
    torch.testing.assert_close(scores[1, : view.columns[1]], wanted[0][1, : view.columns[1]], rtol=0, atol=0)
    assert sums == list(wanted[1:])


def test_one_query_has_no_shift():
    scores, _, shift = WindowWorker(2)(view_of(200, rows=1), GAMMA)
    assert shift == 0.0
    assert torch.isfinite(scores).all()


def test_the_statistics_use_it():
    view = view_of(300)
    used = []

    class Spy(WindowWorker):
        def __call__(self, view, gamma):
            used.append(gamma)
            return super().__call__(view, gamma)

    object.__setattr__(view, "window_pass", Spy(2))
    fast = cake_statistics(view, GAMMA, 5)
    object.__setattr__(view, "window_pass", None)
    slow = cake_statistics(view, GAMMA, 5)
    assert used == [GAMMA]
    torch.testing.assert_close(fast.indicator, slow.indicator, rtol=2e-4, atol=1e-6)


def test_short_layers_are_left_to_torch(monkeypatch):
    monkeypatch.setattr(window_module, "FEWEST_COLUMNS", 65)
    assert not WindowWorker(1).fits(view_of(64))
    assert WindowWorker(1).fits(view_of(65))
