"""How large an arena is: what one slot takes, how many slots a run needs, and the bytes of both regions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from ..errors import BudgetError
from .budget import size_text
from .quantise import GROUP, code_bytes, value_groups, whole_groups

# the longest row of a text that is read in pieces, in budgets, as far as an arena is made for it beforehand
LONGEST_ROW = 4
ALIGNMENT = 64  # bytes: where staging may begin


@dataclass(frozen=True)
class ArenaLayout:
    """What a slot is: how many rows there are and how wide they are stored.

    kv_bits: of the kept tokens outside of the last `window`, which are packed (`quantise.py`); None packs nothing.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    kv_dtype: torch.dtype
    staging_dtype: torch.dtype
    kv_bits: int | None = None
    window: int = 0

    @property
    def kept_slot_bytes(self) -> int:
        """Bytes of one kept slot: key, value, position (int32) and score (fp32)."""
        return 2 * self.head_dim * self.kv_dtype.itemsize + 8


@dataclass(frozen=True)
class ArenaSize:
    """Slots over all layers and KV heads: kept and staging exist together, decode takes the place of both.

    packed: slots of packed rows, in a store of their own, with whichever there are more of, read or decoded.
    """

    kept: int
    staging: int
    decode: int
    packed: int = 0

    def covers(self, other: ArenaSize, layout: ArenaLayout) -> bool:
        return (
            kv_bytes(layout, self) >= kv_bytes(layout, other)
            and table_slots(self) >= table_slots(other)
            and self.packed >= other.packed
        )


def kv_bytes(layout: ArenaLayout, size: ArenaSize) -> int:
    """Bytes of the K (or of the V) buffer."""
    kept = size.kept * layout.head_dim * layout.kv_dtype.itemsize
    staging = -(-kept // ALIGNMENT) * ALIGNMENT + size.staging * layout.head_dim * layout.staging_dtype.itemsize
    return max(staging, size.decode * layout.head_dim * layout.kv_dtype.itemsize, ALIGNMENT)


def table_slots(size: ArenaSize) -> int:
    return max(size.kept + size.staging, size.decode, 1)


def arena_bytes(layout: ArenaLayout, size: ArenaSize) -> int:
    """Bytes of an arena of this size: keys, values, and the position and score of every slot, packed ones included."""
    return 2 * kv_bytes(layout, size) + 8 * table_slots(size) + packed_bytes(layout, size.packed)


def packed_bytes(layout: ArenaLayout, slots: int) -> int:
    """Bytes of packed slots, whole groups of them: codes, scales and minima, position and score."""
    if layout.kv_bits is None:
        return 0
    slot = 2 * code_bytes(layout.head_dim, layout.kv_bits) + 4 * value_groups(layout.head_dim) + 8
    return slots * slot + slots // GROUP * 4 * layout.head_dim


def kept_bytes(layout: ArenaLayout, length: int, *, marks: bool = False) -> int:
    """Bytes of keys and values of a row of so many tokens, with the scales and minima of what is packed of it.

    marks: and their positions and scores, so that it is all that the row takes in an arena.
    """
    inside = length if layout.kv_bits is None else min(length, layout.window)
    slots = whole_groups(length - inside)
    unmarked = 0 if marks else 8 * (inside + slots)
    return inside * layout.kept_slot_bytes + packed_bytes(layout, slots) - unmarked


def arena_size(
    layout: ArenaLayout,
    *,
    budget: int | None,
    tokens: int,
    new_tokens: int,
    hold: int = 0,
    held: int = 0,
    held_longest: int = 0,
    late: bool = False,
) -> ArenaSize:
    """Slots that reading `tokens` and then decoding `new_tokens` needs, exactly.

    `budget` is C in tokens per layer and KV head (None keeps everything); `held` is how many slots a continued sequence
    holds in all, `held_longest` the length of its longest row. `hold`: how many slots a row at its limit needs behind
    it, 0 where rows only grow; of packed rows only whether they are held, and those that keep everything do not grow.
    `late`: nothing is evicted before all layers are read.
    """
    rows, longest = layout.num_layers * layout.num_kv_heads, held_longest + tokens
    kept = kept_limit(rows, budget=budget, tokens=tokens, held=held)
    if not hold:
        decode = kept + rows * new_tokens
    else:
        # Until the budget is reached a held row grows; slots behind its limit take newcomers (see engine/decode.py).
        limit = longest + new_tokens if budget is None else min(budget, longest + new_tokens)
        decode = max(kept, rows * limit) + rows * min(hold, new_tokens + 1)
    reading = kept_limit(rows, budget=None if late else budget, tokens=tokens, held=held)
    if layout.kv_bits is not None:
        window, inside = layout.window, min(layout.window, longest)
        held_inside = min(window, held_longest)
        most = packed_slots(rows, kept, longest, inside)
        if not hold:
            behind = max(inside + new_tokens - window, 0)  # new tokens of a row that leave the window
            most += rows * (behind // GROUP * GROUP)
        elif budget is not None:  # rows that nothing was evicted of grow up to the budget
            most = max(most, rows * whole_groups(max(min(budget, longest + new_tokens) - window, 0)))
        return ArenaSize(
            rows * (inside + min(window + GROUP, held_longest)),
            layout.num_kv_heads * longest,
            rows * min(inside + new_tokens, window + GROUP),
            max(
                packed_slots(rows, reading, longest, inside) + packed_slots(rows, held, held_longest, held_inside),
                most,
            ),
        )
    return ArenaSize(reading + held, layout.num_kv_heads * longest, decode)


def packed_slots(rows: int, total: int, longest: int, inside: int) -> int:
    """The most slots, in whole groups, that rows take which hold `total` together, `inside` of each not packed."""
    outside = max(total - rows * inside, 0)
    return min(rows * whole_groups(longest - inside), (outside + rows * (GROUP - 1)) // GROUP * GROUP)


def after_turn(layout: ArenaLayout, budget: int | None, tokens: int, new_tokens: int, hold: int = 0) -> int:
    """Tokens that an average row holds after a first turn of so many."""
    if hold and budget is not None:
        return min(tokens + new_tokens, budget + beyond_budget(layout, new_tokens, hold))
    return (tokens if budget is None else min(tokens, budget)) + new_tokens


def beyond_budget(layout: ArenaLayout, new_tokens: int, hold: int) -> int:
    """By how many tokens an average row may be longer than its budget after a reply."""
    if not hold:
        return new_tokens
    # packed rows: the last group may be filled up, and another one may be about to be
    return hold - 1 if layout.kv_bits is None else min(new_tokens, 2 * (GROUP - 1))


def span_start(layout: ArenaLayout, slots: int) -> int:
    """The first slot, from slot `slots` on, where a span of a shared store may begin: staging in it is then aligned."""
    step = ALIGNMENT // math.gcd(ALIGNMENT, layout.head_dim * layout.kv_dtype.itemsize)
    return -(-slots // step) * step


@dataclass(frozen=True)
class StoreSize:
    """Bytes of the K (or of the V) buffer, slots of the tables beside it, and slots of packed rows."""

    kv: int
    slots: int
    packed: int = 0

    def holds(self, other: StoreSize) -> bool:
        return self.kv >= other.kv and self.slots >= other.slots and self.packed >= other.packed

    def nbytes(self, layout: ArenaLayout) -> int:
        """All of it."""
        return 2 * self.kv + 8 * self.slots + packed_bytes(layout, self.packed)


def shared_size(layout: ArenaLayout, sizes: Iterable[ArenaSize]) -> StoreSize:
    """What sequences that share a store need.

    They are read one after another in this order, so that the staging of each lies behind the rows, headroom included,
    of those before it, and is free again for the next.
    """
    first = most_bytes = most_slots = packed = 0
    for size in sizes:
        first = span_start(layout, first)
        most_bytes = max(most_bytes, first * layout.head_dim * layout.kv_dtype.itemsize + kv_bytes(layout, size))
        most_slots = max(most_slots, first + table_slots(size))
        first += size.decode
        packed += size.packed
    return StoreSize(most_bytes, most_slots, packed)


def kept_limit(rows: int, *, budget: int | None, tokens: int, held: int) -> int:
    """The most slots that all rows together keep of the `held` slots and `tokens` new ones for each row."""
    everything = held + rows * tokens
    return everything if budget is None else min(everything, rows * budget)


def budget_within(
    layout: ArenaLayout,
    limit: int,
    *,
    tokens: int,
    new_tokens: int,
    hold: int = 0,
    late: bool = False,
    window: int = 0,
    context: int | None = None,
) -> int:
    """The largest budget C (tokens per layer and KV head) whose arena fits `limit` bytes.

    With `context`, for a conversation of up to that many tokens: a turn of this size must fit beside what all turns
    before it have left. Raises BudgetError that states the bytes a budget of one window takes, if not even that fits.
    """

    def need(budget: int) -> int:
        held = 0 if context is None else min(budget + beyond_budget(layout, new_tokens, hold), context)
        size = arena_size(
            layout,
            budget=budget,
            tokens=tokens,
            new_tokens=new_tokens,
            hold=hold,
            held=layout.num_layers * layout.num_kv_heads * held,
            held_longest=held,
            late=late,
        )
        return arena_bytes(layout, size)

    low, high = max(window, 1), max(window, 1, context or tokens + new_tokens)
    if need(low) > limit:
        raise BudgetError(
            f"a KV memory of {size_text(limit)} is too small: {tokens:,} prompt and {new_tokens:,} new tokens "
            f"take at least {size_text(need(low))} with the smallest budget of {low} tokens"
        )
    return largest_budget(low, high, lambda budget: need(budget) <= limit)


def largest_budget(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The largest budget from `low` to `high` that fits; `low` if none does."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
