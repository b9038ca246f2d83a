"""Packed rows in an arena as small as the arithmetic allows, against a numpy rendering; what no row owns is NaN."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cake_infer.cache import packed_store, store
from cake_infer.cache.layout import ArenaLayout, ArenaSize, arena_bytes, arena_size, kept_limit
from cake_infer.cache.packed_arena import PackedArena, make_arena

G, WINDOW, DIM = 32, 8, 32
F32, BF16 = torch.float32, torch.bfloat16


def through(numbers: np.ndarray, bits: int) -> np.ndarray:
    """What is left of a group of numbers `[n, columns]`, each column a group."""
    numbers, levels = numbers.astype(np.float32), np.float32(2**bits - 1)  # roundings are those of fp32
    minimum = np.float16(numbers.min(0)).astype(np.float32)
    scale = np.float16((numbers.max(0) - minimum) / levels).astype(np.float32)
    codes = np.clip(np.round((numbers - minimum) / np.where(scale > 0, scale, np.float32(1))), 0, levels)
    return minimum.astype(np.float64) + codes.astype(np.float64) * scale


def through_keys(keys: np.ndarray, bits: int) -> np.ndarray:
    return np.concatenate([through(keys[at : at + G], bits) for at in range(0, len(keys), G)] or [keys])


def through_values(values: np.ndarray, bits: int) -> np.ndarray:
    return through(values.T, bits).T if len(values) else values


def poison(arena: PackedArena) -> None:
    """Every byte that no row owns becomes one of a NaN or a code that nobody wrote."""
    own = torch.zeros(arena.position.numel(), dtype=torch.bool)
    for offset, length in zip(arena.offset.flat, arena.length.flat, strict=True):
        assert not own[offset : offset + length].any(), "rows overlap"
        own[offset : offset + length] = True
    for raw, table in ((arena.store.k, arena.keys), (arena.store.v, arena.values)):
        count = min(own.numel(), table.shape[0])
        saved = table[:count][own[:count]]
        raw.fill_(0xFF)
        table[:count][own[:count]] = saved
    arena.position[~own], arena.score[~own] = -1, float("nan")
    packed = arena.packed
    slots = torch.zeros(packed.store.slots, dtype=torch.bool)
    groups = torch.zeros(packed.store.slots // G, dtype=torch.bool)
    for offset, length in zip(packed.offset.flat, packed.length.flat, strict=True):
        assert offset % G == 0
        assert not slots[offset : offset + length].any(), "packed rows overlap"
        slots[offset : offset + length] = True
        groups[offset // G : -(-(offset + length) // G)] = True
    for table in packed.store.tables:
        free = ~(slots if len(table) == len(slots) else groups)
        table[free] = float("nan") if table.is_floating_point() else table.new_tensor(-1).to(table.dtype)


class Text:
    """What has been read, by position, and where the rows should be: `inside` and `outside` positions by row."""

    def __init__(self, layout: ArenaLayout, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.layout, self.total = layout, 0
        rows = (layout.num_layers, layout.num_kv_heads)
        self.keys, self.values = (np.zeros((*rows, 0, layout.head_dim)) for _ in range(2))
        self.shadow: dict[tuple[int, int], dict[str, list]] = {}

    def extend(self, tokens: int) -> None:
        shape = (self.layout.num_layers, self.layout.num_kv_heads, tokens, self.layout.head_dim)
        new = [self.random.normal(size=shape).astype(np.float32).astype(np.float64) for _ in range(2)]
        self.keys, self.values = (np.concatenate([a, b], 2) for a, b in zip((self.keys, self.values), new, strict=True))
        self.total += tokens


def sized(layout: ArenaLayout, held: np.ndarray, budget: int | None, tokens: int, new: int) -> ArenaSize:
    return arena_size(
        layout,
        budget=budget,
        tokens=tokens,
        new_tokens=new,
        held=int(held.sum()),
        held_longest=int(held.max()),
    )


def read(arena: PackedArena, text: Text, tokens: int, budget: int | None, shadow: dict) -> None:
    """Read a piece with random scores; `shadow[row]` are the row's (key, value, position) as they should be."""
    layout, first = arena.layout, text.total
    text.extend(tokens)
    rows = layout.num_layers * layout.num_kv_heads
    evicting = budget is not None and text.total > budget
    longest = int(arena.held.max()) + tokens
    arena.begin(kept_limit(rows, budget=budget if evicting else None, tokens=tokens, held=arena.kept_slots), longest)
    for layer in range(layout.num_layers):
        poison(arena)
        staged = arena.stage(layer, tokens, first)
        for head, held in enumerate(staged.held):
            staged.keys[head, held : held + tokens] = torch.from_numpy(text.keys[layer, head, first:])
            staged.values[head, held : held + tokens] = torch.from_numpy(text.values[layer, head, first:])
            old = shadow.get((layer, head), ([], [], []))
            assert staged.position[head, :held].tolist() == old[2]
            if held:
                wanted = torch.from_numpy(np.array(old[0])).to(layout.staging_dtype).double()
                torch.testing.assert_close(staged.keys[head, :held].double(), wanted, rtol=1e-5, atol=1e-5)
                wanted = torch.from_numpy(np.array(old[1])).to(layout.staging_dtype).double()
                torch.testing.assert_close(staged.values[head, :held].double(), wanted, rtol=1e-5, atol=1e-5)
        window = min(layout.window, text.total)
        score = torch.from_numpy(text.random.random((layout.num_kv_heads, max(staged.lengths)))).float()
        orders, lengths = [], []
        for head, length in enumerate(staged.lengths):
            position = staged.position[head, :length].numpy()
            inside = sorted(range(length), key=lambda i: position[i])[length - window :]
            inside_set = set(inside)
            rest = [i for i in range(length) if i not in inside_set]
            if evicting:
                rest.sort(key=lambda i: (-score[head, i].item(), position[i]))
            orders.append(inside + rest)
            keep = length if not evicting else min(length, budget + (3 * layer) % 5 - 2 + (1 - 2 * head))
            lengths.append(keep)
        if evicting:  # the first layers have too much, and shrink when the last one comes: a cascade
            order = torch.full((layout.num_kv_heads, max(lengths)), -1, dtype=torch.int64)
            for head, one in enumerate(orders):
                order[head, : lengths[head]] = torch.tensor(one[: lengths[head]])
            for before in range(layer):
                shares = [max(window, int(n) - before % 3) for n in arena.held[before]]
                arena.shrink(before, shares)
                for head, share in enumerate(shares):
                    shadow[before, head] = tuple(part[:window] + part[window:share] for part in shadow[before, head])
            arena.keep(layer, staged, order, lengths, score)
        else:
            arena.keep(layer, staged, None, lengths, None)
        for head, one in enumerate(orders):
            columns = one[: lengths[head]]
            keys, values = (table[head].double().numpy() for table in (staged.keys, staged.values))
            kept = (keys[columns], values[columns])
            exact = [torch.from_numpy(part[:window]).to(layout.kv_dtype).double().numpy() for part in kept]
            packed = through_keys(kept[0][window:], layout.kv_bits), through_values(kept[1][window:], layout.kv_bits)
            shadow[layer, head] = (
                list(exact[0]) + list(packed[0]),
                list(exact[1]) + list(packed[1]),
                staged.position[head].numpy()[columns].tolist(),
            )
    # as `stage` will bring them: packed first
    for row, parts in shadow.items():
        window = min(layout.window, text.total)
        shadow[row] = tuple(part[window:] + part[:window] for part in parts)


def compare(arena: PackedArena, shadow: dict) -> None:
    poison(arena)
    for (layer, head), (keys, values, positions) in shadow.items():
        arena.capacity[layer, head] += 0
        found = [table[:-1] for table in arena.widened(layer, head, F32)]
        assert found[2].tolist() == positions
        for table, wanted in zip(found[:2], (keys, values), strict=True):
            torch.testing.assert_close(table.double(), torch.from_numpy(np.array(wanted)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("bits", "dtypes", "overlapping"),
    [(8, (BF16, F32), True), (4, (BF16, F32), True), (2, (BF16, BF16), True), (4, (F32, F32), False)],
)
@pytest.mark.parametrize("budget", [None, 50])
def test_rows_are_packed_as_one_would_pack_what_was_kept_turn_after_turn(
    bits, dtypes, overlapping, budget, monkeypatch
):
    if not overlapping:  # no memory that memmove reaches: in tiles of a few groups
        for module in (store, packed_store):
            monkeypatch.setattr(module, "OVERLAPPING", frozenset())
            monkeypatch.setattr(module, "BOUNCE_BYTES", 100)
    layout = ArenaLayout(3, 2, DIM, *dtypes, kv_bits=bits, window=WINDOW)
    text, shadow = Text(layout, seed=bits), {}
    arena = make_arena(layout, ArenaSize(0, 0, 0))
    assert isinstance(arena, PackedArena)
    for tokens, new in ((100, 40), (5, 3), (40, 33), (1, 0)):
        saved = arena.save().tight() if text.total else None
        size = sized(layout, arena.held, budget if budget and text.total + tokens > budget else None, tokens, new)
        arena = PackedArena(layout, size)
        assert arena.nbytes == arena_bytes(layout, size)
        stores = arena.store, arena.packed.store
        assert sum(one.nbytes for one in stores) == arena.nbytes, "what the arena says is what it takes"
        if saved is not None:
            arena.load(saved)
            compare(arena, shadow)
        read(arena, text, tokens, budget, shadow)
        arena.finish(np.full_like(arena.length, new))
        compare(arena, shadow)
        decode(arena, text, new, shadow)
        copy = arena.save()
        assert copy.size.packed <= size.packed
        assert arena.holds(copy)
        arena.load(copy)
        compare(arena, shadow)


def decode(arena: PackedArena, text: Text, new: int, shadow: dict) -> None:
    """New tokens one by one: the oldest outside of the window are packed where they fill a group."""
    layout = arena.layout
    for _ in range(new):
        before = arena.packed.length.copy()
        arena.flush()
        poison(arena)
        for layer, head in zip(*(before != arena.packed.length).nonzero(), strict=True):
            old, length = int(before[layer, head]), int(arena.packed.length[layer, head])
            assert length % G == 0
            start, (keys, values, _) = old // G * G, shadow[layer, head]
            keys[start:length] = list(through(np.array(keys[start:length]), layout.kv_bits))
            values[old:length] = list(through_values(np.array(values[old:length]), layout.kv_bits))
        assert (arena.length < WINDOW + G).all()
        position = text.total
        text.extend(1)
        for layer in range(layout.num_layers):
            for head in range(layout.num_kv_heads):
                slot = int(arena.offset[layer, head] + arena.length[layer, head])
                assert arena.length[layer, head] < arena.capacity[layer, head]
                for table, exact, part in zip(
                    (arena.keys, arena.values), (text.keys, text.values), shadow[layer, head][:2], strict=True
                ):
                    table[slot] = torch.from_numpy(exact[layer, head, position])
                    part.append(table[slot].double().numpy().copy())
                arena.position[slot] = position
                shadow[layer, head][2].append(position)
        arena.length += 1
    compare(arena, shadow)
    assert (arena.held.sum() == sum(len(parts[2]) for parts in shadow.values())).all()


def test_a_group_that_is_cut_in_two_keeps_its_scale():
    layout = ArenaLayout(1, 1, DIM, F32, F32, kv_bits=2, window=0)
    arena = PackedArena(layout, arena_size(layout, budget=None, tokens=G, new_tokens=0))
    arena.begin(G, G)
    staged = arena.stage(0, G, 0)
    staged.keys[0], staged.values[0] = torch.randn(G, DIM), torch.randn(G, DIM)
    keys = staged.keys[0].double().numpy().copy()
    arena.keep(0, staged, None, [G], None)
    arena.shrink(0, [5])
    arena.finish(np.zeros((1, 1)))
    found = torch.empty(5, DIM), torch.empty(5, DIM)
    arena.packed.widen(0, 0, *found)
    torch.testing.assert_close(found[0].double(), torch.from_numpy(through(keys, 2)[:5]))


def test_packed_rows_take_what_their_numbers_take():
    """16 bits are 2 x 64 x 2 + 8 bytes a slot; 4 bits 64 + 8 of the keys' scales + 8 of the values' + 8."""
    sizes = [ArenaLayout(2, 3, 64, BF16, F32, kv_bits=bits, window=32) for bits in (8, 4, 2)]
    slots = 96
    store_bytes = [packed_store.PackedStore(layout, slots).nbytes for layout in sizes]
    assert store_bytes == [slots * 152, slots * 88, slots * 56]
