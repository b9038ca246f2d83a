"""Packed keys and values against a rendering in numpy, float64, number by number."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cake_infer.cache.quantise import (
    KV_BITS,
    code_bytes,
    pack_keys,
    pack_values,
    value_groups,
    widen_keys,
    widen_values,
)

G = 32


def render(group: np.ndarray, bits: int) -> tuple[np.ndarray, float, float]:
    """Codes, scale and minimum of one group of numbers."""
    levels = 2**bits - 1
    minimum = np.float64(np.float16(np.clip(group.min(), -65504, 65504)))
    scale = np.float64(np.float16(np.clip((group.max() - minimum) / levels, 0, 65504)))
    if scale == 0:
        return np.zeros(len(group)), scale, minimum
    return np.clip(np.round((group - minimum) / scale), 0, levels), scale, minimum


def code(table: torch.Tensor, slot: int, channel: int, bits: int) -> int:
    """One code, found in the bytes by the documented rule."""
    return int(table[slot, channel * bits // 8]) >> (channel * bits % 8) & (2**bits - 1)


def made(n: int, dim: int, seed: int = 0) -> torch.Tensor:
    random = np.random.default_rng(seed)
    spread = random.lognormal(size=(1, dim)) * 3
    return torch.from_numpy(random.normal(size=(n, dim)) * spread + random.normal(size=(1, dim)) * 20).float()


@pytest.mark.parametrize("bits", KV_BITS)
@pytest.mark.parametrize(("n", "dim"), [(64, 64), (33, 32), (70, 8), (1, 40), (31, 96), (32, 6)])
def test_every_code_scale_and_minimum_is_that_of_the_formula(bits, n, dim):
    keys, values = made(n, dim), made(n, dim, seed=1)
    key_codes, key_scale, key_minimum = pack_keys(keys, bits)
    value_codes, value_scale, value_minimum = pack_values(values, bits)
    slots = -(-n // G) * G
    assert key_codes.shape == (slots, code_bytes(dim, bits))
    assert key_scale.shape == (slots // G, dim)
    assert value_codes.shape == (n, code_bytes(dim, bits))
    assert value_scale.shape == (n, value_groups(dim))
    wide = G if dim % G == 0 else dim
    assert value_groups(dim) == dim // wide
    wide_keys, wide_values = np.zeros((n, dim)), np.zeros((n, dim))
    for start in range(0, n, G):
        for channel in range(dim):
            codes, scale, minimum = render(keys[start : start + G, channel].double().numpy(), bits)
            assert (key_scale[start // G, channel], key_minimum[start // G, channel]) == (scale, minimum)
            stored = [code(key_codes, start + i, channel, bits) for i in range(len(codes))]
            assert np.abs(np.array(stored) - codes).max() <= 1  # half-way cases fall either way in fp32
            wide_keys[start : start + G, channel] = minimum + scale * np.array(stored)
    for slot in range(n):
        for start in range(0, dim, wide):
            codes, scale, minimum = render(values[slot, start : start + wide].double().numpy(), bits)
            assert (value_scale[slot, start // wide], value_minimum[slot, start // wide]) == (scale, minimum)
            stored = [code(value_codes, slot, start + i, bits) for i in range(wide)]
            assert np.abs(np.array(stored) - codes).max() <= 1
            wide_values[slot, start : start + wide] = minimum + scale * np.array(stored)
    found = torch.full((n, dim), float("nan"))
    widen_keys(found, key_codes, key_scale, key_minimum, bits)
    np.testing.assert_allclose(found, wide_keys, rtol=1e-6, atol=1e-5)
    widen_values(found, value_codes, value_scale, value_minimum, bits)
    np.testing.assert_allclose(found, wide_values, rtol=1e-6, atol=1e-5)
    # half a step, and what fp16 rounds off scale and minimum
    for exact, wide_numbers in ((keys, wide_keys), (values, wide_values)):
        bound = (exact.max() - exact.min()) / (2**bits - 1) / 2 + exact.abs().max() / 1000
        assert np.abs(exact.double().numpy() - wide_numbers).max() <= bound.item()


@pytest.mark.parametrize("bits", KV_BITS)
def test_groups_that_are_constant_tiny_or_huge_stay_close_to_what_they_were(bits):
    for numbers, tolerance in (
        (torch.full((G, 4), 3.1415), 1e-5),
        (torch.zeros(G, 4), 0.0),
        (torch.linspace(-1e-9, 1e-9, G)[:, None].expand(G, 4), 1e-9),
        (torch.full((G, 4), 1e5), 1e5 * 1e-3),  # beyond fp16
        (torch.linspace(-4e5, 4e5, G)[:, None].expand(G, 4), 4e5),  # as far as scale and minimum reach
        (torch.full((G, 4), -300.25), 1e-5),
    ):
        for pack, widen in ((pack_keys, widen_keys), (pack_values, widen_values)):
            out = torch.full((G, 4), float("nan"))
            codes, scale, minimum = pack(numbers.contiguous(), bits)
            assert scale.isfinite().all()
            assert minimum.isfinite().all()
            widen(out, codes, scale, minimum, bits)
            assert (out - numbers).abs().max() <= tolerance


@pytest.mark.parametrize("bits", KV_BITS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_is_not_hidden_and_spoils_its_own_group_only(bits, bad):
    keys = made(2 * G, 4)
    keys[G + 3, 1] = bad
    codes, scale, minimum = pack_keys(keys, bits)
    out = torch.empty_like(keys)
    widen_keys(out, codes, scale, minimum, bits)
    spoilt = torch.zeros_like(keys, dtype=torch.bool)
    spoilt[G:, 1] = True
    assert torch.equal(out.isnan(), spoilt)


def test_slots_behind_the_last_one_do_not_move_the_scale_of_its_group():
    keys = made(40, 8)
    codes, scale, minimum = pack_keys(keys, 4)
    again, same_scale, same_minimum = pack_keys(keys[G:], 4)
    assert torch.equal(codes[G:40], again[:8])
    assert torch.equal(scale[1:], same_scale)
    assert torch.equal(minimum[1:], same_minimum)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes_are_packed_as_their_fp32_numbers_and_written_rounded(dtype):
    keys = made(G, 16).to(dtype)
    for found, wanted in zip(pack_keys(keys, 4), pack_keys(keys.float(), 4), strict=True):
        assert torch.equal(found, wanted)
    exact, rounded = torch.empty(G, 16), torch.empty(G, 16, dtype=dtype)
    for out in (exact, rounded):
        widen_keys(out, *pack_keys(keys, 4), 4)
    assert torch.equal(exact.to(dtype), rounded)


@pytest.mark.parametrize("bits", KV_BITS)
def test_numbers_that_lie_on_the_levels_are_kept_exactly(bits):
    levels = torch.arange(2**bits).float() * 0.25 - 8.0
    keys = levels[torch.randint(0, 2**bits, (G, 6), generator=torch.Generator().manual_seed(0))]
    keys[0], keys[1] = levels[0], levels[-1]
    out = torch.empty_like(keys)
    widen_keys(out, *pack_keys(keys, bits), bits)
    assert torch.equal(out, keys)
