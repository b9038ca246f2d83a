"""The arena against lists of tensors, over 10,000 random operations; whatever no row owns is NaN all along."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from cake_infer.cache import store as store_module
from cake_infer.cache.arena import Arena
from cake_infer.cache.layout import ArenaLayout, ArenaSize, arena_bytes, arena_size, kept_limit
from cake_infer.errors import MemoryLimit
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def owned(arena):
    """Which slots belong to a row, and that no two rows share one."""
    mask = torch.zeros(arena.position.numel(), dtype=torch.int32)
    for offset, length in zip(arena.offset.flat, arena.length.flat, strict=True):
        mask[offset : offset + length] += 1
    assert not (mask > 1).any(), "rows overlap"
    return mask.bool()


def poison(arena):
    """Every byte that no row owns becomes one of a NaN, in any float dtype."""
    rows = owned(arena)
    for raw, table in ((arena.store.k, arena.keys), (arena.store.v, arena.values)):
        count = min(rows.numel(), table.shape[0])
        saved = table[:count][rows[:count]]
        raw.fill_(0xFF)
        table[:count][rows[:count]] = saved
    arena.position[~rows], arena.score[~rows] = -1, math.nan


def fill(arena, layer, tokens, first, generator):
    """Stage `tokens` random tokens of a layer. Returns the staged layer, its columns checked against the old rows."""
    staged = arena.stage(layer, tokens, first)
    dim = arena.layout.head_dim
    for head, held in enumerate(staged.held):
        for table in (staged.keys, staged.values):
            table[head, held : held + tokens] = torch.randn(tokens, dim, generator=generator)
    return staged


class ArenaMachine(RuleBasedStateMachine):
    """An engine's use of the arena, made as small as the arithmetic allows before each piece."""

    @initialize(
        layers=st.integers(1, 4),
        heads=st.integers(1, 3),
        dim=st.sampled_from([2, 4]),
        dtypes=st.sampled_from([(F32, F32), (BF16, F32), (F16, F32), (BF16, BF16), (F32, BF16)]),
        bounce=st.sampled_from([1, 24, 100, 4 << 20]),
        span=st.sampled_from([1, 5, 1 << 18]),
        overlapping=st.sampled_from([frozenset(), frozenset({"cpu"})]),
        seed=st.integers(0, 99),
    )
    def make(self, layers, heads, dim, dtypes, bounce, span, overlapping, seed):
        self.span, store_module.SPAN = store_module.SPAN, span
        self.bounce_bytes, store_module.BOUNCE_BYTES = store_module.BOUNCE_BYTES, bounce
        self.overlapping, store_module.OVERLAPPING = store_module.OVERLAPPING, overlapping
        self.layout = ArenaLayout(layers, heads, dim, *dtypes)
        self.random = torch.Generator().manual_seed(seed)
        self.arena = Arena(self.layout, ArenaSize(0, 0, 0))
        self.rows = {(layer, head): [] for layer in range(layers) for head in range(heads)}  # (key, value, position)
        self.scores = {row: [] for row in self.rows}
        self.total = 0  # true tokens
        self.layer = None  # the next layer to read while a piece is read
        self.headroom = 0
        self.parked = []

    def teardown(self):
        if hasattr(self, "bounce_bytes"):
            store_module.BOUNCE_BYTES, store_module.OVERLAPPING = self.bounce_bytes, self.overlapping
            store_module.SPAN = self.span

    # -- reading a piece ----------------------------------------------------------------------------------------------

    @precondition(lambda self: self.layer is None)
    @rule(
        tokens=st.integers(1, 12),
        budget=st.sampled_from([None, 1, 3, 8]),
        new=st.integers(0, 5),
        exact=st.booleans(),
    )
    def begin(self, tokens, budget, new, exact):
        lengths = self.arena.length
        held, longest, rows = int(lengths.sum()), int(lengths.max()), lengths.size
        size = arena_size(self.layout, budget=budget, tokens=tokens, new_tokens=new, held=held, held_longest=longest)
        if exact or not self.arena.size.covers(size, self.layout):
            saved = self.arena.save()
            saved.capacity[:] = saved.length
            self.arena = Arena(self.layout, size)
            poison(self.arena)
            self.arena.load(saved)
        self.limit = kept_limit(rows, budget=budget, tokens=tokens, held=held)
        self.arena.begin(self.limit)
        self.layer, self.tokens, self.new, self.evicting = 0, tokens, new, budget is not None

    @precondition(lambda self: self.layer is not None)
    @rule(data=st.data(), ragged=st.booleans(), drop=st.floats(0, 1))
    def read_layer(self, data, ragged, drop):
        layer, heads = self.layer, self.layout.num_kv_heads
        staged = fill(self.arena, layer, self.tokens, self.total, self.random)
        columns = []
        for head in range(heads):
            old, end = self.rows[layer, head], len(self.rows[layer, head]) + self.tokens
            assert staged.held[head] == len(old)
            assert staged.lengths[head] == end
            new = (staged.keys[head, len(old) : end].clone(), staged.values[head, len(old) : end].clone())
            assert staged.position[head, :end].tolist() == [
                *(entry[2] for entry in old),
                *range(self.total, self.total + self.tokens),
            ]
            for index, entry in enumerate(old):  # moved in front of the new ones, widened
                assert torch.equal(staged.keys[head, index].to(self.layout.kv_dtype), entry[0])
                assert torch.equal(staged.values[head, index].to(self.layout.kv_dtype), entry[1])
            columns.append(
                [
                    *old,
                    *(
                        (key.to(self.layout.kv_dtype), value.to(self.layout.kv_dtype), self.total + index)
                        for index, (key, value) in enumerate(zip(*new, strict=True))
                    ),
                ]
            )
        if not self.evicting:
            self.arena.keep(layer, staged, None, list(staged.lengths), None)
            for head in range(heads):
                self.rows[layer, head], self.scores[layer, head] = columns[head], [0.0] * len(columns[head])
            return self.read_next()
        # The earlier layers give up what this one takes: rows never grow and stay within the limit.
        if ragged:
            lengths = [data.draw(st.integers(0, length)) for length in staged.lengths]
            while sum(lengths) > self.limit:
                lengths[lengths.index(max(lengths))] -= 1
        else:
            share = data.draw(st.integers(0, min(self.limit // heads, min(staged.lengths))))
            lengths = [share] * heads
        over = sum(len(self.rows[row]) for row in self.rows if row[0] < layer) + sum(lengths) - self.limit
        for earlier in range(layer):
            held = [len(self.rows[earlier, head]) for head in range(heads)]
            given = [max(over, 0)] * heads
            if ragged:
                for head in range(heads):
                    given[head] = min(max(over - sum(given[:head]), int(drop > 0.8)), held[head])
            smaller = [max(0, n - g) for n, g in zip(held, given, strict=True)]
            over -= sum(held) - sum(smaller)
            self.arena.shrink(earlier, smaller)
            for head, length in enumerate(smaller):
                del self.rows[earlier, head][length:], self.scores[earlier, head][length:]
        order = torch.full((heads, max(lengths)), -1, dtype=torch.int64)
        score = torch.randn(heads, staged.keys.shape[1], generator=self.random)
        for head, length in enumerate(lengths):
            chosen = torch.randperm(staged.lengths[head], generator=self.random)[:length]
            order[head, :length] = chosen
            self.rows[layer, head] = [columns[head][index] for index in chosen.tolist()]
            self.scores[layer, head] = score[head, chosen].tolist()
        self.arena.keep(layer, staged, order, lengths, score)
        return self.read_next()

    def read_next(self):
        self.layer += 1
        if self.layer == self.layout.num_layers:
            self.layer = None
            self.total += self.tokens
            self.headroom = self.new
            self.arena.finish(np.full((self.layout.num_layers, 1), self.new))

    @precondition(lambda self: self.layer is not None)
    @rule()
    def break_off(self):
        """A piece that fails leaves an arena that is as good as new once it is cleared."""
        self.arena.clear()
        self.layer, self.total, self.headroom = None, 0, 0
        for row in self.rows:
            self.rows[row], self.scores[row] = [], []

    # -- decoding -----------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.layer is None and self.headroom > 0)
    @rule()
    def decode(self):
        """A newcomer behind every row, through the strided view where the heads agree."""
        dim = self.layout.head_dim
        for layer in range(self.layout.num_layers):
            together = self.arena.agrees(layer)
            for head in range(self.layout.num_kv_heads):
                if together:
                    keys, values, position = (table[head] for table in self.arena.rows(layer, extra=1))
                else:
                    keys, values, position = self.arena.row(layer, head, extra=1)
                assert keys.shape == (len(self.rows[layer, head]) + 1, dim)
                key, value = torch.randn(2, dim, generator=self.random).to(self.layout.staging_dtype)
                key, value = key.to(self.layout.kv_dtype), value.to(self.layout.kv_dtype)
                keys[-1], values[-1], position[-1] = key, value, self.total
                self.rows[layer, head].append((key, value, self.total))
                self.scores[layer, head].append(None)
            self.arena.length[layer] += 1
        self.total += 1
        self.headroom -= 1

    # -- copies -------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.layer is None)
    @rule()
    def set_aside(self):
        """Rows are saved, the arena is used by another sequence, which starts empty."""
        saved = self.arena.save()
        self.parked.append((saved, self.rows, self.scores, self.total, self.headroom))
        self.arena.clear()
        self.rows, self.scores = ({row: [] for row in self.rows} for _ in range(2))
        self.total = self.headroom = 0

    @precondition(lambda self: self.layer is None and self.parked)
    @rule(which=st.integers(0, 5), keep=st.booleans())
    def bring_back(self, which, keep):
        saved, rows, scores, total, headroom = self.parked[which % len(self.parked)]
        if not self.arena.holds(saved):
            self.arena = Arena(self.layout, ArenaSize(0, 0, int(saved.capacity.sum())))
        poison(self.arena)
        self.arena.load(saved)
        self.rows = {row: list(entries) for row, entries in rows.items()}
        self.scores = {row: list(entries) for row, entries in scores.items()}
        self.total, self.headroom = total, headroom
        if not keep:
            self.parked.clear()

    # -- what must hold -----------------------------------------------------------------------------------------------

    @invariant()
    def rows_are_those_of_the_lists(self):
        if not hasattr(self, "rows"):
            return
        for (layer, head), entries in self.rows.items():
            assert self.arena.length[layer, head] == len(entries)
            assert self.arena.capacity[layer, head] >= len(entries)
            keys, values, position = self.arena.row(layer, head)
            if entries:
                assert torch.equal(keys, torch.stack([entry[0] for entry in entries]))
                assert torch.equal(values, torch.stack([entry[1] for entry in entries]))
            assert position.tolist() == [entry[2] for entry in entries]
            start = int(self.arena.offset[layer, head])
            for stored, score in zip(self.arena.score[start:].tolist(), self.scores[layer, head], strict=False):
                assert score is None or stored == score
        assert self.arena.kept_slots == sum(map(len, self.rows.values()))
        for layer in range(self.layout.num_layers):
            heads = range(self.layout.num_kv_heads)
            if self.arena.agrees(layer):
                assert len({len(self.rows[layer, head]) for head in heads}) == 1
                keys, values, position = self.arena.rows(layer)
                for head in heads:
                    for whole, one in zip((keys, values, position), self.arena.row(layer, head), strict=True):
                        assert torch.equal(whole[head], one)
        poison(self.arena)

    @invariant()
    def the_bounce_buffer_stays_small(self):
        if hasattr(self, "arena"):
            slot = self.layout.head_dim * 4
            assert self.arena.store._bounce.numel() <= max(store_module.BOUNCE_BYTES, slot)
            assert self.arena.nbytes == sum(
                table.nbytes
                for table in (self.arena.store.k, self.arena.store.v, self.arena.position, self.arena.score)
            )


# 200 runs of 50 operations; shrinking a failure would take minutes.
ArenaMachine.TestCase.settings = settings(
    max_examples=200,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
    report_multiple_bugs=False,
)
TestArena = ArenaMachine.TestCase


def whole_piece(arena, tokens, budget, new, layers):
    """Read one piece in which every layer keeps its equal share, and make room for the reply."""
    arena.begin(kept_limit(arena.length.size, budget=budget, tokens=tokens, held=arena.kept_slots))
    for layer in range(layers):
        staged = fill(arena, layer, tokens, 0, torch.Generator().manual_seed(layer))
        length = min(budget, staged.lengths[0])
        order = torch.arange(length).expand(arena.layout.num_kv_heads, -1)
        arena.keep(layer, staged, order, [length] * arena.layout.num_kv_heads, None)
    arena.finish(np.full((layers, 1), new))


@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, F32), (F32, BF16)])
@pytest.mark.parametrize(("tokens", "new", "less"), [(100, 4, "kept staging"), (20, 40, "decode")])
def test_an_arena_one_token_smaller_than_the_arithmetic_says_is_refused_at_once(dtypes, tokens, new, less):
    layout = ArenaLayout(3, 2, 8, *dtypes)
    size = arena_size(layout, budget=16, tokens=tokens, new_tokens=new)
    whole_piece(Arena(layout, size), tokens, 16, new, 3)
    small = ArenaSize(**{name: getattr(size, name) - (name in less) for name in ("kept", "staging", "decode")})
    with pytest.raises(AssertionError, match="the arena was sized for"):
        whole_piece(Arena(layout, small), tokens, 16, new, 3)


def test_a_layer_that_keeps_more_than_its_budget_is_refused():
    layout = ArenaLayout(2, 1, 4, F32, F32)
    arena = Arena(layout, arena_size(layout, budget=5, tokens=20, new_tokens=1))
    arena.begin(10)
    staged = fill(arena, 0, 20, 0, torch.Generator())
    with pytest.raises(AssertionError, match="more than its budget"):
        arena.keep(0, staged, torch.arange(11)[None], [11], None)
    arena.keep(0, staged, torch.arange(6)[None], [6], None)
    with pytest.raises(AssertionError, match="never grows"):
        arena.shrink(0, [7])


def test_an_arena_that_does_not_fit_the_memory_is_an_error_that_says_what_to_do():
    layout = ArenaLayout(32, 8, 128, F32, F32)
    with pytest.raises(MemoryLimit, match=r"no memory for a KV arena of [\d,]+ MiB: lower the budget or the context"):
        Arena(layout, ArenaSize(0, 0, 1 << 42))


def test_an_arena_says_how_many_bytes_it_takes():
    layout = ArenaLayout(3, 2, 8, BF16, F32)
    size = arena_size(layout, budget=16, tokens=100, new_tokens=4)
    arena = Arena(layout, size)
    assert arena.nbytes == arena_bytes(layout, size) == 2 * arena.store.k.nbytes + 8 * arena.position.numel()


@pytest.mark.parametrize(("layers", "heads"), [(2, 1), (12, 4)])
def test_many_rows_move_in_few_copies_where_memory_is_not_memmoved(monkeypatch, layers, heads):
    """On a GPU a copy is a launch: their number may not depend on how many rows and layers there are."""
    monkeypatch.setattr(store_module, "OVERLAPPING", frozenset())
    layout, generator = ArenaLayout(layers, heads, 4, F32, F32), torch.Generator().manual_seed(0)
    arena = Arena(layout, ArenaSize(layers * heads * 10, heads * 10, layers * heads * 14))
    arena.begin(layers * heads * 10, 10)
    for layer in range(layers):
        arena.keep(layer, fill(arena, layer, 10, 0, generator), None, [10] * heads, None)
    expected = {}
    for layer in range(layers):
        arena.shrink(layer, [7 - layer % 3] * heads)
        expected |= {(layer, head): [table.clone() for table in arena.row(layer, head)] for head in range(heads)}
    gathered, select = [], torch.index_select
    with monkeypatch.context() as patch:
        patch.setattr(torch, "index_select", lambda *args, **named: (gathered.append(1), select(*args, **named))[1])
        arena.finish(np.full((layers, heads), 3))
    assert len(gathered) == 2 * 4, "to the left, and to the right: one for each table"
    for row, tables in expected.items():
        assert all(torch.equal(one, other) for one, other in zip(tables, arena.row(*row), strict=True)), row
