"""What each hold rule gives up equals a float64 rendering of its rule, whatever the order of a row's columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from cake_infer.cache.holds import HOLDS
from cake_infer.cache.holds.base import AtIntervals, HeldRow, OneByOne, redundancy

POSITION, WINDOW, GROUP = 200, 6, 2


def rule(name: str, **options: Any) -> Any:
    return HOLDS[name].load()(**{option.name: option.default for option in HOLDS[name].options} | options)


def make_rows(counts: tuple[int, ...] = (30, 30, 22), seed: int = 0, same: bool = False) -> list[HeldRow]:
    """Rows of random tokens, the sinks and the window among them, in random order; the newcomer is the last column."""
    rng = np.random.default_rng(seed)
    rows = []
    for head, count in enumerate(counts):
        if not head or not same:
            old = rng.choice(np.arange(2, POSITION - WINDOW + 1), count - WINDOW - 2, replace=False)
            columns = np.concatenate([[0, 1], old, np.arange(POSITION - WINDOW + 1, POSITION)])
            columns = np.append(rng.permutation(columns), POSITION)
        weights = rng.dirichlet(np.ones(len(columns)) * 0.3, GROUP)
        scores = np.append(rng.random(len(columns) - 1), 0.0)
        tables = (weights, columns, scores)
        rows.append(HeldRow(*(torch.from_numpy(table).to(dtype) for table, dtype in zip(tables, DTYPES, strict=True))))
    return rows


DTYPES = (torch.float32, torch.int32, torch.float32)


def expected_losers(rows: list[HeldRow], score: Any) -> list[int]:
    """The least of `score(row)` by hand, of equals the oldest."""
    found = []
    for row in rows:
        value, positions = score(row), row.positions.tolist()
        able = [column for column, at in enumerate(positions) if at <= POSITION - WINDOW]
        found.append(min(able, key=lambda column: (value[column], positions[column])))
    return found


@pytest.mark.parametrize("seed", range(5))
def test_one_by_one_rules_give_up_the_least_of_what_they_measure(seed: int) -> None:
    rows = make_rows(seed=seed)
    mean = {id(row): row.weights.double().numpy().mean(0) for row in rows}
    everybody: dict[int, float] = {}
    for row in rows:
        for at, votes in zip(row.positions.tolist(), row.weights.double().numpy().sum(0), strict=True):
            everybody[at] = everybody.get(at, 0.0) + votes

    def pooled(row: HeldRow) -> np.ndarray:
        at = row.positions.numpy()
        return (np.abs(at[:, None] - at[None]) <= 2) @ mean[id(row)] / 5

    old = {id(row): row.scores.double().numpy() for row in rows}
    measures = {
        "attention": lambda row: mean[id(row)],
        "tova": lambda row: [everybody[at] for at in row.positions.tolist()],
        "cake": pooled,
        "streaming-llm": lambda row: [at if at >= 4 else 1000 for at in row.positions.tolist()],
        "h2o": lambda row: np.where(
            row.positions.numpy() > POSITION - len(row.positions) // 2, np.inf, old[id(row)] + mean[id(row)]
        ),
    }
    chosen = {}
    for name, measure in measures.items():
        assert isinstance(rule(name), OneByOne)
        chosen[name] = rule(name).losers(rows, POSITION, WINDOW)
        assert chosen[name] == expected_losers(rows, measure), name
    for row in rows:  # h2o came last and is the one that remembers
        np.testing.assert_allclose(row.scores.numpy(), old[id(row)] + mean[id(row)], rtol=1e-5)


def test_no_two_rules_give_up_the_same_slots() -> None:
    names = ("attention", "tova", "cake", "streaming-llm", "h2o")
    lost = {name: [rule(name).losers(make_rows(seed=seed), POSITION, WINDOW) for seed in range(5)] for name in names}
    assert len({str(losers) for losers in lost.values()}) == len(names)


def test_tova_gives_up_one_token_for_all_heads_that_hold_the_same() -> None:
    rows = make_rows((30, 30, 30), same=True)
    losers = rule("tova").losers(rows, POSITION, WINDOW)
    assert len({int(row.positions[loser]) for row, loser in zip(rows, losers, strict=True)}) == 1
    assert len({*rule("attention").losers(rows, POSITION, WINDOW)}) > 1


def test_a_ring_of_nothing_but_sinks_and_window_gives_up_the_latest_sink() -> None:
    positions = torch.tensor([2, 0, 1, *range(POSITION - 5, POSITION + 1)], dtype=torch.int32)
    row = HeldRow(torch.ones(1, 9) / 9, positions, torch.zeros(9))
    assert rule("streaming-llm").losers([row], POSITION, WINDOW) == [0]


# -- rules at intervals -----------------------------------------------------------------------------------------------


def make_row(seed: int, n: int = 40) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    old = rng.choice(POSITION - WINDOW + 1, n - WINDOW, replace=False)
    at = rng.permutation(np.concatenate([old, np.arange(POSITION - WINDOW + 1, POSITION + 1)]))
    keys = rng.normal(size=(n, 8)) + 1.2 * rng.normal(size=(3, 8))[rng.integers(0, 3, n)] * 2
    queries = rng.normal(size=(GROUP, 6, 8)) * 1.5
    return keys, at, rng.random(n) * (rng.random(n) > 0.4), queries


def twins(keys: np.ndarray, at: np.ndarray, alike: float) -> np.ndarray:
    """R-KV's redundancy, pair by pair."""
    n = len(at)
    cosine = np.zeros((n, n))
    for i in range(n):
        for j in range(n):
            if i != j:
                cosine[i, j] = keys[i] @ keys[j] / np.linalg.norm(keys[i]) / np.linalg.norm(keys[j])
    for i in range(n):
        like = [j for j in range(n) if cosine[i, j] > alike]
        if like:
            cosine[i, max(like, key=lambda j: at[j])] = 0.0
    mean = cosine.mean(0)
    return np.exp(mean) / np.exp(mean).sum()


def run_cut(name: str, row: tuple[np.ndarray, ...], limit: int, **options: Any) -> tuple[list[int], np.ndarray]:
    keys, at, scores, queries = row
    found, kept = rule(name, **options).cut(
        torch.from_numpy(keys).float(),
        torch.from_numpy(at).int(),
        torch.from_numpy(scores).float(),
        torch.from_numpy(queries).float(),
        0.4,
        limit,
        WINDOW,
    )
    return found.tolist(), kept.numpy()


def softmax(z: np.ndarray) -> np.ndarray:
    weights = np.exp(z - z.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def best_of(value: np.ndarray, at: np.ndarray, limit: int) -> list[int]:
    inside = [column for column in range(len(at)) if at[column] > POSITION - WINDOW]
    others = sorted((c for c in range(len(at)) if c not in inside), key=lambda c: (-value[c], -at[c]))
    return sorted([*inside, *others[: limit - len(inside)]], key=lambda c: at[c])


@pytest.mark.parametrize("alike", [0.5, 0.9, 1.0])
def test_redundancy_is_the_softmax_of_mean_cosines_without_the_latest_twin(alike: float) -> None:
    for seed in range(3):
        keys, at, _, _ = make_row(seed)
        found = redundancy(torch.from_numpy(keys), torch.from_numpy(at), alike)
        np.testing.assert_allclose(found.numpy(), twins(keys, at, alike), rtol=1e-4)


@pytest.mark.parametrize("mix", [0.5, 1.0, 0.0])
def test_g_kv_remembers_what_mattered_and_drops_what_is_there_twice(mix: float) -> None:
    for seed in range(4):
        row = make_row(seed)
        keys, at, scores, queries = row
        votes = queries[:, -4:]
        logits = np.einsum("gwd,nd->gwn", votes, keys) * 0.4
        logits[:, at[None] > np.arange(POSITION - 3, POSITION + 1)[:, None]] = -np.inf
        outside = at <= POSITION - WINDOW
        local = softmax(logits).max(0).mean(0) * outside
        local /= local.max()
        remembered = np.maximum(0.8 * scores, local) * outside
        likeness = twins(keys, at, 0.5) * outside
        expected = best_of(mix * remembered - (1 - mix) * likeness / likeness.max(), at, 24)
        found, kept = run_cut("g-kv", row, 24, votes=4, mix=mix)
        assert found == expected
        np.testing.assert_allclose(kept, remembered[expected], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("mix", [0.1, 1.0])
def test_r_kv_weighs_importance_against_redundancy(mix: float) -> None:
    for seed in range(4):
        row = make_row(seed)
        keys, at, _, queries = row
        logits = (np.einsum("gwd,nd->gwn", queries[:, -4:], keys) * 0.4).max(0)
        logits[:, at > POSITION - WINDOW] = -np.inf
        attention = softmax(logits).mean(0)
        importance = np.where(np.abs(at[:, None] - at[None]) <= 3, attention, 0).max(1)
        expected = best_of(mix * importance - (1 - mix) * twins(keys, at, 0.5), at, 24)
        assert run_cut("r-kv", row, 24, votes=4, mix=mix)[0] == expected


def test_rules_at_intervals_differ_and_say_how_often_they_cut() -> None:
    row = make_row(1)
    cuts = [run_cut(name, row, 20)[0] for name in ("g-kv", "r-kv")]
    assert cuts[0] != cuts[1]
    for name in ("g-kv", "r-kv"):
        assert isinstance(rule(name), AtIntervals)
        assert rule(name).every == 128
        assert rule(name, interval=5).every == 5
    for name in ("attention", "tova", "h2o", "cake", "streaming-llm"):
        assert rule(name).every == 1
        assert rule(name, interval=5).every == 5


@pytest.mark.parametrize("end", ["least", "most"])
@pytest.mark.parametrize("name", list(HOLDS))
def test_the_ends_of_every_range_are_worked_out(name: str, end: str) -> None:
    """What would take hours, or overflow, is outside of the range."""
    for option in HOLDS[name].options:
        one = rule(name, **{option.name: getattr(option.range, end)})
        if isinstance(one, OneByOne):
            rows = make_rows()
            for row, loser in zip(rows, one.losers(rows, POSITION, WINDOW), strict=True):
                assert 0 <= loser < len(row.positions), option.name
        else:
            positions = torch.arange(40, dtype=torch.int32)
            random = torch.Generator().manual_seed(0)
            keys, scores = torch.randn(40, 8, generator=random), torch.rand(40, generator=random)
            queries = torch.randn(GROUP, 4, 8, generator=random)
            chosen, kept = one.cut(keys, positions, scores, queries, 1.0, 20, WINDOW)
            assert len(set(chosen.tolist())) == 20, option.name
            assert not kept.isnan().any(), option.name
