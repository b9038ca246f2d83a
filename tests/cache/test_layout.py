"""An arena is as large as the formulas say: kept budget plus one layer, never the layers times the prompt."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from cake_infer.cache.layout import (
    ALIGNMENT,
    ArenaLayout,
    ArenaSize,
    arena_bytes,
    arena_size,
    budget_within,
    kv_bytes,
    largest_budget,
    table_slots,
)
from cake_infer.errors import BudgetError

L, K, D = 3, 2, 8
LAYOUT = ArenaLayout(L, K, D, torch.float32, torch.float32)
HALF = ArenaLayout(L, K, D, torch.bfloat16, torch.float32)
SLOT = 2 * D * 4 + 8  # a key, a value, a position and a score


@pytest.mark.parametrize(("budget", "tokens", "new"), list(product([1, 10, 99, 100, 101], [3, 100], [1, 20, 500])))
def test_one_shot_grow_takes_the_kept_budget_and_the_larger_of_one_layer_and_the_reply(budget, tokens, new):
    size = arena_size(LAYOUT, budget=budget, tokens=tokens, new_tokens=new)
    assert table_slots(size) == K * (L * min(budget, tokens) + max(tokens, L * new))
    # Staging begins at a multiple of the alignment: the only bytes beyond the slots.
    assert 0 <= arena_bytes(LAYOUT, size) - table_slots(size) * SLOT < 2 * ALIGNMENT


@pytest.mark.parametrize(("budget", "tokens", "new"), list(product([1, 10, 50], [60, 1000], [1, 20, 10**6])))
def test_hold_takes_the_kept_budget_and_one_layer_however_long_the_reply(budget, tokens, new):
    size = arena_size(LAYOUT, budget=budget, tokens=tokens, new_tokens=new, hold=True)
    assert table_slots(size) == K * (L * min(budget, tokens) + tokens)


@pytest.mark.parametrize(("tokens", "new"), list(product([1, 40], [1, 7, 1000])))
def test_hold_below_its_budget_has_room_to_grow_up_to_it_and_for_one_newcomer_a_row(tokens, new):
    size = arena_size(LAYOUT, budget=50, tokens=tokens, new_tokens=new, hold=True)
    assert size.decode == K * L * (min(50, tokens + new) + 1)


def test_without_a_budget_everything_is_kept():
    size = arena_size(LAYOUT, budget=None, tokens=100, new_tokens=20)
    assert size == ArenaSize(kept=K * L * 100, staging=K * 100, decode=K * L * 120)


@pytest.mark.parametrize(("held", "tokens", "new"), list(product([[10, 10, 10], [1, 27, 2]], [1, 500], [1, 300])))
def test_a_continued_piece_is_read_beside_what_is_held(held, tokens, new):
    size = arena_size(LAYOUT, budget=10, tokens=tokens, new_tokens=new, held=K * sum(held), held_longest=max(held))
    kept = min(sum(held) + L * tokens, L * 10)
    assert table_slots(size) == K * max(kept + sum(held) + max(held) + tokens, kept + L * new)
    assert table_slots(size) <= K * (L * 10 + sum(held) + max(max(held) + tokens, L * new))


def test_kept_rows_are_as_wide_as_the_kv_dtype_and_staging_as_the_compute_dtype():
    size = arena_size(HALF, budget=16, tokens=1000, new_tokens=1)
    assert kv_bytes(HALF, size) == K * (L * 16 * D * 2 + 1000 * D * 4)
    assert arena_bytes(HALF, size) == 2 * kv_bytes(HALF, size) + 8 * K * (L * 16 + 1000)
    assert HALF.kept_slot_bytes == 2 * D * 2 + 8


def test_a_size_covers_another_if_bytes_and_bookkeeping_both_do():
    wide, many = ArenaSize(0, 100, 0), ArenaSize(0, 0, 150)  # 100 fp32 slots, 150 of two bytes
    assert kv_bytes(HALF, wide) > kv_bytes(HALF, many)
    assert not wide.covers(many, HALF), "it has the bytes, but not 150 positions"
    assert not many.covers(wide, HALF)
    assert ArenaSize(100, 100, 0).covers(wide, HALF)


@pytest.mark.parametrize("layout", [LAYOUT, HALF])
@pytest.mark.parametrize(("tokens", "new", "hold"), [(1000, 1, False), (1000, 200, False), (1000, 9, True)])
def test_the_budget_that_fits_a_memory_is_the_largest_one(layout, tokens, new, hold):
    for limit in (150_000, 200_001, 300_000):
        found = budget_within(layout, limit, tokens=tokens, new_tokens=new, hold=hold, window=8)

        def need(budget):
            return arena_bytes(layout, arena_size(layout, budget=budget, tokens=tokens, new_tokens=new, hold=hold))

        assert need(found) <= limit < need(found + 1)
        assert 8 < found < tokens


def test_a_memory_for_everything_gives_a_budget_that_never_evicts():
    assert budget_within(LAYOUT, 1 << 30, tokens=100, new_tokens=20, window=8) >= 120


def test_a_memory_that_is_too_small_is_refused_with_what_the_least_budget_takes():
    least = arena_bytes(LAYOUT, arena_size(LAYOUT, budget=32, tokens=20_000, new_tokens=64))
    assert budget_within(LAYOUT, least, tokens=20_000, new_tokens=64, window=32) == 32
    with pytest.raises(BudgetError, match=rf"{least / 2**20:,.1f} MiB with the smallest budget of 32 tokens"):
        budget_within(LAYOUT, least - 1, tokens=20_000, new_tokens=64, window=32)


@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize("limit", [150_000, 400_000])
def test_the_budget_of_a_conversation_leaves_room_to_read_a_turn_beside_what_is_held(limit, hold):
    found = budget_within(LAYOUT, limit, tokens=20, new_tokens=16, hold=hold, window=8, context=4096)

    def need(budget):
        held = budget if hold else budget + 16
        return arena_bytes(
            LAYOUT,
            arena_size(
                LAYOUT, budget=budget, tokens=20, new_tokens=16, hold=hold, held=K * L * held, held_longest=held
            ),
        )

    assert need(found) <= limit < need(found + 1)
    assert 50 < found < 4096


def test_the_budget_of_a_conversation_is_never_more_than_its_context():
    assert budget_within(LAYOUT, 1 << 30, tokens=20, new_tokens=16, window=8, context=4096) == 4096


def test_the_largest_budget_that_fits_is_found_and_the_least_one_given_if_none_does():
    for border in range(3, 12):
        assert largest_budget(4, 10, lambda budget, border=border: budget <= border) == min(max(border, 4), 10)


@pytest.mark.parametrize(("limit", "said"), [(10 * 1024, "10 KiB"), (300, "300 bytes"), (3 << 19, "1.5 MiB")])
def test_a_memory_that_is_too_small_is_named_in_a_unit_that_shows_it(limit, said):
    with pytest.raises(BudgetError, match=rf"^a KV memory of {said} is too small.*at least [1-9][\d,.]* (KiB|MiB)"):
        budget_within(LAYOUT, limit, tokens=100_000, new_tokens=20, window=8)
