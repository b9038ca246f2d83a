"""Budgets are read as written, refused with the minimum, and dealt exactly and without anybody's share growing."""

from __future__ import annotations

import heapq
import math
import random
import time
from collections.abc import Callable, Sequence

import pytest
from cake_infer.cache import budget
from cake_infer.cache.budget import Budget, check_budget, deal_seats, parse_bytes, size_text
from cake_infer.errors import BudgetError

Deal = Callable[[Sequence[float], Sequence[int], int], list[int]]


def naive_heap(preferences: Sequence[float], caps: Sequence[int], seats: int) -> list[int]:
    """Every seat dealt one by one: positive preferences first, then the others alike."""
    dealt = [0] * len(caps)
    for layers, weight in (
        ([i for i, p in enumerate(preferences) if p > 0], lambda i: preferences[i]),
        ([i for i, p in enumerate(preferences) if p == 0], lambda i: 1.0),
    ):
        heap = [(-weight(i) / 0.5, i) for i in layers if caps[i] > 0]
        heapq.heapify(heap)
        while heap and sum(dealt) < seats:
            _, i = heapq.heappop(heap)
            dealt[i] += 1
            if dealt[i] < caps[i]:
                heapq.heappush(heap, (-weight(i) / (dealt[i] + 0.5), i))
    return dealt


def largest_remainder(preferences: Sequence[float], caps: Sequence[int], seats: int) -> list[int]:
    """The obvious rounding, which lets shares grow: here to show that the tests below would notice it."""
    total = sum(preferences)
    if total == 0:
        return naive_heap(preferences, caps, seats)
    shares = [min(cap, seats * p / total) for p, cap in zip(preferences, caps, strict=True)]
    dealt = [int(share) for share in shares]
    for i in sorted(range(len(shares)), key=lambda i: (dealt[i] - shares[i], i))[: seats - sum(dealt)]:
        dealt[i] += dealt[i] < caps[i]
    return dealt


def random_case(rng: random.Random, most_layers: int = 10, most_seats: int = 80) -> tuple[list[float], list[int], int]:
    """Preferences of every kind (spread, tied, zero, extreme), caps that bind or not, few or many seats."""
    layers = rng.randint(1, most_layers)
    kind = rng.randrange(5)
    draw: list[Callable[[], float]] = [
        lambda: rng.lognormvariate(0, 1.5),
        lambda: float(rng.randint(0, 3)),
        lambda: rng.choice([0.0, rng.random()]),
        lambda: 10.0 ** rng.uniform(-300, 300),
        lambda: 1 + rng.random() * 1e-15,
    ]
    preferences = [draw[kind]() for _ in range(layers)]
    largest_cap = rng.choice([1, 5, most_seats, 10 * most_seats])
    caps = [rng.randint(0, largest_cap) if rng.random() < 0.7 else largest_cap for _ in range(layers)]
    return preferences, caps, rng.choice([rng.randint(0, 5), rng.randint(0, most_seats)])


def growths(deal: Deal, cases: int) -> int:
    """How often a layer's share grows in `cases` random prompts while layers arrive one by one."""
    rng = random.Random(7)
    count = 0
    for _ in range(cases):
        preferences, caps, seats = random_case(rng)
        before: list[int] = []
        for seen in range(1, len(caps) + 1):
            dealt = deal(preferences[:seen], caps[:seen], seats)
            count += any(new > old for old, new in zip(before, dealt, strict=False))
            before = dealt
    return count


def test_seats_equal_those_of_a_plain_heap_and_sum_exactly_in_10000_cases() -> None:
    rng = random.Random(1)
    for _ in range(10_000):
        preferences, caps, seats = random_case(rng)
        dealt = deal_seats(preferences, caps, seats)
        assert dealt == naive_heap(preferences, caps, seats), (preferences, caps, seats)
        assert sum(dealt) == min(seats, sum(caps))
        assert all(0 <= share <= cap for share, cap in zip(dealt, caps, strict=True))


def test_seats_equal_those_of_a_plain_heap_at_the_size_of_real_models() -> None:
    rng = random.Random(2)
    for _ in range(40):
        preferences, caps, seats = random_case(rng, most_layers=48, most_seats=6000)
        assert deal_seats(preferences, caps, seats) == naive_heap(preferences, caps, seats)


def test_the_answer_does_not_depend_on_the_first_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(9)

    def guess(weights: list[float], caps: list[int], seats: int) -> list[int]:
        return [rng.randint(0, cap) for cap in caps]

    monkeypatch.setattr(budget, "_water_level", guess)
    for _ in range(1000):
        preferences, caps, seats = random_case(rng)
        assert deal_seats(preferences, caps, seats) == naive_heap(preferences, caps, seats)


def test_no_share_grows_when_a_layer_is_added_in_10000_cases() -> None:
    assert growths(deal_seats, 10_000) == 0


def test_the_growth_test_would_catch_largest_remainder_rounding() -> None:
    assert growths(largest_remainder, 300) > 0


@pytest.mark.parametrize(
    ("preferences", "caps", "seats", "expected"),
    [
        ([3.0, 1.0], [100, 100], 8, [6, 2]),
        ([1.0, 1.0, 1.0], [9, 9, 9], 4, [2, 1, 1]),  # ties to the lower layer
        ([1.0, 1.0, 1.0], [9, 9, 9], 2, [1, 1, 0]),
        ([9.0, 1.0], [3, 100], 20, [3, 17]),  # what a cap cuts off goes to the others
        ([1.0, 0.0, 0.0], [4, 9, 9], 9, [4, 3, 2]),  # preference 0 comes last and shares equally
        ([1.0, 0.0], [4, 9], 3, [3, 0]),
        ([0.0, 0.0, 0.0], [9, 9, 9], 6, [2, 2, 2]),
        ([0.0, 0.0, 0.0], [1, 9, 9], 8, [1, 4, 3]),
        ([1.0, 1e-6, 0.0], [50, 50, 50], 0, [0, 0, 0]),
        ([1.0, 1e-6, 0.0], [50, 50, 50], 60, [50, 10, 0]),
        ([1.0, 2.0], [3, 4], 100, [3, 4]),
        ([1e308, 1e308, 5e-324], [5, 5, 5], 12, [5, 5, 2]),
        ([], [], 5, []),
    ],
)
def test_seats_of_small_cases_by_hand(
    preferences: list[float], caps: list[int], seats: int, expected: list[int]
) -> None:
    assert deal_seats(preferences, caps, seats) == expected


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, -1e-9])
def test_preferences_that_are_not_finite_or_negative_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        deal_seats([1.0, bad], [5, 5], 4)


def test_negative_seats_or_caps_and_unequal_lengths_are_refused() -> None:
    for arguments in (([1.0], [5], -1), ([1.0], [-5], 1), ([1.0], [5, 5], 1)):
        with pytest.raises(ValueError, match=r"negative|preferences for"):
            deal_seats(*arguments)


def test_dealing_a_million_seats_does_not_take_time_per_seat() -> None:
    rng = random.Random(3)
    preferences = [rng.lognormvariate(0, 2) for _ in range(80)]
    start = time.process_time()
    dealt = deal_seats(preferences, [10**6] * 80, 10**6)
    assert sum(dealt) == 10**6
    total = sum(preferences)
    assert all(abs(share - 10**6 * p / total) < 2 for share, p in zip(dealt, preferences, strict=True))
    # Small layers beside large ones that fill up early.
    preferences = [10.0**power for power in range(0, -320, -4)]
    dealt = deal_seats(preferences, [20_000] * 80, 10**6)
    assert time.process_time() - start < 0.5  # a heap of single seats needs seconds
    assert dealt[:45] == [20_000] * 45
    assert sum(dealt) == 10**6


@pytest.mark.parametrize("value", [1024, "1024", " 1024 ", Budget(count=1024)])
def test_a_number_is_tokens_whatever_the_prompt(value: str | int | Budget) -> None:
    assert Budget.parse(value).tokens(10) == 1024
    assert Budget.parse(value).tokens(100_000) == 1024


@pytest.mark.parametrize(
    ("text", "prompt", "tokens"),
    [("3.2%", 10_000, 320), ("3.2 %", 1000, 32), ("7%", 100, 7), ("50%", 3, 2), (".5%", 10, 1), ("200%", 50, 100)],
)
def test_a_percentage_is_of_the_prompt_rounded_up(text: str, prompt: int, tokens: int) -> None:
    assert Budget.parse(text).tokens(prompt) == tokens


@pytest.mark.parametrize(
    "value", [0, -1, "0", "-5", "abc", "", "0%", "-3%", "%", "1e3", "nan%", "inf", "1_024", "12 34", "3.5", True, 10.0]
)
def test_other_budgets_are_refused(value: object) -> None:
    with pytest.raises(BudgetError, match=r"1024|3\.2%"):
        Budget.parse(value)  # type: ignore[arg-type]


def test_a_size_in_bytes_is_sent_to_its_own_option() -> None:
    with pytest.raises(BudgetError, match="the option kv_memory"):
        Budget.parse("512MiB")


def test_a_budget_prints_as_it_was_written() -> None:
    assert [str(Budget.parse(value)) for value in (64, "3.2%", "50.0 %")] == ["64", "3.2%", "50%"]


def test_a_budget_below_the_window_states_the_minimum() -> None:
    assert check_budget(32, 32) == 32
    with pytest.raises(BudgetError, match=r"31 tokens is below the window.*minimum is 32"):
        check_budget(31, 32)


@pytest.mark.parametrize(
    ("value", "size"),
    [
        ("512MiB", 512 * 2**20),
        ("1.5GB", 1_500_000_000),
        ("2g", 2 * 2**30),
        ("2 G", 2 * 2**30),
        ("100", 100),
        (4096, 4096),
        ("7b", 7),
        ("1kb", 1000),
        ("1KiB", 1024),
        (".5m", 2**19),
        ("1TiB", 2**40),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_sizes_in_bytes(value: str | int, size: int) -> None:
    assert parse_bytes(value) == size


@pytest.mark.parametrize("value", [0, -1, "0", "0MiB", "-5MB", "abc", "", "5XB", "1e9", "12%", "0.2b", None, True, 1.5])
def test_other_sizes_are_refused(value: object) -> None:
    with pytest.raises(BudgetError, match="512MiB"):
        parse_bytes(value)  # type: ignore[arg-type]


def test_a_percentage_is_raised_to_the_window_and_says_so_but_a_number_is_refused() -> None:
    share = Budget.parse("3.2%")
    assert share.tokens(20, 32) == share.tokens(1000, 32) == 32
    assert share.tokens(1001, 32) == 33
    notice = share.raised(20, 32)
    assert notice is not None
    assert "3.2% of 20 tokens" in notice
    assert "32 tokens per layer" in notice
    assert share.raised(1000, 32) is None
    assert Budget(count=8).raised(20, 32) is None
    with pytest.raises(BudgetError, match="minimum is 32"):
        Budget(count=8).tokens(1000, 32)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 KiB"),
        (700, "700 bytes"),
        (10 * 1024, "10 KiB"),
        (2**20 - 1, "1,024 KiB"),
        (3 * 2**19, "1.5 MiB"),
        (5 * 2**29, "2.50 GiB"),
    ],
)
def test_a_size_is_written_in_the_unit_that_shows_it(count: int, text: str) -> None:
    assert size_text(count) == text
