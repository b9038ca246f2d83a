"""How many tokens a cache may keep: reading budgets and dealing seats over layers. No torch here."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import accumulate

from ..errors import BudgetError
from ..ranges import POSITIVE, SIZE, Range, shown

DEFAULT_BUDGET = 1024
MOST_SIZE = "1,048,576 TiB"
MOST_DIGITS = 30  # of a whole number that is worth reading
PERCENT = Range(0, 1_000_000, float, above=True)

_LEAST_WEIGHT = 1e-290  # relative to the largest: what is below this cannot be divided by without overflow
_TOKENS = re.compile(r"[0-9]+")
_PERCENT = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)\s*%")
_BYTES = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)\s*([a-z]*)", re.IGNORECASE)
_UNITS = {"": 1, "b": 1} | {
    name: base**power
    for power, letter in enumerate("kmgt", start=1)
    for name, base in ((letter, 1024), (letter + "ib", 1024), (letter + "b", 1000))
}


@dataclass(frozen=True)
class Budget:
    """Tokens per layer and KV head on average, window included: a fixed number, or a percentage of the first prompt.

    Exactly one of `count` (tokens) and `percent` is set. More than 100% is allowed: it leaves room for later turns.
    """

    count: int | None = None
    percent: float | None = None

    def __post_init__(self) -> None:
        if (self.count is None) == (self.percent is None):
            raise BudgetError(
                "a budget is either a number of tokens or a percentage of the prompt, not both or neither"
            )
        if self.count is not None and not POSITIVE.has(self.count):
            raise BudgetError(f"a budget in tokens {POSITIVE.refusal(self.count)}: give at least the window, e.g. 1024")
        if self.percent is not None and not PERCENT.has(self.percent):
            raise BudgetError(f"a budget in percent of the prompt {PERCENT.refusal(self.percent)}: give e.g. 3.2%")

    @classmethod
    def parse(cls, value: str | int | Budget) -> Budget:
        """Read `1024`, `"1024"` (tokens) or `"3.2%"` (of the first prompt). Raises `BudgetError` for anything else."""
        if isinstance(value, Budget):
            return value
        if isinstance(value, int) and not isinstance(value, bool):
            return cls(count=value)
        text = value.strip() if isinstance(value, str) else ""
        if _TOKENS.fullmatch(text):
            if len(text.lstrip("0")) > MOST_DIGITS:
                raise BudgetError(f"a budget in tokens {POSITIVE.refusal(text)}: give at least the window, e.g. 1024")
            return cls(count=int(text.lstrip("0") or "0"))
        if match := _PERCENT.fullmatch(text):
            return cls(percent=float(match[1]))
        hint = "give tokens (1024) or a percentage of the prompt (3.2%)"
        if (match := _BYTES.fullmatch(text)) and match[2].lower() in _UNITS and match[2]:
            hint += "; a size in bytes goes to the option kv_memory"
        raise BudgetError(f"cannot read the budget {shown(value)}: {hint}")

    def tokens(self, prompt_tokens: int, window: int = 1) -> int:
        """The budget in tokens for a first prompt of `prompt_tokens`; a percentage is rounded up, to `window` at least.

        Raises BudgetError for a number of tokens below the window. Nobody can know how short a prompt will be, so that
        a percentage is raised instead.
        """
        if self.count is not None:
            return check_budget(self.count, window)
        assert self.percent is not None
        # 7% of 100 is 7.000000000000001 in floating point, and is meant to be 7.
        return max(1, window, math.ceil(round(prompt_tokens * self.percent / 100, 6)))

    def raised(self, prompt_tokens: int, window: int) -> str | None:
        """What to tell the user where `tokens` raises a percentage to the window; None where it does not."""
        if self.percent is None or self.tokens(prompt_tokens) >= window:
            return None
        return (
            f"{self} of {prompt_tokens:,} tokens is less than the window that is always kept: the budget is the "
            f"window, {window:,} tokens per layer and KV head"
        )

    def describe(self) -> str:
        """In words."""
        return f"{self} of the first prompt" if self.count is None else f"{self.count:,} tokens per layer and KV head"

    def __str__(self) -> str:
        return str(self.count) if self.percent is None else f"{self.percent:g}%"


def check_budget(tokens: int, window: int) -> int:
    """Return `tokens`, or raise a `BudgetError` that states the minimum if it is below the window."""
    if tokens < window:
        raise BudgetError(
            f"a budget of {tokens} tokens is below the window of {window} tokens that are always kept: "
            f"the minimum is {window}"
        )
    return tokens


def parse_bytes(value: str | int) -> int:
    """Bytes in `"512MiB"`, `"1.5GB"`, `"2g"` or a plain number.

    KB, MB, GB, TB are powers of 1000; KiB .. TiB and the single letters k, m, g, t are powers of 1024. Case does not
    matter. Raises `BudgetError` for anything else, and for sizes below one byte or above `MOST_SIZE`.
    """
    size: float = -1
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str) and (match := _BYTES.fullmatch(value.strip())) and match[2].lower() in _UNITS:
        unit = _UNITS[match[2].lower()]
        size = (
            int(match[1].lstrip("0")[: MOST_DIGITS + 1] or "0") * unit if match[1].isdigit() else float(match[1]) * unit
        )
    if size < 0:
        raise BudgetError(f"cannot read the size {shown(value)}: give bytes with a unit, e.g. 512MiB or 1.5GB")
    if not SIZE.least <= size <= SIZE.most:
        raise BudgetError(f"a size must be between 1 byte and {MOST_SIZE}, not {shown(value)}: give e.g. 512MiB")
    return int(size)


def size_text(count: int) -> str:
    """`512 bytes`, `812 KiB`, `31.4 MiB`, `14.50 GiB`."""
    if count < 1 << 10:
        return f"{count} bytes" if count else "0 KiB"
    if count < 1 << 20:
        return f"{count / (1 << 10):,.0f} KiB"
    return f"{count / (1 << 20):,.1f} MiB" if count < 1 << 30 else f"{count / (1 << 30):,.2f} GiB"


def deal_seats(preferences: Sequence[float], caps: Sequence[int], seats: int) -> list[int]:
    """Deal `seats` over layers by a divisor method (Webster's) with caps; returns the seats of each layer.

    Seat `j` (1, 2, ...) of layer `l` has priority `preferences[l] / (j - 1/2)` in float64; the best seats with
    `j <= caps[l]` win, ties to the lower layer. Layers with preference 0 come after all others and share equally.
    The result sums to `min(seats, sum(caps))`. Because the winners are the best of one totally ordered set of
    candidates, a further layer only adds candidates and nobody else's share can grow.

    Cost: O(L log L) plus a heap step for each seat by which rounded water-filling misses the answer (at most about L).
    Raises ValueError for negative or non-finite preferences, negative caps or seats, and unequal lengths.
    """
    if len(preferences) != len(caps):
        raise ValueError(f"{len(preferences)} preferences for {len(caps)} caps")
    if seats < 0 or any(cap < 0 for cap in caps):
        raise ValueError("seats and caps must not be negative")
    if any(not (math.isfinite(p) and p >= 0) for p in preferences):
        raise ValueError(f"preferences must be finite and not negative: {list(preferences)}")
    dealt = [0] * len(caps)
    for preferred in (True, False):
        group = [layer for layer, p in enumerate(preferences) if (p > 0) == preferred and caps[layer] > 0]
        weights = [float(preferences[layer]) if preferred else 1.0 for layer in group]
        shares = _deal_group(weights, [caps[layer] for layer in group], seats)
        for layer, share in zip(group, shares, strict=True):
            dealt[layer] = share
        seats -= sum(shares)
    return dealt


def _deal_group(weights: list[float], caps: list[int], seats: int) -> list[int]:
    """`deal_seats` for weights that are all positive: a rounded water level first, then single seats until exact."""
    if seats >= sum(caps):
        return list(caps)
    if seats == 0:
        return [0] * len(caps)
    counts = _water_level(weights, caps, seats)
    excess = sum(counts) - seats
    # Candidates in order of priority: (-priority, layer). `best` holds each layer's next seat, `worst` its last one.
    best = [(-weights[i] / (count + 0.5), i) for i, count in enumerate(counts) if count < caps[i]]
    worst = [(weights[i] / (count - 0.5), -i) for i, count in enumerate(counts) if count > 0]
    heapify(best)
    heapify(worst)

    def move(index: int, step: int) -> None:
        counts[index] += step
        count = counts[index]
        if count < caps[index]:
            heappush(best, (-weights[index] / (count + 0.5), index))
        if count > 0:
            heappush(worst, (weights[index] / (count - 0.5), -index))

    def is_next(entry: tuple[float, int]) -> bool:
        priority, index = entry
        return counts[index] < caps[index] and -priority == weights[index] / (counts[index] + 0.5)

    def is_last(entry: tuple[float, int]) -> bool:
        priority, index = entry[0], -entry[1]
        return counts[index] > 0 and priority == weights[index] / (counts[index] - 0.5)

    while True:
        # Entries that a later move made stale are dropped when they surface.
        while best and not is_next(best[0]):
            heappop(best)
        while worst and not is_last(worst[0]):
            heappop(worst)
        if excess < 0:
            move(heappop(best)[1], 1)
            excess += 1
        elif excess > 0:
            move(-heappop(worst)[1], -1)
            excess -= 1
        elif best and worst and best[0] < (-worst[0][0], -worst[0][1]):
            # A seat that is not taken beats one that is: only where rounding misled the water level.
            gain, loss = heappop(best)[1], -heappop(worst)[1]
            move(gain, 1)
            move(loss, -1)
        else:
            return counts


def _water_level(weights: list[float], caps: list[int], seats: int) -> list[int]:
    """Nearly the answer: `min(cap, weight / level)` rounded, with the level at which these sum to `seats`."""
    largest = max(weights)
    scaled = [weight / largest for weight in weights]
    # Layers fill up in the order of cap / weight as the water rises. Sums from the end, so that the weights of small
    # layers do not vanish beside a large one that fills up early.
    order = sorted(range(len(caps)), key=lambda i: caps[i] / scaled[i] if scaled[i] else math.inf)
    weights_left = list(accumulate(scaled[i] for i in reversed(order)))[::-1]
    remaining, per_weight = float(seats), 0.0
    for index, weight_left in zip(order, weights_left, strict=True):
        per_weight = remaining / max(weight_left, _LEAST_WEIGHT)
        if caps[index] >= per_weight * scaled[index]:
            break
        remaining -= caps[index]
    return [int(min(cap, share * per_weight + 0.5)) for cap, share in zip(caps, scaled, strict=True)]
