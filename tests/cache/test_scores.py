"""The statistics of a layer equal a float64 rendering of the formulas, whatever the order and shape of its rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from cake_infer.cache import scores
from cake_infer.cache.scores import (
    CakeStatistics,
    LayerView,
    cake_statistics,
    column_moments,
    device_statistics,
    is_in_order,
    shifted_sums,
)
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

GAMMA, POOL = 200.0, 5


def make_view(
    heads: int = 4,
    kv_heads: int = 2,
    n: int = 50,
    rows: int = 8,
    window: int = 8,
    head_dim: int = 8,
    sliding_window: int | None = None,
    sharpness: float = 1.5,
    seed: int = 0,
) -> LayerView:
    """A prompt of `n` tokens read at once, random keys and queries."""
    generator = torch.Generator().manual_seed(seed)
    rows = min(rows, n)
    return LayerView(
        layer=0,
        keys=torch.randn(kv_heads, n, head_dim, generator=generator),
        positions=torch.arange(n, dtype=torch.int32).repeat(kv_heads, 1),
        queries=torch.randn(heads, rows, head_dim, generator=generator) * sharpness,
        query_positions=torch.arange(n - rows, n),
        window=window,
        scale=head_dim**-0.5,
        sliding_window=sliding_window,
        total=n,
    )


def with_gaps(view: LayerView, kept: list[int], seed: int = 0) -> LayerView:
    """The view after an eviction: head `k` has lost all but `kept[k]` random old rows, in a random order of columns.

    The window stays. Columns beyond a head's length hold NaN keys and wild positions.
    """
    rng = np.random.default_rng(seed)
    old, n = view.window_start, view.total
    columns = max(kept) + n - old
    keys = torch.full((view.keys.shape[0], columns, view.keys.shape[2]), math.nan)
    positions = torch.full((view.keys.shape[0], columns), n - 1, dtype=torch.int32)
    for head, count in enumerate(kept):
        chosen = np.concatenate([rng.choice(old, count, replace=False), np.arange(old, n)])
        rng.shuffle(chosen)
        keys[head, : len(chosen)] = view.keys[head, chosen]
        positions[head, : len(chosen)] = torch.from_numpy(chosen)
    return replace(view, keys=keys, positions=positions, lengths=tuple(count + n - old for count in kept))


def rendering(view: LayerView, gamma: float = GAMMA, pool: int = POOL) -> tuple[list[dict[int, float]], float, float]:
    """The formulas in float64, in numpy: for each KV head {position: indicator}; dispersion; shift."""
    kv_heads, group = view.keys.shape[0], view.queries.shape[0] // view.keys.shape[0]
    keys, queries = view.keys.double().numpy(), view.queries.double().numpy()
    at = view.query_positions.numpy()
    indicators, dispersion, shift = [], 0.0, 0.0
    for head in range(kv_heads):
        length = view.keys.shape[1] if view.lengths is None else view.lengths[head]
        where = view.positions[head, :length].numpy().astype(int)
        old = np.flatnonzero(where < view.total - view.window)
        raw: dict[int, float] = dict.fromkeys((int(where[column]) for column in old), 0.0)
        for query_head in range(head * group, (head + 1) * group):
            logits = queries[query_head] @ keys[head, :length].T * view.scale
            seen = where[None, :] <= at[:, None]
            if view.sliding_window is not None:
                seen &= at[:, None] - where[None, :] < view.sliding_window
            logits = np.where(seen, logits, -np.inf)
            attention = np.exp(logits - logits.max(1, keepdims=True))
            attention /= attention.sum(1, keepdims=True)
            before = attention[:, old]
            positive = before[before > 0]
            dispersion -= float((positive * np.log(positive)).sum())
            variance = before.var(0, ddof=1) if len(at) > 1 else np.zeros(len(old))
            shift += float(variance.sum())
            for column, value in zip(old, before.mean(0) + gamma * variance, strict=True):
                raw[int(where[column])] += float(value) / group
        half = range(-(pool // 2), pool // 2 + 1)
        indicators.append({p: sum(raw.get(p + step, 0.0) for step in half) / pool for p in raw})
    return indicators, dispersion, shift


def assert_equals_rendering(
    view: LayerView,
    gamma: float = GAMMA,
    pool: int = POOL,
    tolerance: float = 2e-5,
    worked: Callable[[LayerView, float, int], CakeStatistics] = cake_statistics,
) -> None:
    statistics = worked(view, gamma, pool)
    indicators, dispersion, shift = rendering(view, gamma, pool)
    assert statistics.dispersion == pytest.approx(dispersion, rel=tolerance, abs=1e-7)
    assert statistics.shift == pytest.approx(shift, rel=tolerance, abs=1e-9)
    assert statistics.indicator.shape == view.keys.shape[:2]
    assert statistics.indicator.dtype == torch.float32
    for head, expected in enumerate(indicators):
        length = view.keys.shape[1] if view.lengths is None else view.lengths[head]
        found = statistics.indicator[head].tolist()
        for column, position in enumerate(view.positions[head].tolist()[:length]):
            if position >= view.total - view.window:
                assert found[column] == math.inf
            else:
                assert found[column] == pytest.approx(expected[position], rel=tolerance, abs=1e-9)
        assert found[length:] == [-math.inf] * (len(found) - length)


def as_any_order(view: LayerView, seed: int = 0) -> LayerView:
    """The same rows with the columns of each head in a random order of its own."""
    generator = torch.Generator().manual_seed(seed)
    kv_heads, n, _ = view.keys.shape
    order = torch.stack([torch.randperm(n, generator=generator) for _ in range(kv_heads)])
    return replace(
        view,
        keys=torch.stack([view.keys[head, order[head]] for head in range(kv_heads)]),
        positions=view.positions.gather(1, order),
    )


@pytest.fixture(params=["one tile", "many tiles"])
def tile_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest tiles are 64 columns wide."""
    if request.param == "many tiles":
        monkeypatch.setattr(scores, "_TILE_FLOATS", 1)


SHAPES = {
    "grouped heads": {"heads": 6, "kv_heads": 2, "n": 300},
    "one query head per KV head": {"heads": 3, "kv_heads": 3, "n": 130},
    "one KV head": {"heads": 4, "kv_heads": 1, "n": 70},
    "shorter than the window": {"n": 5},
    "as long as the window": {"n": 8},
    "one token before the window": {"n": 9},
    "two tokens": {"n": 2},
    "one token": {"n": 1},
    "fewer queries than the window": {"n": 200, "rows": 3},
    "one query": {"n": 200, "rows": 1},
    "two queries": {"n": 200, "rows": 2},
    "sliding window": {"n": 300, "sliding_window": 90},
    "sliding window at a border of tiles": {"n": 200, "sliding_window": 68},
    "sliding window with two queries": {"n": 200, "sliding_window": 68, "rows": 2},
    "sliding window below the window": {"n": 100, "sliding_window": 5},
    "sliding window of one": {"n": 100, "sliding_window": 1},
    "sliding window beyond the prompt": {"n": 100, "sliding_window": 1000},
    "sharp attention": {"n": 150, "sharpness": 30.0},
    "flat attention": {"n": 150, "sharpness": 0.01},
}


@pytest.mark.usefixtures("tile_size")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_statistics_equal_the_formulas_for_a_whole_prompt(shape: dict[str, int]) -> None:
    view = make_view(**shape)
    assert is_in_order(view)
    assert_equals_rendering(view)


@pytest.mark.usefixtures("tile_size")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_columns_in_any_order_give_what_columns_in_order_give(shape: dict[str, int]) -> None:
    view = make_view(**shape)
    mixed = as_any_order(view)
    assert view.total < 3 or not is_in_order(mixed)
    fast, slow = cake_statistics(view, GAMMA, POOL), cake_statistics(mixed, GAMMA, POOL)
    assert slow.dispersion == pytest.approx(fast.dispersion, rel=1e-5, abs=1e-7)
    assert slow.shift == pytest.approx(fast.shift, rel=1e-5, abs=1e-9)
    by_position = slow.indicator.gather(1, mixed.positions.argsort(1))
    torch.testing.assert_close(by_position, fast.indicator, rtol=1e-5, atol=1e-8)
    assert_equals_rendering(mixed)


@pytest.mark.usefixtures("tile_size")
@pytest.mark.parametrize("kept", [[40, 40], [100, 3], [0, 60], [0, 0], [192, 192]])
@pytest.mark.parametrize("sliding_window", [None, 50])
def test_rows_with_gaps_and_lengths_of_their_own_equal_the_formulas(
    kept: list[int], sliding_window: int | None
) -> None:
    view = with_gaps(make_view(n=200, sliding_window=sliding_window), kept)
    assert_equals_rendering(view)


@pytest.mark.usefixtures("tile_size")
def test_kept_rows_in_front_of_new_tokens_equal_the_formulas() -> None:
    # Kept rows window first, then by score: any order. Then the new tokens, fewer than the window.
    view = make_view(n=400, rows=32, window=32)
    generator = torch.Generator().manual_seed(3)
    columns = torch.cat([torch.arange(378, 390), torch.randperm(378, generator=generator)[:90], torch.arange(390, 400)])
    front = replace(view, keys=view.keys[:, columns], positions=view.positions[:, columns])
    assert_equals_rendering(front)


@pytest.mark.usefixtures("tile_size")
def test_a_row_that_begins_one_token_outside_the_sliding_window_equals_the_formulas() -> None:
    view = make_view(n=300, sliding_window=100)
    assert_equals_rendering(replace(view, keys=view.keys[:, 199:], positions=view.positions[:, 199:]))


@pytest.mark.usefixtures("tile_size")
def test_hidden_columns_stay_hidden_however_low_the_visible_logits_are() -> None:
    view = replace(make_view(n=200, sliding_window=90), scale=1.0)
    view.queries.round_(), view.keys.round_()  # whole numbers: exact in fp32
    view.queries[..., 0], view.keys[..., 0] = 1000.0, -1000.0
    assert_equals_rendering(view)
    assert_equals_rendering(as_any_order(view))


@pytest.mark.parametrize("pool", [1, 3, 5, 9])
@pytest.mark.parametrize("gamma", [0.0, 1.0, 200.0])
def test_gamma_and_pool_are_applied(gamma: float, pool: int) -> None:
    assert_equals_rendering(make_view(n=40), gamma, pool)
    assert_equals_rendering(with_gaps(make_view(n=40), [20, 9]), gamma, pool)


def test_pooling_never_mixes_positions_further_apart_than_two() -> None:
    # One hot column at position 10: only rows within two positions of it gain, neighbours in the row or not.
    view = make_view(heads=1, kv_heads=1, n=60)
    view.keys.zero_()
    view.keys[0, 10] = 100 * view.queries[0].sum(0) / view.queries[0].sum(0).norm()
    columns = torch.tensor([13, 40, 10, 7, 12, *range(52, 60), 8])
    kept = replace(view, keys=view.keys[:, columns], positions=view.positions[:, columns])
    indicator = dict(zip(columns.tolist(), cake_statistics(kept, 0.0, 5).indicator[0].tolist(), strict=True))
    base = indicator[40]
    assert {p for p, score in indicator.items() if score > 3 * base and p < 52} == {8, 10, 12}


def test_the_indicator_of_a_kv_head_is_the_mean_over_its_query_heads() -> None:
    view = make_view(heads=8, kv_heads=2, n=60)
    whole = cake_statistics(view, GAMMA, POOL)
    parts = [cake_statistics(replace(view, queries=view.queries[[head, head + 4]]), GAMMA, POOL) for head in range(4)]
    mean = torch.stack([part.indicator for part in parts]).mean(0)
    torch.testing.assert_close(whole.indicator, mean, rtol=1e-5, atol=1e-8)
    assert whole.dispersion == pytest.approx(sum(part.dispersion for part in parts), rel=1e-6)
    assert whole.shift == pytest.approx(sum(part.shift for part in parts), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_keys_are_computed_in_fp32(dtype: torch.dtype) -> None:
    view = make_view(n=200)
    narrow = replace(view, keys=view.keys.to(dtype), queries=view.queries.to(dtype))
    widened = replace(narrow, keys=narrow.keys.float(), queries=narrow.queries.float())
    assert_equals_rendering(narrow)
    assert torch.equal(cake_statistics(narrow, GAMMA, POOL).indicator, cake_statistics(widened, GAMMA, POOL).indicator)


def test_strided_keys_are_read_in_place() -> None:
    view = make_view(n=120)
    store = torch.full((2, 200, 8), math.nan)
    store[:, 30:150] = view.keys
    strided = replace(view, keys=store[:, 30:150], queries=view.queries.transpose(0, 1).contiguous().transpose(0, 1))
    assert torch.equal(cake_statistics(strided, GAMMA, POOL).indicator, cake_statistics(view, GAMMA, POOL).indicator)


def test_the_input_is_not_changed() -> None:
    for view in (make_view(n=100), as_any_order(make_view(n=100, sliding_window=30))):
        keys, queries, positions = view.keys.clone(), view.queries.clone(), view.positions.clone()
        cake_statistics(view, GAMMA, POOL)
        assert torch.equal(view.keys, keys)
        assert torch.equal(view.queries, queries)
        assert torch.equal(view.positions, positions)


def test_tokens_outside_every_querys_sliding_window_count_nothing() -> None:
    view = make_view(n=100, sliding_window=20)
    far = replace(view, keys=view.keys.clone())
    far.keys[:, : 100 - 8 - 20 + 1] = 1e4  # would win every softmax
    near, hidden = cake_statistics(view, GAMMA, POOL), cake_statistics(far, GAMMA, POOL)
    assert torch.equal(hidden.indicator, near.indicator)
    assert (hidden.dispersion, hidden.shift) == (near.dispersion, near.shift)
    assert hidden.indicator[:, : 100 - 8 - 20 - 1].abs().max() == 0
    mixed = cake_statistics(as_any_order(far), GAMMA, POOL)
    assert mixed.dispersion == pytest.approx(near.dispersion, rel=1e-5)


def moments(attention: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    sums = torch.empty(3, attention.shape[0] // rows, attention.shape[1])
    shifted_sums(attention.clone(), rows, sums)
    return column_moments(sums, rows)


def test_identical_rows_have_a_variance_of_exactly_0() -> None:
    for rows in (1, 2, 3, 7, 32, 33):
        row = torch.rand(2, 1, 500, generator=torch.Generator().manual_seed(rows)) / 3
        mean, variance = moments(row.expand(2, rows, 500).reshape(2 * rows, 500), rows)
        assert torch.equal(mean, row[:, 0])
        assert variance.abs().max() == 0


def test_variances_far_below_the_mean_do_not_cancel() -> None:
    generator = torch.Generator().manual_seed(0)
    attention = 0.3 + 1e-5 * torch.rand(32, 64, generator=generator)
    mean, variance = moments(attention, 32)
    torch.testing.assert_close(variance[0], attention.double().var(0).float(), rtol=1e-4, atol=0)
    torch.testing.assert_close(mean[0], attention.double().mean(0).float(), rtol=1e-6, atol=0)
    plain = (attention.square().mean(0) - attention.mean(0).square()) * 32 / 31
    assert not torch.allclose(plain, attention.double().var(0).float(), rtol=0.1, atol=0)  # unshifted sums do cancel


def test_equal_queries_see_equal_attention_and_shift_nothing() -> None:
    view = make_view(n=300)
    view.queries[:] = view.queries[:, :1]
    view.keys[:, -8:] = -50 * view.queries[::2, :1]  # nothing of what the queries see differently has any weight
    statistics = cake_statistics(view, GAMMA, POOL)
    assert statistics.shift < 1e-12
    assert statistics.dispersion > 1


def test_one_hot_attention_has_no_dispersion_and_no_shift() -> None:
    view = make_view(n=100)
    view.queries[:] = view.queries[:1, :1]
    view.keys[:, 40] = 1e4 * view.queries[0, 0]
    statistics = cake_statistics(view, GAMMA, POOL)
    assert statistics.dispersion == 0
    assert statistics.shift == 0
    assert statistics.indicator[:, 38:43].tolist() == [[pytest.approx(0.2)] * 5] * 2
    assert statistics.indicator[:, :38].max() == 0


def test_uniform_attention_has_the_entropy_of_its_columns() -> None:
    view = make_view(n=100)
    view.keys.zero_()
    statistics = cake_statistics(view, GAMMA, POOL)
    expected = sum(92 / seen * math.log(seen) for seen in range(93, 101)) * 4
    assert statistics.dispersion == pytest.approx(expected, rel=1e-6)
    assert 0 < statistics.shift < 1e-3


@pytest.mark.usefixtures("tile_size")
def test_logits_of_fp16_extremes_stay_finite_and_exact() -> None:
    view = make_view(n=200, head_dim=16)
    extreme = replace(view, keys=view.keys.sign() * 65504, queries=view.queries.sign() * 65504)
    for one in (extreme, as_any_order(extreme)):
        statistics = cake_statistics(one, GAMMA, POOL)
        assert math.isfinite(statistics.dispersion)
        assert math.isfinite(statistics.shift)
        assert statistics.indicator[statistics.indicator < math.inf].isfinite().all()
        assert_equals_rendering(one)


class _LiveMemory(TorchDispatchMode):
    """Follows every storage that an operation makes: how much is alive at once, and how many large ones."""

    def __init__(self, large: int) -> None:
        super().__init__()
        self.large, self.peak, self.most_large, self.largest = large, 0, 0, 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._given:
                    self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                    self.largest = max(self.largest, storage.nbytes())
        self._storages = {key: kept for key, kept in self._storages.items() if not kept[0].expired()}
        sizes = [size for _, size in self._storages.values()]
        self.peak = max(self.peak, sum(sizes))
        self.most_large = max(self.most_large, sum(size >= self.large for size in sizes))
        return result

    def watch(
        self, view: LayerView, worked: Callable[[LayerView, float, int], CakeStatistics] = cake_statistics
    ) -> None:
        self._given = {t.untyped_storage()._cdata for t in (view.keys, view.positions, view.queries)}
        with self:
            worked(view, GAMMA, POOL)


@pytest.mark.parametrize("tile_floats", [1, 1 << 14, 1 << 30])
@pytest.mark.parametrize("order", ["in order", "any order"])
def test_no_more_than_two_arrays_of_query_rows_by_columns_are_alive(
    tile_floats: int, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scores, "_TILE_FLOATS", tile_floats)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # tiles grow with the threads
    view = make_view(heads=12, kv_heads=4, n=2000, rows=32, window=32)
    if order == "any order":
        view = as_any_order(view)
    array = 3 * 32 * 2000 * 4  # [heads / kv_heads * r, n] in fp32
    memory = _LiveMemory(large=array // 2)
    memory.watch(view)
    assert array <= memory.largest < 12 * 32 * 2000 * 4 / 2  # never [heads, window, n]
    assert memory.most_large <= 2
    assert memory.peak <= 2.3 * array
    if tile_floats < 1 << 30:
        assert memory.peak <= 1.6 * array


def test_the_memory_test_would_see_an_array_of_all_heads() -> None:
    memory = _LiveMemory(large=1000)
    memory._given = set()
    with memory:
        kept = [torch.rand(1000) for _ in range(3)]
        del kept[0]
        kept[0].softmax(0).sum()
    assert memory.most_large == 3
    assert memory.peak >= 12_000


# The kernels of a GPU, in Triton's interpreter.


@pytest.fixture
def kernels() -> Callable[[LayerView, float, int], CakeStatistics]:
    pytest.importorskip("triton", reason="triton is not installed")
    return device_statistics


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_kernels_equal_the_formulas(kernels, shape):
    assert_equals_rendering(make_view(**shape), worked=kernels)


@pytest.mark.parametrize("kept", [[40, 40], [100, 3], [0, 60], [0, 0]])
@pytest.mark.parametrize("sliding_window", [None, 50])
def test_kernels_take_rows_with_gaps_and_lengths_of_their_own(kernels, kept, sliding_window):
    view = with_gaps(make_view(n=200, sliding_window=sliding_window), kept)
    assert_equals_rendering(view, worked=kernels)


@pytest.mark.parametrize("group", range(1, 9))
def test_kernels_take_every_group_size_and_odd_lengths(kernels, group):
    view = make_view(heads=2 * group, kv_heads=2, n=60 + 2 * group + 1, rows=7, window=7)
    assert_equals_rendering(with_gaps(view, [2 * group - 1, 1]), worked=kernels)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_take_every_head_size_and_dtype(kernels, head_dim, dtype):
    view = as_any_order(make_view(heads=3, kv_heads=1, n=70, rows=5, head_dim=head_dim))
    view = replace(view, keys=view.keys.to(dtype), queries=view.queries.to(dtype))
    assert_equals_rendering(view, worked=kernels)


@pytest.mark.parametrize("rows", [16, 33, 70])
def test_kernels_take_windows_of_any_size(kernels, rows):
    assert_equals_rendering(make_view(heads=5, kv_heads=1, n=150, rows=rows, window=rows), worked=kernels)


def test_kernels_take_pieces_of_several_blocks_and_strided_keys(kernels, monkeypatch):
    from cake_infer.cache import device_statistics as launches

    monkeypatch.setattr(launches, "_PIECES", 2)
    view = make_view(n=190, head_dim=16)
    store = torch.full((2, 200, 16), math.nan)
    store[:, 5:195] = view.keys
    assert_equals_rendering(replace(view, keys=store[:, 5:195]), worked=kernels)


@pytest.mark.parametrize("kept", [None, [30, 3]])
def test_kernels_work_the_order_of_all_columns_before_they_wait(kernels, kept):
    view = make_view(n=100) if kept is None else with_gaps(make_view(n=100), kept)
    statistics = kernels(view, GAMMA, POOL)
    indicator, order = view.memo["order"]
    assert indicator is statistics.indicator is view.memo["numbers"]
    for head, length in enumerate(view.columns):
        scores, positions = indicator[head, :length].tolist(), view.positions[head, :length].tolist()
        in_window = [position >= view.window_start for position in positions]
        best = sorted(
            range(length), key=lambda i: (not in_window[i], 0.0 if in_window[i] else -scores[i], positions[i])
        )
        assert order[head, :length].tolist() == best
        assert (order[head, length:] == -1).all()


def test_kernels_do_not_say_that_scores_are_numbers_where_one_is_none(kernels):
    view = make_view(n=100)
    view.keys[1, 7] = math.nan
    statistics = kernels(view, GAMMA, POOL)
    assert "numbers" not in view.memo
    assert statistics.indicator.isnan().any()


def test_columns_that_are_known_to_be_in_order_are_pooled_as_they_are(kernels):
    view = make_view(n=100)
    known, asked = kernels(replace(view, ordered=True, memo={}), GAMMA, POOL), kernels(view, GAMMA, POOL)
    assert torch.equal(known.indicator, asked.indicator)


def test_kernels_give_exactly_0_for_identical_queries(kernels):
    view = make_view(n=120)
    view.queries[:] = view.queries[:, :1]
    view.keys[:, -8:] = -50 * view.queries[::2, :1]  # nothing of what the queries see differently has any weight
    statistics = kernels(view, GAMMA, POOL)
    assert statistics.shift == 0
    assert statistics.dispersion == pytest.approx(cake_statistics(view, GAMMA, POOL).dispersion, rel=1e-5)


def test_kernels_hold_no_array_of_all_queries_and_columns(kernels, monkeypatch):
    from cake_infer.cache import device_statistics as launches

    monkeypatch.setattr(launches, "_PIECES", 4)
    view = make_view(heads=8, kv_heads=2, n=500, rows=32, window=32)
    memory = _LiveMemory(large=1 << 30)
    memory.watch(view, kernels)
    assert 0 < memory.largest < 4 * 4 * 32 * 500 / 3, "a third of what one KV head's attention takes"
