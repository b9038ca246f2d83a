"""Each indicator's scores equal a float64 rendering of its formula, in every state of a layer's rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cake_infer.cache.config import CacheConfig
from cake_infer.cache.indicators import INDICATORS
from cake_infer.cache.policies import PolicyModel, make_policy
from cake_infer.cache.policies.composed import ComposedPolicy
from cake_infer.errors import CakeError, OptionError
from safetensors.torch import save_file

MODEL = PolicyModel("llama", 3, 24, 300)
HEADS, KV_HEADS, GROUP, HEAD_DIM, WINDOW = 4, 2, 2, 8, 8
Scene = Any


def made(name: str, budget: int = 40, **options: Any) -> ComposedPolicy:
    config = CacheConfig(policy=name, window=WINDOW, budget=budget, policy_options=options)
    policy = make_policy(config, MODEL, budget)
    assert isinstance(policy, ComposedPolicy)
    return policy


def score(scene: Scene, name: str, budget: int = 40, **options: Any) -> torch.Tensor:
    return made(name, budget, **options).score(scene.view).indicator


def group(kv: int) -> range:
    return range(kv * GROUP, (kv + 1) * GROUP)


def near(positions: np.ndarray, reach: int) -> np.ndarray:
    """Which columns lie within `reach` positions of each, bool `[n, n]`."""
    return np.abs(positions[:, None] - positions[None]) <= reach


def norms(scene: Scene, kv: int, order: int = 1) -> np.ndarray:
    """|| W_o v || of that order, mean over the group."""
    values = scene.values[kv, scene.columns[kv]]
    blocks = [scene.output[:, head * HEAD_DIM : (head + 1) * HEAD_DIM] for head in group(kv)]
    return np.mean([np.linalg.norm(values @ block.T, order, axis=1) for block in blocks], axis=0)


# -- by position and by keys ------------------------------------------------------------------------------------------


def test_streaming_llm_keeps_the_sinks_and_then_the_latest(scene: Scene) -> None:
    for sinks in (4, 0):
        expected = [np.where(at < sinks, np.inf, at.astype(float)) for at in scene.columns]
        scene.compare(score(scene, "streaming-llm", sinks=sinks), expected)


def test_knorm_prefers_short_keys(scene: Scene) -> None:
    scene.compare(
        score(scene, "knorm"), [-np.sqrt((scene.keys[kv, at] ** 2).sum(1)) for kv, at in enumerate(scene.columns)]
    )


def test_keydiff_prefers_keys_unlike_the_mean_direction(scene: Scene) -> None:
    expected = []
    for kv, at in enumerate(scene.columns):
        unit = scene.keys[kv, at] / np.linalg.norm(scene.keys[kv, at], axis=1, keepdims=True)
        anchor = unit.mean(0)
        expected.append(-(unit @ anchor) / np.linalg.norm(anchor))
    scene.compare(score(scene, "keydiff"), expected)


@pytest.mark.parametrize(("sinks", "lag"), [(4, 16), (0, 10), (4, 128)])
def test_lagkv_ranks_a_chunk_by_the_range_of_the_next(scene: Scene, sinks: int, lag: int) -> None:
    expected = []
    for kv, at in enumerate(scene.columns):
        order = np.argsort(at)
        n = len(at)
        result = 1 + np.arange(1, n + 1) / n
        result[:sinks] = np.inf
        for start in range(sinks, n - 2 * lag + 1, lag):
            chance = np.zeros(lag)
            for table in (scene.keys[kv, at], scene.values[kv, at]):
                chunk, following = table[order][start : start + lag], table[order][start + lag : start + 2 * lag]
                low, high = following.min(0), following.max(0)
                spread = ((chunk - low) / (high - low)).std(1, ddof=1)
                chance += np.exp(spread - spread.max()) / np.exp(spread - spread.max()).sum()
            result[start : start + lag] = np.argsort(np.argsort(chance)) / lag
        back = np.empty(n)
        back[order] = result
        expected.append(back)
    scene.compare(score(scene, "lagkv", sinks=sinks, lag=lag), expected)


# -- by the window's attention ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("pool", "pooling"), [(7, "max"), (5, "avg"), (1, "max")])
def test_snapkv_pools_the_windows_votes(scene: Scene, pool: int, pooling: str) -> None:
    expected = []
    for kv, at in enumerate(scene.columns):
        close = near(at, pool // 2)
        heads = []
        for head in group(kv):
            votes = scene.attention(head, scene.window_rows).sum(0) * scene.before(kv)
            pooled = np.where(close, votes, 0).max(1) if pooling == "max" else close @ votes / pool
            heads.append(pooled)
        expected.append(np.mean(heads, axis=0))
    scene.compare(score(scene, "snapkv", pool=pool, pooling=pooling), expected)


@pytest.mark.parametrize("pool", [7, 1])
def test_lava_is_the_largest_vote_of_the_group_times_the_largest_value_of_the_head(scene: Scene, pool: int) -> None:
    expected = []
    for kv, at in enumerate(scene.columns):
        close = near(at, pool // 2)
        votes = [scene.attention(head, scene.window_rows).mean(0) * scene.before(kv) for head in group(kv)]
        pooled = np.max([np.where(close, one, 0).max(1) for one in votes], axis=0)
        largest = np.abs(scene.values[kv, at][scene.before(kv)]).sum(1).max()
        expected.append(pooled * largest * scene.before(kv))
    scene.compare(score(scene, "lava", pool=pool), expected)


def test_tova_is_the_last_row_over_all_heads_that_hold_the_token(scene: Scene) -> None:
    total = np.zeros(scene.total)
    for head in range(HEADS):
        total[scene.columns[head // GROUP]] += scene.attention(head, np.array([scene.total - 1]))[0] / HEADS
    scene.compare(score(scene, "tova"), [total[at] for at in scene.columns])


def test_rest_kv_is_the_change_of_the_output_without_the_token(scene: Scene) -> None:
    expected = []
    for kv, at in enumerate(scene.columns):
        moved = np.zeros(len(at))
        for head in group(kv):
            attention = scene.attention(head, scene.window_rows)
            smooth = attention[0]
            for row in attention[1:]:
                smooth = 0.7 * smooth + 0.3 * row
            values, block = scene.values[kv, at], scene.output[:, head * HEAD_DIM : (head + 1) * HEAD_DIM]
            away = (smooth @ values - values) @ block.T
            moved += smooth / (1 - smooth) * np.sqrt((away**2).sum(1)) / GROUP
        expected.append(near(at, 2) @ (moved * scene.before(kv)) / 5)
    scene.compare(score(scene, "rest-kv"), expected)


@pytest.mark.parametrize(("drift", "budget"), [(3, 40), (1, 12), (7, 200)])
def test_rest_kv_pools_wider_and_further_on_the_way_that_attention_wanders(
    scene: Scene, drift: int, budget: int
) -> None:
    expected, steps = [], set()
    for kv, at in enumerate(scene.columns):
        before, pooled = scene.before(kv), np.zeros(len(at))
        for head in group(kv):
            attention = scene.attention(head, scene.window_rows)
            half = len(attention) // 2
            ranks = min(before.sum(), budget - WINDOW)
            means = []
            for rows in (attention[:half], attention[half:]):
                votes = np.where(before, rows.mean(0) if len(rows) else 0.0, -1.0)
                means.append(at[np.argsort(-votes, kind="stable")[:ranks]].mean() if ranks and half else 0.0)
            step = int((means[1] - means[0]) / drift)
            steps.add(step)
            smooth = attention[0]
            for row in attention[1:]:
                smooth = 0.7 * smooth + 0.3 * row
            values, block = scene.values[kv, at], scene.output[:, head * HEAD_DIM : (head + 1) * HEAD_DIM]
            away = (smooth @ values - values) @ block.T
            moved = smooth / (1 - smooth) * np.sqrt((away**2).sum(1)) * before
            width = max(5, 2 * abs(step) + 1)
            around = np.abs(at[:, None] - step - at[None]) <= width // 2
            pooled += around @ moved / width / GROUP
        expected.append(pooled)
    scene.compare(score(scene, "rest-kv", budget, drift=drift), expected)
    assert drift > 1 or steps != {0}, "attention stays: nothing was tested"


@pytest.mark.parametrize("power", [1, 2])
def test_defensivekv_is_the_worst_case_over_rows_and_heads(scene: Scene, power: int) -> None:
    budget, room = 20, 20 - WINDOW
    plain, means, shield, mass, heads = [], [], [], np.zeros(scene.total), np.zeros(scene.total)
    for kv, at in enumerate(scene.columns):
        mass[at] += norms(scene, kv, power)
        heads[at] += 1
    mass *= KV_HEADS / np.maximum(heads, 1)
    for kv, at in enumerate(scene.columns):
        before = scene.before(kv)
        rows = [row * before for head in group(kv) for row in scene.attention(head, scene.window_rows)]
        pooled = [near(at, 2) @ row / 5 for row in rows]
        worst = np.max([p * row.sum() / p.sum() for p, row in zip(pooled, rows, strict=True)], axis=0)
        plain.append(np.maximum(worst, worst[before].mean()) * norms(scene, kv, power) / mass[at])
        mean = np.mean(rows, axis=0)
        order = np.argsort(-mean)
        crossing = np.cumsum(mean[order]) / mean.sum() >= 0.9 - (1 - mean.sum())
        keep = order[: min(int(np.argmax(crossing)), room)]
        shield.append(np.isin(np.arange(len(at)), keep))
        means.append(mean)
    largest = max(s.max() for s in plain)
    expected = [np.where(s, largest + m, p) for s, m, p in zip(shield, means, plain, strict=True)]
    assert any(s.any() for s in shield)
    policy = made("defensivekv", budget, norm=f"l{power}")
    scored = policy.score(scene.view)
    scene.compare(scored.indicator, expected)
    assert scored.worth is not None
    scene.compare(scored.worth, [np.where(s, largest, p) for s, p in zip(shield, plain, strict=True)])


# -- by the attention of all queries ----------------------------------------------------------------------------------


def test_h2o_adds_up_the_attention_of_every_query_and_goes_on_from_earlier_turns(scene: Scene) -> None:
    expected = []
    for kv in range(KV_HEADS):
        sums = [scene.attention(head, scene.new_rows).sum(0) for head in group(kv)]
        expected.append(np.mean(sums, axis=0) + scene.carried[kv])
    for budget, recent in ((40, 0.5), (40, 0.0), (61, 0.3)):
        scored = made("h2o", budget, recent=recent).score(scene.view)
        latest = [at >= scene.total - int(recent * budget) for at in scene.columns]
        parts = zip(latest, scene.columns, expected, strict=True)
        scene.compare(scored.indicator, [np.where(one, scene.total + at, sums) for one, at, sums in parts])
        assert all((sums[scene.before(kv)] < scene.total).all() for kv, sums in enumerate(expected))
        for plain in (scored.carried, scored.worth):  # what a row carries on, and heads share by, is the sum itself
            assert plain is not None
            scene.compare(plain, expected)


def test_roco_spares_what_varies_and_goes_by_the_mean_of_those_that_see_it(scene: Scene) -> None:
    expected = []
    for kv, at in enumerate(scene.columns):
        rows = np.mean([scene.attention(head, scene.new_rows) for head in group(kv)], axis=0)
        seen = at[None] <= scene.new_rows[:, None]
        if scene.sliding is not None:
            seen &= at[None] > scene.new_rows[:, None] - scene.sliding
        count = np.maximum(seen.sum(0), 1)
        mean = rows.sum(0) / count
        deviation = np.sqrt(np.maximum((rows**2).sum(0) / count - mean**2, 0))
        able = scene.before(kv) & (at >= 4)
        spared = [column for column in np.argsort(-deviation) if able[column]][:10]  # 0.25 of the budget
        result = mean.copy()
        result[spared] = 1 + deviation[spared]
        expected.append(np.where(at < 4, np.inf, result))
    scene.compare(score(scene, "roco", volatile=0.25), expected)


# -- by queries to come -----------------------------------------------------------------------------------------------


def mean_turn(scene: Scene, ahead: int) -> np.ndarray:
    """The mean rotation matrix of the positions to come, written entry by entry."""
    half = HEAD_DIM // 2
    matrix = np.zeros((HEAD_DIM, HEAD_DIM))
    for position in range(scene.total, scene.total + ahead):
        for i in range(half):
            angle = position * 50.0 ** (-2 * i / HEAD_DIM)
            matrix[i, i] += np.cos(angle) / ahead
            matrix[i + half, i + half] += np.cos(angle) / ahead
            matrix[i, i + half] -= np.sin(angle) / ahead
            matrix[i + half, i] += np.sin(angle) / ahead
    return matrix


def test_expected_attention_is_the_mean_of_gaussian_queries(scene: Scene) -> None:
    ahead = 16
    turn = mean_turn(scene, ahead)
    expected = []
    for kv, at in enumerate(scene.columns):
        keys, values = scene.keys[kv, at], scene.values[kv, at]
        total = np.zeros(len(at))
        for head in group(kv):
            queries = scene.plain[head, max(scene.first, 4) :]
            mean, spread = turn @ queries.mean(0), turn @ np.cov(queries.T, bias=True) @ turn.T
            z = keys @ mean / np.sqrt(HEAD_DIM) + np.einsum("nd,de,ne->n", keys, spread, keys) / (2 * HEAD_DIM)
            z[at < 4] = -np.inf
            total += np.exp(z - z.max()) / np.exp(z - z.max()).sum() / GROUP
        expected.append(np.where(at < 4, np.inf, total * np.linalg.norm(values, axis=1)))
    scene.compare(score(scene, "expected-attention", ahead=ahead), expected, tolerance=1e-3)


def test_capkv_is_the_weighted_leverage_of_values(scene: Scene) -> None:
    ahead, temperature = 16, 3.0
    turn = mean_turn(scene, ahead)
    expected = []
    for kv, at in enumerate(scene.columns):
        unit = scene.keys[kv, at] / np.linalg.norm(scene.keys[kv, at], axis=1, keepdims=True)
        values = scene.values[kv, at]
        total = np.zeros(len(at))
        for head in group(kv):
            anchor = turn @ scene.plain[head, max(scene.first, 4) :].mean(0)
            logits = temperature * unit @ (anchor / np.linalg.norm(anchor))
            weight = np.exp(logits - logits.max())
            inverse = np.linalg.inv(np.eye(HEAD_DIM) + (values * weight[:, None]).T @ values)
            leverage = weight * np.einsum("nd,de,ne->n", values, inverse, values)
            assert 0 < leverage.sum() < HEAD_DIM
            total += leverage / GROUP
        expected.append(np.where(at < 4, np.inf, total))
    scene.compare(score(scene, "capkv", ahead=ahead, temperature=temperature), expected)


# -- wrappers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("base", "share"), [("snapkv", 0.5), ("cake", 0.5), ("h2o", 0.25), ("tova", 1.0)])
def test_criticalkv_keeps_for_any_number_a_part_by_the_base_and_the_rest_by_projected_values(
    scene: Scene, base: str, share: float
) -> None:
    found = score(scene, "criticalkv", base=base, share=share)
    inner = score(scene, base).double().numpy()
    for kv, at in enumerate(scene.columns):
        before = np.flatnonzero(scene.before(kv))
        plain = inner[kv, before]
        critical = (plain + 1e-4) * norms(scene, kv)[before]
        order = before[np.argsort(-found[kv].numpy()[before], kind="stable")]
        for n in (1, 2, 3, 7, 12, len(before)):
            first = list(np.argsort(-plain, kind="stable")[: int(share * n)])
            rest = [entry for entry in np.argsort(-critical, kind="stable") if entry not in first]
            assert set(order[:n]) == set(before[first + rest[: n - len(first)]]), (n, at)


def test_criticalkv_shares_over_heads_by_the_base_scores_and_remembers_them(scene: Scene) -> None:
    scored = made("criticalkv", base="h2o").score(scene.view)
    inner = score(scene, "h2o", recent=0.0)
    for kept in (scored.worth, scored.carried):
        assert kept is not None
        scene.compare(kept, [inner[kv, : len(at)].double().numpy() for kv, at in enumerate(scene.columns)], 1e-6)


def test_chunkkv_gives_a_chunk_the_mean_of_its_tokens_over_all_heads(scene: Scene) -> None:
    inner = score(scene, "snapkv").double().numpy()
    total, holders = np.zeros(scene.total), np.zeros(scene.total, dtype=bool)
    for kv, at in enumerate(scene.columns):
        before = scene.before(kv)
        total[at[before]] += inner[kv, : len(at)][before]
        holders[at[before]] = True
    chunk = np.arange(scene.total) // 10
    mean = [total[(chunk == c) & holders].mean() if ((chunk == c) & holders).any() else 0.0 for c in chunk]
    scene.compare(score(scene, "chunkkv"), [np.array(mean)[at] for at in scene.columns])


# -- random choice ----------------------------------------------------------------------------------------------------


def test_nacl_takes_the_ends_the_best_and_then_draws(scene: Scene) -> None:
    budget, ends, top = 40, 0.1, 0.3
    found = score(scene, "nacl", budget, ends=ends, top=top)
    for kv, at in enumerate(scene.columns):
        votes = np.mean([scene.attention(head, scene.window_rows).sum(0) for head in group(kv)], axis=0)
        got = found[kv, : len(at)].double().numpy()
        able = scene.before(kv) & (at >= 4)
        np.testing.assert_array_equal(np.isinf(got[scene.before(kv)]), at[scene.before(kv)] < 4)
        best = [column for column in np.argsort(-votes) if able[column]][:12]
        assert set(np.flatnonzero(able & (got > 0))) == set(best)
        np.testing.assert_allclose(got[best], 1 + votes[best], rtol=1e-4)
        rest = able & (got < 0)
        assert len(set(got[rest])) == rest.sum(), "the rest is in a random order without ties"


def test_capkv_leaves_values_that_are_no_numbers_to_the_check_of_all_scores(one_prompt: Any) -> None:
    scene = one_prompt(total=48)
    scene.view.values[0, 3, 0] = float("nan")
    with pytest.raises(CakeError, match="the scores of layer 1 are not numbers"):
        score(scene, "capkv")


def test_nacl_draws_by_its_chances(one_prompt: Any) -> None:
    """Over many seeds the first token that is drawn follows softmax(votes) of those that are not the best."""
    scene = one_prompt(total=20)
    votes = np.mean([scene.attention(head, scene.window_rows).sum(0) for head in group(0)], axis=0)[:12] / 0.2
    chance = np.exp(votes) / np.exp(votes).sum()
    drawn = np.zeros(12)
    for seed in range(1500):
        found = score(scene, "nacl", ends=0.0, top=0.0, temperature=0.2, seed=seed)[0, :12]
        drawn[int(found.argmax())] += 1 / 1500
    assert chance.max() > 1.5 / 12, "the chances differ enough to tell"
    np.testing.assert_allclose(drawn, chance, atol=0.035)


def walk_weights(scene: Scene, rows: int = 16) -> tuple[np.ndarray, np.ndarray]:
    """Nexus: block ids that are there, and their weights."""
    held = np.unique(np.concatenate(scene.columns))
    owners = [[kv for kv, at in enumerate(scene.columns) if position in at] for position in held]
    keys = np.array([scene.keys[own, position].mean(0) for own, position in zip(owners, held, strict=True)])
    at = scene.window_rows[-rows:]
    logits = scene.queries[:, at].mean(0) @ keys.T / np.sqrt(HEAD_DIM)
    seen = held[None] <= at[:, None]
    if scene.sliding is not None:
        seen &= held[None] > at[:, None] - scene.sliding
    attention = np.where(seen, np.exp(logits), 0)
    attention /= attention.sum(1, keepdims=True)
    blocks = np.unique(held // 8)
    mass = np.stack([attention[:, held // 8 == block].sum(1) for block in blocks], 1)
    walked = np.zeros(len(blocks))
    for row in mass[-3:]:
        walked = walked + (1 + row @ walked) * row
    weight = mass.mean(0) + 0.5 * walked / walked.sum()
    return blocks, weight + 1e-6 * np.arange(len(blocks)) / max(len(blocks) - 1, 1)


def test_nexus_with_many_draws_is_the_order_of_weights(scene: Scene) -> None:
    blocks, weight = walk_weights(scene)
    found = score(scene, "nexus", block=8, draws=20000)
    expected = np.log(weight / (1 + weight), where=weight > 0, out=np.full(len(weight), -np.inf))  # E[u^(1/w)]
    for kv, at in enumerate(scene.columns):
        got = found[kv, : len(at)].double().numpy()
        for block, wanted in zip(blocks, expected, strict=True):
            inside = got[at // 8 == block]
            assert (inside == inside[:1]).all(), "a block is one"
            if block == 0:
                assert (inside == np.inf).all()
            elif (
                len(inside) and wanted > -4
            ):  # the key of a block that weighs less is larger than 0 too rarely to average
                assert inside[0] == pytest.approx(wanted, abs=0.25)


def test_nexus_with_one_draw_takes_the_first_block_by_weight(one_prompt: Any) -> None:
    scene = one_prompt(total=48)
    blocks, weight = walk_weights(scene)
    chance = weight[1:] / weight[1:].sum()
    drawn = np.zeros(len(blocks) - 1)
    for seed in range(800):
        found = score(scene, "nexus", block=8, draws=1, seed=seed)[0, 8:]
        drawn[int(found.argmax()) // 8] += 1 / 800
    np.testing.assert_allclose(drawn, chance, atol=0.05)


@pytest.mark.parametrize("name", ["nacl", "nexus"])
def test_a_draw_depends_on_the_seed_and_the_position_alone(one_prompt: Any, name: str) -> None:
    scene = one_prompt()
    same, other = (score(scene, name, seed=seed) for seed in (0, 1))
    assert torch.equal(same, score(scene, name, seed=0))
    assert not torch.equal(same, other)
    mixed = torch.randperm(scene.total, generator=torch.Generator().manual_seed(5))
    view = scene.view
    shuffled = type(view)(
        **{
            **{field: getattr(view, field) for field in view.__dataclass_fields__ if field != "memo"},
            "keys": view.keys[:, mixed],
            "positions": view.positions[:, mixed],
        }
    )
    torch.testing.assert_close(made(name, seed=0).score(shuffled).indicator, same[:, mixed])


# -- text and gates ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mass", [0.0, 0.9, 0.999, 1.0])
def test_sablock_takes_the_largest_blocks_within_clauses_that_keep_the_mass(scene: Scene, mass: float) -> None:
    budget, room = 28, 28 - WINDOW
    found = score(scene, "sablock", budget, mass=mass)
    starts = [0] + [index + 1 for index in range(scene.total - 1) if scene.ids[index] in (3, 7)]
    clause = np.searchsorted(starts, np.arange(scene.total), side="right") - 1
    sizes = []
    for kv, at in enumerate(scene.columns):
        before = scene.before(kv)
        votes = np.mean([scene.attention(head, scene.window_rows).sum(0) for head in group(kv)], axis=0) * before
        votes = near(at, 2) @ votes / 5 * before
        mine = clause[at]
        means = np.array([votes[(mine == c) & before].mean() if ((mine == c) & before).any() else 0 for c in mine])
        worth = votes * (1 + means / means.max())
        best = np.sort(worth[before])[::-1][:room].sum()
        for size in (32, 16, 8, 4, 1):
            block = list(zip(mine, (at - np.array(starts)[mine]) // size, strict=True))
            value = np.array(
                [np.mean([worth[j] for j in range(len(at)) if block[j] == b and before[j]] or [0.0]) for b in block]
            )
            chosen = np.argsort(-np.where(before, value, -1), kind="stable")[:room]
            if worth[chosen].sum() >= mass * best - 1e-9 or size == 1:
                break
        sizes.append(size)
        np.testing.assert_allclose(found[kv, : len(at)].numpy()[before], value[before], rtol=2e-4, atol=1e-7)
    assert mass or sizes == [32, 32]
    assert mass < 1 or sizes == [1, 1]


def gate_file(path: Any, layers: int = 3, kv_heads: int = KV_HEADS, hidden: int = 24) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {f"layers.{i}.weight": torch.randn(kv_heads, hidden, generator=generator) for i in range(layers)}
    tensors["layers.1.bias"] = torch.randn(kv_heads, generator=generator)
    save_file(tensors, path)
    return tensors


def test_a_gate_scores_new_tokens_by_its_file_and_old_ones_by_what_they_had(scene: Scene, tmp_path: Path) -> None:
    tensors = gate_file(tmp_path / "gates.safetensors")
    weight, bias = tensors["layers.1.weight"].double().numpy(), tensors["layers.1.bias"].double().numpy()
    fresh = scene.hidden @ weight.T + bias
    expected = [np.where(at >= scene.first, fresh[at, kv], scene.carried[kv]) for kv, at in enumerate(scene.columns)]
    scene.compare(score(scene, "gate", file=str(tmp_path / "gates.safetensors")), expected)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"layers": 2}, "has no tensor layers.2.weight: it is no gate of 3 layers"),
        ({"hidden": 16}, r"is \[2, 16\], not \[KV heads, 24\]"),
        ({"kv_heads": 3}, "gates are for 3 KV heads, but the model has 2"),
    ],
)
def test_a_gate_of_another_model_is_refused(
    one_prompt: Any, tmp_path: Path, options: dict[str, int], says: str
) -> None:
    gate_file(tmp_path / "gates.safetensors", **options)
    with pytest.raises(OptionError, match=says):
        score(one_prompt(), "gate", file=str(tmp_path / "gates.safetensors"))


def test_a_gate_file_that_is_missing_or_broken_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken").write_bytes(b"no safetensors")
    with pytest.raises(OptionError, match="needs the policy option file=PATH"):
        made("gate")
    with pytest.raises(OptionError, match=r"there is no file .*missing, which the indicator gate needs"):
        made("gate", file=str(tmp_path / "missing"))
    with pytest.raises(OptionError, match=r"cannot read the gates of .*broken"):
        made("gate", file=str(tmp_path / "broken"))


# -- all of them ------------------------------------------------------------------------------------------------------


def test_no_two_indicators_keep_the_same_tokens(one_prompt: Any, tmp_path: Path) -> None:
    """A policy is not a name over another's scorer."""
    scene = one_prompt(total=300, seed=7)
    gate_file(tmp_path / "gates.safetensors")
    kept: dict[frozenset[int], str] = {}
    for name in INDICATORS:
        options = {"gate": {"file": str(tmp_path / "gates.safetensors")}, "lagkv": {"lag": 16}}.get(name, {})
        found = score(scene, name, 60, **options)[0, : scene.total - WINDOW]
        tokens = frozenset(found.argsort(descending=True, stable=True)[:52].tolist())
        assert tokens not in kept, (name, kept.get(tokens))
        kept[tokens] = name


def test_no_indicator_scores_a_valid_column_with_nan_or_reads_one_that_no_head_has(
    scene: Scene, tmp_path: Path
) -> None:
    gate_file(tmp_path / "gates.safetensors")
    for name in INDICATORS:
        options = {"file": str(tmp_path / "gates.safetensors")} if name == "gate" else {}
        scored = made(name, **options).score(scene.view)
        for table in (scored.indicator, scored.worth, scored.carried):
            if table is not None:
                assert all(not table[kv, : len(at)].isnan().any() for kv, at in enumerate(scene.columns)), name


EXTREMES = [
    (method.name, option.name, end)
    for method in INDICATORS.values()
    for option in method.options
    if option.kind is not str
    for end in ("least", "most")
]


@pytest.mark.parametrize(("name", "option", "end"), EXTREMES)
def test_the_ends_of_every_range_are_worked_out_and_give_no_nan(scene: Scene, name: str, option: str, end: str) -> None:
    """What would take hours, or overflow, is outside of the range."""
    numbers = next(one for one in INDICATORS[name].options if one.name == option).range
    value = numbers.most if end == "most" else 1e-30 if numbers.above else numbers.least
    indicator = score(scene, name, **{option: value})
    assert all(not indicator[kv, : len(at)].isnan().any() for kv, at in enumerate(scene.columns))


@pytest.mark.parametrize("name", ["nexus", "nacl"])
def test_what_is_drawn_is_the_same_in_tiles(one_prompt: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    from cake_infer.cache import noise

    scene = one_prompt(total=300, seed=7)
    options = {"block": 4} if name == "nexus" else {}
    whole = score(scene, name, **options)
    monkeypatch.setattr(noise, "TILE", 64)
    torch.testing.assert_close(score(scene, name, **options), whole, rtol=1e-6, atol=1e-6)


def test_the_mean_rotation_is_the_same_in_blocks(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    from cake_infer.cache import rotated

    angles = torch.outer(torch.arange(scene.total, scene.total + 50).double(), torch.tensor([0.5, 0.01, 0.3, 1.0]))
    view = type("View", (), {"rotation": None, "total": scene.total, "keys": torch.zeros(1)})()
    view.rotation = lambda at: tuple(
        torch.cat([table, table], 1).float()
        for table in (angles[at - scene.total].cos(), angles[at - scene.total].sin())
    )
    monkeypatch.setattr(rotated, "BLOCK", 7)
    cos, sin = (torch.cat([table.mean(0)] * 2).diag() for table in (angles.cos(), angles.sin()))
    expected = torch.zeros(16, 16, dtype=torch.float64)
    expected[:8, :8], expected[8:, 8:], expected[:8, 8:], expected[8:, :8] = cos, cos, -sin, sin
    torch.testing.assert_close(rotated.mean_rotation(view, 50).double(), expected, rtol=0, atol=1e-6)
