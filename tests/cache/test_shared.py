"""Several sequences in one store: spans are packed, disjoint and moved without loss, and never outgrow the limit."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from cake_infer.cache.arena import Arena
from cake_infer.cache.layout import ArenaLayout, ArenaSize, arena_bytes, arena_size, kv_bytes, shared_size, table_slots
from cake_infer.cache.packed_arena import PackedArena
from cake_infer.cache.shared import SharedArena
from cake_infer.errors import ArenaFull, MemoryLimit

F32, BF16 = torch.float32, torch.bfloat16
LAYOUTS = {
    "one dtype": ArenaLayout(3, 2, 4, F32, F32),
    "narrow rows, wide staging": ArenaLayout(2, 3, 5, BF16, F32),  # a slot of 10 bytes: spans begin every 32 slots
    "one head": ArenaLayout(2, 1, 16, BF16, BF16),
    "packed": ArenaLayout(3, 2, 4, BF16, F32, kv_bits=4, window=5),
}


def fill(arena: Arena, tokens: int, new: int, stamp: int, kept: int) -> None:
    """Read a piece whose numbers say whose they are, keeping the first `kept` tokens of each layer, uneven by head."""
    layers, heads = arena.length.shape
    arena.begin(layers * heads * tokens, tokens)
    for layer in range(layers):
        staged = arena.stage(layer, tokens, 0)
        staged.keys.fill_(stamp + layer)
        staged.values.fill_(-stamp - layer)
        lengths = [max(1, kept - head) for head in range(heads)]
        order = torch.arange(kept).expand(heads, -1)
        arena.keep(layer, staged, order, lengths, torch.full((heads, tokens), float(stamp)))
    arena.finish(np.full((layers, 1), new))


def untouched(arena: Arena, stamp: int, kept: int) -> bool:
    layers, heads = arena.length.shape

    def row(layer: int, head: int) -> tuple[torch.Tensor, ...]:
        if isinstance(arena, PackedArena):
            return tuple(table[:-1] for table in arena.widened(layer, head, F32))
        return arena.row(layer, head)

    return all(
        arena.held[layer, head] == max(1, kept - head)
        and bool((row(layer, head)[0] == stamp + layer).all())
        and bool((row(layer, head)[1] == -stamp - layer).all())
        and sorted(row(layer, head)[2].tolist()) == list(range(max(1, kept - head)))
        for layer in range(layers)
        for head in range(heads)
    )


@pytest.mark.parametrize("name", list(LAYOUTS))
@pytest.mark.parametrize("limit", [None, 30_000])
def test_members_keep_their_rows_while_others_come_and_go(name: str, limit: int | None) -> None:
    layout = LAYOUTS[name]
    moves = 0
    for seed in range(12 if layout.kv_bits is None else 2):
        chance = random.Random(seed)
        shared = SharedArena(layout, batch=6, limit=limit)
        present: dict[int, tuple[Arena, int]] = {}
        for stamp in range(1, 40):
            if present and (chance.random() < 0.4 or not shared.free_rows):
                arena, _ = present.pop(chance.choice(list(present)))
                shared.release(arena)
                assert not arena.length.any()
            least = 1 if layout.kv_bits is None else layout.window + 1  # there every row keeps the window
            tokens, new = chance.randint(least, 30), chance.randint(0, 9)
            kept = chance.randint(least, tokens)
            size = arena_size(layout, budget=None, tokens=tokens, new_tokens=new)
            before = [arena.first for arena, _ in present.values()]
            try:
                arena = shared.admit(size)
            except ArenaFull:
                assert limit is not None
                continue
            moves += before != [arena.first for arena, _ in present.values()]
            fill(arena, tokens, new, stamp, kept)
            arena.settle()
            present[stamp] = arena, kept
            taken = np.zeros(shared.store.position.numel(), dtype=bool)
            groups = np.zeros(0 if shared.packed is None else shared.packed.slots // 32, dtype=bool)
            for number, (member, length) in present.items():
                assert untouched(member, number, length), (seed, stamp, number)
                row = shared.row_of(member)
                assert member.offset is not shared.offset
                assert (shared.offset[row] == member.offset).all()
                assert (shared.length[row] == member.length).all()
                assert (shared.capacity[row] == member.capacity).all()
                for start, capacity in zip(member.offset.flat, member.capacity.flat, strict=True):
                    assert not taken[start : start + capacity].any(), "two rows share a slot"
                    taken[start : start + capacity] = True
                if isinstance(member, PackedArena):
                    packed = member.packed
                    for start, capacity in zip(packed.offset.flat, packed.capacity.flat, strict=True):
                        assert packed.first <= start
                        assert start + capacity <= packed.first + packed.slots
                        assert not groups[start // 32 : (start + capacity) // 32].any(), "two rows share a group"
                        groups[start // 32 : (start + capacity) // 32] = True
            assert limit is None or shared.nbytes <= limit
        empty = [row for row in range(6) if all(shared.row_of(arena) != row for arena, _ in present.values())]
        assert not shared.capacity[empty].any()
    assert moves > (5 if layout.kv_bits is None else 0)


def test_the_store_is_exactly_as_large_as_the_arithmetic_says() -> None:
    layout = LAYOUTS["narrow rows, wide staging"]
    sizes = [arena_size(layout, budget=4, tokens=tokens, new_tokens=3) for tokens in (40, 25, 7)]
    shared = SharedArena(layout, batch=3)
    shared.reserve(sizes)
    needed = shared_size(layout, sizes)
    kv, slots = needed.kv, needed.slots
    assert shared.nbytes == needed.nbytes(layout) == 2 * kv + 8 * slots
    # by hand: each is read behind the rows of those before it, which begin at multiples of 32 slots of 10 bytes
    first, most_kv, most_slots = 0, 0, 0
    for size in sizes:
        first = (first + 31) // 32 * 32
        most_kv = max(most_kv, 10 * first + kv_bytes(layout, size))
        most_slots = max(most_slots, first + table_slots(size))
        first += 2 * 3 * (4 + 3)
    assert (kv, slots) == (most_kv, most_slots)
    assert shared.nbytes < sum(arena_bytes(layout, size) for size in sizes), "staging is there once, not three times"
    store = shared.store
    for stamp, tokens in enumerate((40, 25, 7), 1):
        arena = shared.admit(sizes[stamp - 1])
        arena.begin(2 * 3 * 4)
        for layer in range(2):
            staged = arena.stage(layer, tokens, 0)
            arena.keep(layer, staged, torch.arange(4).expand(3, -1), [4] * 3, None)
        arena.finish(np.full((2, 1), 3))
        arena.settle()
    assert shared.store is store, "nothing had to grow"


def test_a_row_moves_with_the_slot_behind_it() -> None:
    """There `hold` keeps what it gave up last, so that a step can be undone."""
    shared = SharedArena(LAYOUTS["one dtype"], batch=3)
    size = arena_size(LAYOUTS["one dtype"], budget=None, tokens=5, new_tokens=1)
    shared.reserve([size, size])
    first = shared.admit(size)
    fill(first, 5, 1, 1, 3)
    first.settle()
    second = shared.admit(size)
    fill(second, 5, 1, 2, 3)
    second.settle()
    second.row(1, 1, extra=1)[0][-1] = 77.0
    shared.release(first)
    shared.compact()
    assert second.first == 0
    assert untouched(second, 2, 3)
    assert (second.row(1, 1, extra=1)[0][-1] == 77.0).all()


def test_a_refusal_names_both_figures_and_changes_nothing() -> None:
    layout = LAYOUTS["one dtype"]
    size = arena_size(layout, budget=None, tokens=20, new_tokens=5)
    shared = SharedArena(layout, batch=4, limit=arena_bytes(layout, size) + 100)
    arena = shared.admit(size)
    fill(arena, 20, 5, 1, 7)
    arena.settle()
    with pytest.raises(ArenaFull, match=r"needs \d+ KiB .* more than the \d+ KiB allowed.*ask again"):
        shared.admit(size)
    with pytest.raises(MemoryLimit, match="send a shorter text"):
        shared.admit(arena_size(layout, budget=None, tokens=40, new_tokens=5))
    assert shared.members == [arena]
    assert untouched(arena, 1, 7)
    shared.release(arena)
    assert shared.admit(size).first == 0
    shared.clear()
    assert shared.nbytes < 200


def test_no_memory_for_more_leaves_the_members_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = LAYOUTS["one dtype"]
    shared = SharedArena(layout, batch=4)
    arena = shared.admit(arena_size(layout, budget=None, tokens=20, new_tokens=5))
    fill(arena, 20, 5, 1, 7)
    arena.settle()
    empty = torch.empty

    def scarce(*shape: int, **options: object) -> torch.Tensor:
        if shape[0] > 1_000_000:
            raise RuntimeError("out of memory")
        return empty(*shape, **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(torch, "empty", scarce)
    with pytest.raises(MemoryLimit, match="no memory for a KV arena"):
        shared.admit(ArenaSize(1_000_000, 0, 0))
    assert shared.members == [arena]
    assert untouched(arena, 1, 7)


def test_a_store_that_grows_grows_for_those_who_wait_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = LAYOUTS["one dtype"]
    size = arena_size(layout, budget=None, tokens=20, new_tokens=5)
    three, one = (shared_size(layout, [size] * count).nbytes(layout) for count in (3, 1))
    for limit, sizes in ((None, [three] * 3), (three, [three] * 3), (three - 1, [one])):
        shared, seen = SharedArena(layout, batch=4, limit=limit), []
        for count in range(len(sizes)):
            arena = shared.admit(size, [size] * (2 - count))
            fill(arena, 20, 5, count + 1, 7)
            arena.settle()
            seen.append(shared.nbytes)
        assert all(untouched(arena, stamp + 1, 7) for stamp, arena in enumerate(shared.members))
        assert seen == sizes
    shared, empty = SharedArena(layout, batch=4), torch.empty

    def scarce(*shape: int, **options: object) -> torch.Tensor:
        if shape[0] > 1_000_000:
            raise RuntimeError("out of memory")
        return empty(*shape, **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(torch, "empty", scarce)
    shared.admit(size, [ArenaSize(1_000_000, 0, 0)])  # comes in itself, though there is too little for the other
    assert shared.nbytes == one
