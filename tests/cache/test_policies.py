"""The policies: CAKE's preference and constants as published, finite budgets for any attention, and the full cache."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from cake_infer.cache.allocations.cake import preference, table_taus
from cake_infer.cache.cascade import Cascade, LayerClaim
from cake_infer.cache.config import CacheConfig
from cake_infer.cache.policies import POLICIES, PolicyModel, make_policy
from cake_infer.cache.policies.base import Policy
from cake_infer.cache.view import LayerView
from cake_infer.errors import CakeError, OptionError

LLAMA31 = PolicyModel("llama", 32, 4096, 128256)
UNKNOWN = PolicyModel("llama", 30, 576, 49152)


def cake(**options: Any) -> Policy:
    return make_policy(CacheConfig(policy="cake", **options), UNKNOWN, 64)


def make_view(n: int = 60, rows: int = 8, seed: int = 0) -> LayerView:
    generator = torch.Generator().manual_seed(seed)
    return LayerView(
        layer=3,
        keys=torch.randn(2, n, 8, generator=generator),
        positions=torch.arange(n).repeat(2, 1),
        queries=torch.randn(4, rows, 8, generator=generator),
        query_positions=torch.arange(n - rows, n),
        window=8,
        scale=8**-0.5,
        sliding_window=None,
        total=n,
        column_sums=torch.rand(4, n, generator=generator) * 3,
        hidden_similarity=0.9,
    )


@pytest.mark.parametrize(
    ("model", "at_1024", "at_128"),
    [
        (LLAMA31, (1.6, 0.4), (1.6, 0.6)),
        (PolicyModel("llama", 32, 4096, 32000), (1.9, 1.8), (0.9, 2.3)),
        (PolicyModel("llama", 40, 5120, 32000), (0.5, 0.4), (1.8, 2.0)),
        (PolicyModel("mistral", 32, 4096, 32768), (0.8, 0.5), (1.0, 0.8)),
        (PolicyModel("qwen2", 28, 3584, 152064), (1.5, 0.6), (0.4, 0.6)),
        (UNKNOWN, (1.0, 1.0), (1.0, 1.0)),
        (PolicyModel("mistral", 32, 4096, 32000), (1.0, 1.0), (1.0, 1.0)),
    ],
)
def test_taus_are_those_of_the_authors_table(
    model: PolicyModel, at_1024: tuple[float, float], at_128: tuple[float, float]
) -> None:
    assert table_taus(model, 1024) == at_1024
    assert table_taus(model, 128) == at_128


def test_the_nearest_budget_is_nearest_in_log_scale() -> None:
    # sqrt(128 * 1024) = 362.04; on a plain scale the border would be 576.
    for budget, tau2 in ((1, 0.6), (362, 0.6), (363, 0.4), (500, 0.4), (100_000, 0.4)):
        assert table_taus(LLAMA31, budget) == (1.6, tau2)


def test_explicit_taus_win_one_by_one_and_are_told() -> None:
    assert make_policy(CacheConfig(policy="cake"), LLAMA31, 1024).describe() == "cake tau 1.6/0.4 gamma 200"
    assert make_policy(CacheConfig(policy="cake", tau2=2.5), LLAMA31, 1024).describe() == "cake tau 1.6/2.5 gamma 200"
    assert (
        make_policy(CacheConfig(policy="cake", tau1=0.3, gamma=5), LLAMA31, 1024).describe()
        == "cake tau 0.3/0.4 gamma 5"
    )
    assert make_policy(CacheConfig(policy="cake"), UNKNOWN, 1024).describe() == "cake tau 1/1 gamma 200"


@pytest.mark.parametrize(("tau1", "tau2"), [(1.0, 1.0), (1.6, 0.4), (0.9, 2.3), (0.05, 0.1)])
@pytest.mark.parametrize(("dispersion", "shift"), [(2437.3, 0.0019), (0.01, 30.0), (1.0, 1.0)])
def test_preference_is_the_product_of_powers(dispersion: float, shift: float, tau1: float, tau2: float) -> None:
    expected = dispersion ** (1 / tau1) * shift ** (1 / tau2)
    assert preference(dispersion, shift, tau1, tau2) == pytest.approx(expected, rel=1e-9)


def test_preference_is_finite_and_ordered_where_fp32_and_fp64_overflow() -> None:
    assert preference(1e4, 1.0, 0.02, 1.0) == pytest.approx(1e200)
    assert 0 < preference(1e4, 1.0, 0.001, 1.0) < math.inf
    assert 0 < preference(1.0, 1e-30, 1.0, 0.001) < 1e-300
    assert preference(1e4, 1e-3, 0.02, 0.02) > preference(1e4, 1e-4, 0.02, 0.02)


@pytest.mark.parametrize(("dispersion", "shift"), [(0.0, 1.0), (1.0, 0.0), (0.0, 0.0), (-1e-12, 1.0)])
def test_preference_is_0_where_a_factor_is(dispersion: float, shift: float) -> None:
    assert preference(dispersion, shift, 1.6, 0.4) == 0.0


def test_taus_change_the_preference_and_gamma_and_pool_the_indicator() -> None:
    view = make_view()
    plain = cake().score(view)
    assert cake(tau1=2.0).score(view).preference != plain.preference
    assert cake(tau2=2.0).score(view).preference != plain.preference
    assert torch.equal(cake(tau2=2.0).score(view).indicator, plain.indicator)
    for other in (cake(gamma=0.0), cake(pool=3)):
        assert not torch.allclose(other.score(view).indicator, plain.indicator)
        assert other.score(view).preference == plain.preference


def test_the_registry_makes_every_policy_it_names(one_prompt: Any) -> None:
    view = one_prompt(total=60).view
    for name in POLICIES:
        if name == "gate":  # which needs a file
            continue
        policy = make_policy(CacheConfig(policy=name), UNKNOWN, 64)
        assert policy.name == name
        assert policy.describe().startswith(name)
        score = policy.score(view)
        assert score.indicator.shape == (2, 60)
        assert score.indicator.dtype == torch.float32
        ranked = score.indicator[:, :52].sort(1, descending=True).values.numpy()
        claim = LayerClaim(8, (52, 52), score.preference, score.curve, lambda limit, rows=ranked: list(rows[:, :limit]))
        lengths = policy.cascade(1, 2, 30, 8).add(claim)
        assert sum(lengths[0]) == 60
        assert lengths == [[30, 30]] or name in ("auto", "document", "ada-kv", "lava", "layer-defensivekv")
    with pytest.raises(OptionError, match=r"unknown policy 'h3o'.*cake, .*full"):
        replace(CacheConfig(), policy="h3o")


def test_policies_say_what_they_need_and_whether_they_evict() -> None:
    cake, full = (make_policy(CacheConfig(policy=name), UNKNOWN, 64) for name in ("cake", "full"))
    assert cake.evicts
    assert cake.needs == {"window_queries"}
    assert not full.evicts
    assert full.needs == frozenset()


def degenerate_views() -> dict[str, LayerView]:
    one_hot, uniform, identical, extreme = (make_view() for _ in range(4))
    one_hot.keys[:, 20] = 1e4
    one_hot.queries.abs_()
    uniform.keys.zero_()
    identical.queries[:] = identical.queries[:1, :1]
    generator = torch.Generator().manual_seed(1)
    extreme = replace(
        extreme,
        keys=torch.randn(2, 60, 8, generator=generator).sign().half() * 65504,
        queries=torch.randn(4, 8, 8, generator=generator).sign().half() * 65504,
    )
    return {
        "one-hot": one_hot,
        "uniform": uniform,
        "identical rows": identical,
        "fp16 extremes": extreme,
        "one query": make_view(rows=1),
        "nothing before the window": make_view(n=8),
        "fewer tokens than the window": make_view(n=3, rows=3),
        "one token": make_view(n=1, rows=1),
        "ordinary": make_view(),
    }


@pytest.mark.parametrize("tau", [0.05, 1.0, 20.0])
def test_degenerate_attention_yields_finite_budgets_that_are_used_up(tau: float) -> None:
    views = degenerate_views()
    cascade = Cascade(len(views), 1, 20, 8)
    capacity = []
    for name, view in views.items():
        score = cake(tau1=tau, tau2=tau).score(view)
        assert math.isfinite(score.preference), name
        assert score.preference >= 0, name
        before = score.indicator[:, : view.window_start]
        assert before.isfinite().all(), name
        assert (before >= 0).all(), name
        capacity.append(view.total)
        floor = min(8, view.total)
        lengths = [row[0] for row in cascade.add(LayerClaim(floor, (view.total - floor,), score.preference))]
    assert all(min(8, total) <= length <= total for total, length in zip(capacity, lengths, strict=True))
    assert sum(lengths) == sum(min(8, total) for total in capacity) + 12 * len(views)


@pytest.mark.parametrize("case", ["one-hot", "one query", "nothing before the window", "one token"])
def test_layers_without_dispersion_or_shift_share_uniformly(case: str) -> None:
    score = cake().score(degenerate_views()[case])
    assert score.preference == 0
    cascade = Cascade(3, 1, 20, 8)
    for _ in range(3):
        lengths = cascade.add(LayerClaim(8, (92,), score.preference))
    assert lengths == [[20], [20], [20]]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_attention_that_is_not_finite_names_the_layer(value: float) -> None:
    view = make_view()
    view.queries.abs_()  # -inf gives a logit of -inf: the attention is 0, its entropy no number
    view.keys[1, 30, 2] = value
    with pytest.raises(CakeError, match=r"layer 3 is not finite.*float32 for the option dtype"):
        cake().score(view)
