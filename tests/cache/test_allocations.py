"""Every allocation against its formula in float64, and none of them is another one under a new name."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cake_infer.cache.allocations import ALLOCATIONS
from cake_infer.cache.allocations.squeeze import highest_of_three
from cake_infer.cache.cascade import Cascade, LayerClaim
from cake_infer.cache.config import CacheConfig
from cake_infer.cache.policies import PolicyModel, make_policy
from cake_infer.cache.policies.composed import ComposedPolicy
from cake_infer.cache.view import LayerView
from cake_infer.errors import OptionError
from torch import Tensor

LAYERS, KV, HEADS, D, WINDOW = 5, 2, 4, 8, 8
MODEL = PolicyModel("llama", LAYERS, 32, 300)


def allocation(name: str, budget: int = 40, **options: Any) -> Any:
    policy = make_policy(CacheConfig(policy="snapkv", allocation=name, policy_options=options), MODEL, budget)
    assert isinstance(policy, ComposedPolicy)
    return policy.allocation


def make_view(layer: int = 0, n: int = 70, seed: int = 0, spread: float = 1.5, sliding: int | None = None) -> LayerView:
    """Columns in mixed order, the second head five columns shorter: nothing may rely on storage."""
    random = torch.Generator().manual_seed(100 * layer + seed)
    lengths = (n, n - 5)
    positions = torch.full((KV, n), -1)
    for head, length in enumerate(lengths):
        kept = torch.cat([torch.randperm(n - WINDOW, generator=random)[: length - WINDOW], torch.arange(n - WINDOW, n)])
        positions[head, :length] = kept[torch.randperm(length, generator=random)]
    return LayerView(
        layer=layer,
        keys=torch.randn(KV, n, D, generator=random) * spread,
        positions=positions,
        queries=torch.randn(HEADS, WINDOW, D, generator=random),
        query_positions=torch.arange(n - WINDOW, n),
        window=WINDOW,
        scale=D**-0.5,
        sliding_window=sliding,
        total=n,
        lengths=lengths,
        column_sums=torch.rand(HEADS, n, generator=random).pow(3) * 5,
        hidden_similarity=float(torch.rand((), generator=random)),
    )


def scores(view: LayerView, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed + view.layer)
    found = torch.rand(KV, view.keys.shape[1], generator=random).pow(1 + view.layer)
    for head, length in enumerate(view.columns):
        found[head, :length][view.positions[head, :length] >= view.window_start] = math.inf
        found[head, length:] = math.nan  # nobody may look there
    return found


def attention(view: LayerView, head: int) -> tuple[Tensor, Tensor, Tensor]:
    """A query head's window attention, float64 `[w, columns]`, which entries it sees, and the columns' positions."""
    kv = head // (HEADS // KV)
    positions = view.positions[kv, : view.columns[kv]]
    seen = positions[None] <= view.query_positions[:, None]
    if view.sliding_window:
        seen &= positions[None] > view.query_positions[:, None] - view.sliding_window
    z = view.queries[head].double() @ view.keys[kv, : view.columns[kv]].double().T * view.scale
    return torch.softmax(z.masked_fill(~seen, -math.inf), -1), seen, positions


# -- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("total", "beta"), [(1000, 20.0), (1000, 4.0), (60, 20.0)])
def test_pyramid_lies_on_a_line_whose_mean_is_the_budget(total: int, beta: float) -> None:
    pyramid = allocation("pyramid", budget=40, beta=beta)
    base, first = 32.0, min(2 * 32.0 - 32.0 / beta, total - WINDOW)
    last = 2 * base - first
    view = replace(make_view(), total=total)
    found = [pyramid.preference(replace(view, layer=layer), None) for layer in range(LAYERS)]
    expected = [first + (last - first) * layer / (LAYERS - 1) for layer in range(LAYERS)]
    assert found == pytest.approx(expected)
    assert sum(found) == pytest.approx(base * LAYERS)
    assert (first < 2 * 32.0 - 32.0 / beta) == (total == 60), "the clip was not tested"


def test_d2o_weighs_by_the_variance_of_column_sums_scaled_between_heads() -> None:
    for seed in range(5):
        view = make_view(seed=seed)
        assert view.column_sums is not None
        variances = [
            np.var(view.column_sums[head, : view.columns[head // 2]].double().numpy(), ddof=1) for head in range(HEADS)
        ]
        low, high = min(variances), max(variances)
        expected = math.exp(-np.mean([(one - low) / (high - low + 1e-6) for one in variances]))
        assert allocation("d2o").preference(view, None) == pytest.approx(expected, rel=1e-9)
        poisoned = view.column_sums.clone()
        poisoned[2:, view.columns[1] :] = math.nan
        assert allocation("d2o").preference(replace(view, column_sums=poisoned), None) == pytest.approx(expected)


@pytest.mark.parametrize(("threshold", "sliding"), [(0.01, None), (0.3, None), (0.05, 20)])
def test_vl_cache_counts_the_entries_that_are_not_next_to_nothing(threshold: float, sliding: int | None) -> None:
    view = make_view(spread=3.0, sliding=sliding)
    dense = seen = 0
    for head in range(HEADS):
        a, visible, _ = attention(view, head)
        for row, mask in zip(a, visible, strict=True):
            values = row[mask]
            seen += len(values)
            dense += int((values >= threshold * values.max()).sum())
    found = allocation("vl-cache", threshold=threshold).preference(view, None)
    assert found == pytest.approx(dense / seen, abs=1.5 / seen)
    assert 0.02 < found < 0.98


def test_lava_weighs_by_the_entropy_of_all_heads_scores_together() -> None:
    view = make_view()
    indicator = scores(view)
    flat = [
        float(indicator[head, column])
        for head, length in enumerate(view.columns)
        for column in range(length)
        if view.positions[head, column] < view.window_start
    ]
    share = np.array(flat) / sum(flat)
    expected = -sum(p * math.log(p) for p in share if p > 0) / math.log(len(share))
    assert allocation("lava").preference(view, indicator) == pytest.approx(expected, rel=1e-6)
    one_hot = torch.zeros_like(indicator)
    one_hot[0, int((view.positions[0] == 3).nonzero())] = 5.0
    assert allocation("lava").preference(view, one_hot) == 0.0
    assert allocation("lava").preference(view, torch.zeros_like(indicator)) == 0.0
    assert allocation("lava").preference(view, torch.ones_like(indicator)) == pytest.approx(1.0)


def test_squeeze_gives_the_layers_that_change_least_a_part_and_the_rest_to_the_others() -> None:
    squeeze = allocation("squeeze", idle=0.25)
    view = make_view()
    cosines = [0.2, 0.97, 0.55, 0.96, 0.95, 0.6, 0.25]
    figures = [squeeze.preference(replace(view, hidden_similarity=cosine), None) for cosine in cosines]
    others = (7 - 3 * 0.25) / 4
    assert squeeze.settle(figures) == pytest.approx([others, 0.25, others, 0.25, 0.25, others, others])
    assert squeeze.settle([0.5] * 7) == [1.0] * 7
    assert squeeze.settle([0.5, 0.9]) == [1.0, 1.0]


def test_the_three_clusters_are_the_best_of_all_ways_to_cut() -> None:
    random = np.random.default_rng(0)
    for _ in range(30):
        figures = [float(x) for x in random.choice([random.random(), *random.random(6)], size=random.integers(3, 8))]
        if len(set(figures)) < 3:
            assert not any(highest_of_three(figures))
            continue
        best = math.inf
        for labels in product(range(3), repeat=len(figures)):
            groups = [[x for x, label in zip(figures, labels, strict=True) if label == k] for k in range(3)]
            if all(groups):
                best = min(best, sum(sum((x - np.mean(g)) ** 2 for x in g) for g in groups))
        highest = highest_of_three(figures)
        top = [x for x, is_top in zip(figures, highest, strict=True) if is_top]
        rest = sorted(x for x, is_top in zip(figures, highest, strict=True) if not is_top)
        assert min(top) > max(rest)
        splits = [(rest[:cut], rest[cut:]) for cut in range(1, len(rest))]
        found = min(sum(sum((x - np.mean(g)) ** 2 for x in g) for g in (top, low, middle)) for low, middle in splits)
        assert found == pytest.approx(best, abs=1e-12)


# -- curves -----------------------------------------------------------------------------------------------------------


def test_xkv_gives_each_seat_the_attention_that_it_retains() -> None:
    view = make_view()
    rows = []
    for kv in range(KV):
        group = [attention(view, head) for head in range(2 * kv, 2 * kv + 2)]
        mass = sum(a.mean(0) for a, _, _ in group) / 2
        rows.append(sorted(mass[group[0][2] < view.window_start].tolist(), reverse=True))
    expected = [sum(row[rank] if rank < len(row) else 0.0 for row in rows) / KV for rank in range(62)]
    found = allocation("xkv").curve(view, None, 1000)
    np.testing.assert_allclose(found[:62], expected, rtol=1e-5)
    assert (np.diff(found) <= 0).all()
    np.testing.assert_array_equal(allocation("xkv").curve(view, None, 9), found[:9])


def test_dealing_by_retained_attention_is_the_best_of_all_budgets() -> None:
    curves = [allocation("xkv").curve(make_view(layer, n=14, spread=2.0), None, 6) for layer in range(3)]
    cascade = Cascade(3, 1, WINDOW + 2, WINDOW, scored=True)
    for curve in curves:
        lengths = cascade.add(LayerClaim(WINDOW, (6,), curve=lambda limit, curve=curve: curve[:limit]))
    retained = sum(float(curve[: n - WINDOW].sum()) for curve, (n,) in zip(curves, lengths, strict=True))
    every = [split for split in product(range(7), repeat=3) if sum(split) == 6]
    best = max(sum(float(curve[:n].sum()) for curve, n in zip(curves, split, strict=True)) for split in every)
    assert retained == pytest.approx(best, rel=1e-6)


def test_composite_ranks_are_means_of_the_heads_sorted_scores() -> None:
    view = make_view()
    indicator = scores(view)
    rows = [
        sorted(
            (float(indicator[h, c]) for c in range(n) if view.positions[h, c] < view.window_start),
            reverse=True,
        )
        for h, n in enumerate(view.columns)
    ]
    expected = [(a + b) / 2 for a, b in zip(*rows, strict=False)]
    found = allocation("composite").curve(view, indicator, 1000)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    np.testing.assert_array_equal(allocation("composite").curve(view, indicator, 4), found[:4])


def test_layers_are_compared_by_what_the_indicator_says_and_not_by_its_order(one_prompt: Any) -> None:
    """CriticalKV's scores are an order in two stages; what compares layers and heads are those of its base."""
    view = one_prompt(total=60).view
    critical = make_policy(CacheConfig(policy="criticalkv", allocation="composite"), MODEL, 40).score(view)
    snapkv = make_policy(CacheConfig(policy="snapkv", allocation="composite"), MODEL, 40).score(view)
    assert not torch.equal(critical.indicator, snapkv.indicator)
    assert critical.curve is not None
    assert snapkv.curve is not None
    np.testing.assert_array_equal(critical.curve(1000), snapkv.curve(1000))


# -- tables -----------------------------------------------------------------------------------------------------------


def table(tmp_path: Path, content: Any, name: str = "table.json", **options: Any) -> list[tuple[float, ...]]:
    path = tmp_path / name
    path.write_text(json.dumps(content))
    made = allocation("table", table=str(path), **options)
    return [made.preference(make_view(layer), None) for layer in range(LAYERS)]


VALUES = [[1.0, 3.0], [2.0, 2.0], [0.5, 0.0], [4.0, 1.0], [1.0, 1.0]]


def test_a_table_is_read_as_weights_of_layers_heads_or_query_heads(tmp_path: Path) -> None:
    assert table(tmp_path, VALUES) == [tuple(row) for row in VALUES]
    assert table(tmp_path, [1, 2, 3, 4, 5]) == [(n, n) for n in (1.0, 2.0, 3.0, 4.0, 5.0)]
    assert table(tmp_path, [[a, a + 2, b, b] for a, b in VALUES]) == [(a + 1, b) for a, b in VALUES]
    by_name = {
        f"{layer}-{head}": [value, value + 1] for layer, row in enumerate(VALUES) for head, value in enumerate(row)
    }
    assert table(tmp_path, by_name) == [(a + 0.5, b + 0.5) for a, b in VALUES]


def test_a_table_may_be_a_safetensors_file(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"budgets": np.array(VALUES, np.float32)}, tmp_path / "t.safetensors")
    made = allocation("table", table=str(tmp_path / "t.safetensors"))
    assert [made.preference(make_view(layer), None) for layer in range(LAYERS)] == [tuple(row) for row in VALUES]


def test_the_kinds_of_tables_are_the_formulas_of_their_papers(tmp_path: Path) -> None:
    logits = table(tmp_path, VALUES, kind="lkv")
    exponentials = np.exp(np.array(VALUES))
    np.testing.assert_allclose(np.array(logits) / np.sum(logits), exponentials / exponentials.sum(), rtol=1e-12)
    # HeadKV: n = (b - b / beta) + share * (b / beta) * heads, in parts of b
    headkv = table(tmp_path, VALUES, kind="headkv", beta=4.0)
    share = np.array(VALUES) / np.sum(VALUES)
    np.testing.assert_allclose(headkv, (1 - 1 / 4) + share * (1 / 4) * LAYERS * KV, rtol=1e-12)
    assert np.mean(headkv) == pytest.approx(1.0)
    uncomp = table(tmp_path, VALUES, kind="uncomp")
    assert uncomp[0] == (2 / 3, 4 / 3)
    assert uncomp[1] == (4 / 3, 2 / 3)  # of equals the lower head
    assert np.mean(uncomp) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (VALUES[:4], "4 layers and the model 5"),
        ([[1.0, 2.0, 3.0]] * 5, "3 heads and the model 2 KV heads"),
        ([[1.0, 2.0], [1.0]] * 2, "one finite number"),
        ([["a", 1.0]] * 5, "one finite number"),
        ([[-1.0, 1.0]] * 5, "negative"),
        ({"0-0": 1, "0-2": 1}, "misses a layer or a head"),
        ({"first": 1}, "expected layer-head"),
        ("nothing", "one finite number"),
    ],
)
def test_a_table_that_is_not_of_this_model_is_refused(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        table(tmp_path, content)


def test_a_table_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="needs the policy option table=PATH"):
        allocation("table")
    with pytest.raises(OptionError, match=r"there is no file .*none\.json, which the allocation table needs"):
        allocation("table", table=str(tmp_path / "none.json"))
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(OptionError, match="neither JSON nor safetensors"):
        allocation("table", table=str(tmp_path / "bad.json"))
    (tmp_path / "bad.safetensors").write_bytes(b"abc")
    with pytest.raises(OptionError, match="cannot read the table"):
        allocation("table", table=str(tmp_path / "bad.safetensors"))


# -- all of them ------------------------------------------------------------------------------------------------------


def shares(name: str, heads: str | None, **options: Any) -> list[list[int]]:
    """Row lengths of five layers of one prompt."""
    config = CacheConfig(policy="snapkv", allocation=name, heads=heads, policy_options=options)
    policy = make_policy(config, MODEL, 30)
    cascade = policy.cascade(LAYERS, KV, 30, WINDOW)
    for layer in range(LAYERS):
        view = make_view(layer, spread=0.5 + layer)
        assert isinstance(policy, ComposedPolicy)
        indicator = scores(view)
        rows = [row.clone() for row in indicator]
        ranked = []
        for head, n in enumerate(view.columns):
            before = view.positions[head, :n] < view.window_start
            ranked.append(np.sort(rows[head][:n][before].numpy())[::-1])
        curve = getattr(policy.allocation, "curve", None)
        weight = 1.0 if curve else policy.allocation.preference(view, indicator)
        claim = LayerClaim(
            WINDOW,
            tuple(n - WINDOW for n in view.columns),
            weight,
            partial(curve, view, indicator) if curve else None,
            lambda limit, ranked=ranked: [row[:limit] for row in ranked],
        )
        lengths = cascade.add(claim)
    return lengths


def test_allocations_keep_equal_bytes_and_differ_from_each_other(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(json.dumps(VALUES))
    found = {}
    for name, method in ALLOCATIONS.items():
        for heads in method.heads:
            options = {"table": str(tmp_path / "t.json")} if name == "table" else {}
            found[name, heads] = shares(name, heads, **options)
            assert sum(map(sum, found[name, heads])) == 30 * LAYERS * KV, (name, heads)
            assert all(n >= WINDOW for row in found[name, heads] for n in row)
    for one, other in combinations(found, 2):
        assert found[one] != found[other], (one, other)


def test_heads_that_an_allocation_does_not_go_with_are_refused_and_its_own_are_the_default() -> None:
    with pytest.raises(OptionError, match="global goes with the heads own, not with equal"):
        CacheConfig(policy="snapkv", allocation="global", heads="equal")
    with pytest.raises(OptionError, match="uniform goes with the heads equal or adaptive, not with own"):
        CacheConfig(policy="snapkv", heads="own")
    choice = CacheConfig(policy="snapkv", allocation="global").choice
    assert choice is not None
    assert choice.heads.name == "own"
    assert [name for name, method in ALLOCATIONS.items() if method.late] == ["squeeze"]
    assert all(hasattr(method.load(), "settle") == method.late for method in ALLOCATIONS.values())
