"""Merging changes values alone, by the formula of each form, worked out here token by token in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from cake_infer.cache.config import CacheConfig
from cake_infer.cache.merges import cam, d2o
from cake_infer.cache.merges.base import Tokens
from cake_infer.cache.merges.cam import CamMerge
from cake_infer.cache.merges.d2o import D2OMerge
from cake_infer.cache.merges.none import NoMerge
from cake_infer.errors import OptionError

D = 6


def tokens(positions: list[int], seed: int, dtype: torch.dtype = torch.float32) -> Tokens:
    random = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, len(positions), D, generator=random).to(dtype)
    return Tokens(
        keys, values, torch.tensor(positions, dtype=torch.int32), torch.rand(len(positions), generator=random)
    )


def split(seed: int, kept: int, gone: int, dtype: torch.dtype = torch.float32) -> tuple[Tokens, Tokens]:
    """A text of which some tokens stay, in mixed order; the last two are the window, with infinite scores."""
    positions = torch.randperm(kept + gone - 2, generator=torch.Generator().manual_seed(seed)).tolist()
    stay = tokens([*positions[: kept - 2], kept + gone - 2, kept + gone - 1], seed, dtype)
    stay.scores[-2:] = math.inf
    return stay, tokens(positions[kept - 2 :], seed + 1, dtype)


def cam_by_the_formula(kept: Tokens, gone: Tokens, followers: int) -> np.ndarray:
    values = kept.values.double().numpy().copy()
    in_order = sorted(range(len(kept)), key=lambda i: int(kept.positions[i]))
    for i in range(len(gone)):
        after = [j for j in in_order if kept.positions[j] > gone.positions[i]][:followers]
        known = [float(kept.scores[j]) for j in after if math.isfinite(kept.scores[j])]
        if not known:
            continue
        p = min(1.0, max(0.0, float(gone.scores[i]) / np.mean(known)))
        for j in after:
            values[j] += p * gone.values[i].double().numpy() / len(after)
    return values


def d2o_by_the_formula(kept: Tokens, gone: Tokens, similarity: float | None) -> np.ndarray:
    k, e = kept.keys.double().numpy(), gone.keys.double().numpy()
    cosine = (e / np.linalg.norm(e, axis=1, keepdims=True)) @ (k / np.linalg.norm(k, axis=1, keepdims=True)).T
    u, target = cosine.max(1), cosine.argmax(1)
    least = u.mean() if similarity is None else similarity
    values, total = kept.values.double().numpy().copy(), np.ones(len(kept))
    for i in range(len(gone)):
        if u[i] >= least:
            value, own = gone.values[i].double().numpy(), kept.values[target[i]].double().numpy()
            w = max(u[i], 0) * np.linalg.norm(value) / (np.linalg.norm(value) + np.linalg.norm(own) + 1e-6)
            values[target[i]] += w * value
            total[target[i]] += w
    return values / total[:, None]


@pytest.mark.parametrize("followers", [1, 3, 32])
@pytest.mark.parametrize(("kept", "gone"), [(5, 1), (12, 40), (40, 12), (3, 30)])
def test_cam_spreads_a_value_over_the_kept_tokens_that_follow(
    kept: int, gone: int, followers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cam, "TILE", 7)
    for seed in range(5):
        stay, go = split(seed, kept, gone)
        keys, before = stay.keys.clone(), stay.values.clone()
        expected = cam_by_the_formula(stay, go, followers)
        CamMerge(followers).fold(stay, go)
        np.testing.assert_allclose(stay.values.numpy(), expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(stay.keys, keys)
        if kept > 3 and gone > 1:
            assert not torch.equal(stay.values, before)


def test_cam_with_one_follower_and_full_weight_adds_the_value_to_the_next_token() -> None:
    kept, gone = tokens([9, 3, 6], 0), tokens([4], 1)
    kept.scores[:] = 0.5
    before = kept.values.clone()
    CamMerge(1).fold(kept, Tokens(gone.keys, gone.values, gone.positions, torch.tensor([0.7])))
    torch.testing.assert_close(kept.values[2], before[2] + gone.values[0])
    assert torch.equal(kept.values[:2], before[:2])
    CamMerge(1).fold(kept, Tokens(gone.keys, gone.values, gone.positions, torch.tensor([0.0])))
    torch.testing.assert_close(kept.values[2], before[2] + gone.values[0])


@pytest.mark.parametrize("similarity", [None, 0.0, 0.4, -1.0])
@pytest.mark.parametrize(("kept", "gone"), [(5, 1), (12, 40), (40, 12)])
def test_d2o_takes_a_weighted_mean_with_the_tokens_of_similar_keys(
    kept: int, gone: int, similarity: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(d2o, "TILE_FLOATS", 5 * kept)
    for seed in range(5):
        stay, go = split(seed, kept, gone)
        keys, before = stay.keys.clone(), stay.values.clone()
        expected = d2o_by_the_formula(stay, go, similarity)
        D2OMerge(similarity).fold(stay, go)
        np.testing.assert_allclose(stay.values.numpy(), expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(stay.keys, keys)
        if gone > 1:
            assert not torch.equal(stay.values, before)


def test_a_similarity_above_1_drops_everything() -> None:
    kept, gone = split(0, 10, 20)
    before = kept.values.clone()
    D2OMerge(1.01).fold(kept, gone)
    assert torch.equal(kept.values, before)


@pytest.mark.parametrize("merge", [CamMerge(), D2OMerge(), NoMerge()])
def test_nothing_evicted_changes_nothing_and_nothing_kept_is_no_error(merge: CamMerge | D2OMerge | NoMerge) -> None:
    kept, none = tokens([1, 2, 3], 0), tokens([], 1)
    before = kept.values.clone()
    merge.fold(kept, none)
    assert torch.equal(kept.values, before)
    merge.fold(none, kept)
    assert torch.equal(kept.values, before)


@pytest.mark.parametrize("merge", [CamMerge(4), D2OMerge()])
def test_columns_of_a_staged_layer_and_narrow_rows_give_the_same(merge: CamMerge | D2OMerge) -> None:
    stay, go = split(3, 10, 20)
    narrow = Tokens(stay.keys.bfloat16(), stay.values.bfloat16(), stay.positions, stay.scores)
    whole = tokens([0] * 50, 9)
    columns = torch.randperm(50, generator=torch.Generator().manual_seed(1))[:20]
    for name in ("keys", "values", "positions", "scores"):
        getattr(whole, name)[columns] = getattr(go, name)
    merge.fold(narrow, Tokens(whole.keys, whole.values, whole.positions, whole.scores, columns))
    merge.fold(stay, go)
    assert narrow.values.dtype == torch.bfloat16
    torch.testing.assert_close(narrow.values.float(), stay.values, rtol=2**-5, atol=2**-5)


def test_merging_is_chosen_by_name_with_its_options() -> None:
    choice = CacheConfig(merge="cam", policy_options={"followers": 8}).choice
    assert choice is not None
    assert (choice.merge.name, choice.options["merge"]) == ("cam", {"followers": 8})
    with pytest.raises(OptionError, match="unknown merge 'mix': choose one of none, cam, d2o"):
        CacheConfig(merge="mix")
    with pytest.raises(OptionError, match="merge has no effect with the policy full"):
        CacheConfig(policy="full", merge="cam")
