"""The compiled pass for the worst case over the window's queries gives what torch gives, and what the formulas give."""

from __future__ import annotations

import math

import pytest
import torch
from cake_infer.cache.config import CacheConfig
from cake_infer.cache.policies import PolicyModel, make_policy
from cake_infer.cache.projection import projected_lengths, value_sizes
from cake_infer.cache.row_order import row_order
from cake_infer.cache.scores import layer_moments
from cake_infer.cache.view import LayerView
from cake_infer.cache.worst import by_torch, worst_case
from cake_infer.engine import window as window_module
from cake_infer.engine.window import WindowWorker

pytest.importorskip("numba", reason="the compiled pass needs the extra cpu")


@pytest.fixture(autouse=True)
def any_length(monkeypatch):
    monkeypatch.setattr(window_module, "FEWEST_COLUMNS", 1)


def view_of(n, *, kv_heads=2, group=3, rows=8, head_dim=32, dtype=torch.float32, sliding=None, held=None, seed=0):
    """Random keys of `n` tokens, or, with `held` tokens of each head before new ones, rows that a cascade left: with
    gaps, in no order, and of other lengths for other heads."""
    random = torch.Generator().manual_seed(seed)
    total, lengths = n, None
    positions = torch.arange(n).repeat(kv_heads, 1)
    if held is not None:
        total = n + 2 * held
        first = total - (n - held)
        lengths = tuple(n - 5 * head for head in range(kv_heads))
        fresh = torch.arange(first, total)
        old = [torch.randperm(first, generator=random)[: held - 5 * head] for head in range(kv_heads)]
        unwritten = torch.full((n,), -7)
        positions = torch.stack([torch.cat([own, fresh, unwritten])[:n] for own in old])
    return LayerView(
        layer=0,
        keys=torch.randn(kv_heads, n, head_dim, generator=random).to(dtype),
        positions=positions.int(),
        queries=2 * torch.randn(kv_heads * group, min(rows, n), head_dim, generator=random),
        query_positions=torch.arange(total - min(rows, n), total),
        window=rows,
        scale=head_dim**-0.5,
        sliding_window=sliding,
        total=total,
        lengths=lengths,
    )


def by_formula(view, reach=2):
    """Worst case, mean, dispersion and shift in float64, from the definitions."""
    kv_heads, n, _ = view.keys.shape
    group = view.queries.shape[0] // kv_heads
    worst, mean = (torch.zeros(kv_heads, n, dtype=torch.float64) for _ in range(2))
    dispersion, shift = 0.0, 0.0
    for head, length in enumerate(view.columns):
        where = view.positions[head, :length].long()
        logits = view.queries[head * group : (head + 1) * group].double() @ view.keys[head, :length].double().T
        at = view.query_positions[:, None]
        hidden = where > at
        if view.sliding_window:
            hidden |= where <= at - view.sliding_window
        a = (logits * view.scale).masked_fill(hidden, -math.inf).softmax(-1)
        a = a * (where < view.total - view.window)
        dispersion -= torch.special.xlogy(a, a).sum().item()
        shift += a.var(1, correction=1).sum().item() if a.shape[1] > 1 else 0.0
        near = ((where[:, None] - where).abs() <= reach).double()
        pooled = a @ near
        mass = pooled.sum(-1, keepdim=True)
        pooled *= torch.where(mass > 0, a.sum(-1, keepdim=True) / mass, 0)
        worst[head, :length] = pooled.amax((0, 1))
        mean[head, :length] = a.mean((0, 1))
    return worst, mean, dispersion, shift


CASES = {
    "a prompt": {"n": 300},
    "whole blocks": {"n": 256},
    "one column more": {"n": 257},
    "a window at the end of a block": {"n": 200, "rows": 8},
    "shorter than a block": {"n": 20},
    "the window alone": {"n": 8},
    "fewer than the window": {"n": 5},
    "one token": {"n": 1},
    "one query": {"n": 90, "rows": 1},
    "a sliding window": {"n": 300, "sliding": 50},
    "rows with gaps": {"n": 150, "held": 60},
    "rows with gaps alone": {"n": 150, "held": 142},
    "rows with gaps, sliding": {"n": 150, "held": 60, "sliding": 64},
    "heads of 128": {"n": 200, "head_dim": 128, "group": 1},
    "two query heads": {"n": 130, "group": 2, "kv_heads": 3},
    "eight query heads": {"n": 130, "group": 8, "rows": 32},
    "seven query heads": {"n": 100, "group": 7, "rows": 5, "head_dim": 16},
    "bfloat16": {"n": 300, "dtype": torch.bfloat16},
    "gaps in bfloat16": {"n": 200, "held": 90, "dtype": torch.bfloat16},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_it_is_the_torch_pass_and_the_formula(case):
    view = view_of(**case)
    worker = WindowWorker(2)
    assert worker.fits(view)
    found = worker.worst(view, 2)
    assert found is not None
    slow = by_torch(view, 2)
    worst, mean, dispersion, shift = by_formula(view)
    for head, length in enumerate(view.columns):
        for other in (slow, found):
            own = slice(0, length)
            torch.testing.assert_close(other.worst[head, own].double(), worst[head, own], rtol=2e-5, atol=1e-8)
            torch.testing.assert_close(other.mean[head, own].double(), mean[head, own], rtol=2e-5, atol=1e-8)
            assert (other.worst[head, length:] == 0).all()
    assert found.moments == pytest.approx((dispersion, shift), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("reach", [0, 1])
def test_it_pools_with_as_few_neighbours_as_it_is_asked_to(reach):
    view = view_of(120, held=70)
    worst, mean, *_ = by_formula(view, reach)
    found = WindowWorker(1).worst(view, reach)
    for head, length in enumerate(view.columns):
        torch.testing.assert_close(found.worst[head, :length].double(), worst[head, :length], rtol=2e-5, atol=1e-8)
        torch.testing.assert_close(found.mean[head, :length].double(), mean[head, :length], rtol=2e-5, atol=1e-8)


def test_a_wider_average_is_left_to_torch():
    view = view_of(120)
    object.__setattr__(view, "window_pass", WindowWorker(1))
    assert view.window_pass.worst(view, 3) is None
    worst, *_ = by_formula(view, 3)
    torch.testing.assert_close(worst_case(view, 7).worst.double(), worst, rtol=2e-5, atol=1e-8)
    assert "moments" not in view.memo


def test_threads_change_no_bit():
    view = view_of(500)
    one, two = (WindowWorker(threads).worst(view, 2) for threads in (1, 3))
    torch.testing.assert_close(one.worst, two.worst, rtol=0, atol=0)
    torch.testing.assert_close(one.mean, two.mean, rtol=0, atol=0)
    assert one.moments == two.moments


def test_what_is_not_valid_is_not_read():
    view = view_of(150, held=60)
    wanted = WindowWorker(3).worst(view, 2)
    view.keys[1, view.columns[1] :] = math.nan
    view.positions[1, view.columns[1] :] = 140
    found = WindowWorker(3).worst(view, 2)
    torch.testing.assert_close(found.worst, wanted.worst, rtol=0, atol=0)
    assert found.moments == wanted.moments


def test_what_is_not_a_number_is_not_passed_over():
    """Else damaged weights would look like a token that nobody attends to."""
    view = view_of(200)
    view.queries[0, 3, 0] = math.nan
    found = WindowWorker(1).worst(view, 2)
    assert found.worst[0, : view.window_start].isnan().all()
    assert not found.worst[1].isnan().any()


def test_dispersion_and_shift_are_not_worked_twice():
    view = view_of(300)
    asked = []

    class Spy(WindowWorker):
        def __call__(self, view, gamma):
            asked.append(gamma)
            return super().__call__(view, gamma)

    object.__setattr__(view, "window_pass", Spy(1))
    slow = layer_moments(view)
    view.memo.clear()
    worst_case(view, 5)
    assert layer_moments(view) == pytest.approx(slow, rel=1e-5)
    assert len(asked) == 1


# -- lengths of values -------------------------------------------------------------------------------------------------


LENGTHS = {
    "whole tiles": {"n": 192},
    "one token more": {"n": 193},
    "fewer than a vector": {"n": 5},
    "one token": {"n": 1},
    "heads of 128": {"n": 150, "head_dim": 128, "group": 1},
    "eight query heads": {"n": 120, "head_dim": 64, "group": 8},
    "rows of other lengths": {"n": 150, "held": 60},
    "bfloat16": {"n": 150, "dtype": torch.bfloat16},
}


def valued(view, hidden=96):
    """With values and an output projection, in the dtype of its keys."""
    random = torch.Generator().manual_seed(1)
    kv_heads, n, head_dim = view.keys.shape
    dtype = view.keys.dtype
    values = torch.randn(kv_heads, n, head_dim, generator=random).to(dtype)
    values[:, 0] = 0
    object.__setattr__(view, "values", values)
    projection = torch.randn(hidden, view.queries.shape[0] * head_dim, generator=random).to(dtype)
    object.__setattr__(view, "output_projection", projection)
    return view


@pytest.mark.parametrize("case", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("threads", [1, 3])
def test_lengths_are_those_of_projected_values(case, threads):
    view = valued(view_of(**case))
    found = WindowWorker(threads).lengths(view)
    assert found.shape == view.keys.shape[:2]
    head_dim = view.keys.shape[2]
    for head, length in enumerate(view.columns):
        exact = torch.zeros(length, dtype=torch.float64)
        for query_head in range(head * view.group, (head + 1) * view.group):
            matrix = view.output_projection[:, query_head * head_dim : (query_head + 1) * head_dim].double()
            exact += (view.values[head, :length].double() @ matrix.T).norm(dim=1)
        torch.testing.assert_close(found[head, :length].double(), exact / view.group, rtol=5e-6, atol=1e-6)
        torch.testing.assert_close(found[head, :length], projected_lengths(view, head), rtol=5e-6, atol=1e-6)
        assert (found[head, length:] == 0).all()


def test_what_is_not_a_number_has_no_length_and_what_is_not_valid_is_not_read():
    view = valued(view_of(150, held=60))
    view.values[0, 7, 3] = math.nan
    view.values[1, view.columns[1] :] = math.nan
    found = WindowWorker(1).lengths(view)
    assert found[0, 7].isnan()
    assert found.isnan().sum() == 1


def test_heads_that_do_not_fill_its_vectors_are_left_to_torch():
    view = valued(view_of(120, head_dim=48))
    object.__setattr__(view, "window_pass", WindowWorker(1))
    assert view.window_pass.lengths(view) is None
    torch.testing.assert_close(value_sizes(view, "l2")[1], projected_lengths(view, 1))


@pytest.mark.parametrize("case", [{"n": 400}, {"n": 400, "held": 150}, {"n": 400, "sliding": 90}])
def test_the_default_keeps_the_same_tokens_by_either(case):
    views = [valued(view_of(**case, seed=5)) for _ in range(2)]
    object.__setattr__(views[1], "window_pass", WindowWorker(2))
    policy = make_policy(CacheConfig(policy="auto", window=8), PolicyModel("none", 1, 96, 100), 100)
    slow, fast = (policy.score(view) for view in views)
    assert "moments" in views[1].memo
    assert fast.preference == pytest.approx(slow.preference, rel=1e-4)
    for head, length in enumerate(views[0].columns):
        for a, b in ((slow.indicator, fast.indicator), (slow.worth, fast.worth)):
            torch.testing.assert_close(a[head, :length], b[head, :length], rtol=1e-4, atol=1e-9)
    orders = [
        row_order(scored.indicator, view.positions, view.window_start, view.columns, 100)
        for scored, view in zip((slow, fast), views, strict=True)
    ]
    assert torch.equal(orders[0].sort(1).values, orders[1].sort(1).values)
