"""The Triton kernels of a decode step equal float64 arithmetic over ragged rows, in Triton's interpreter on a CPU."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import pytest
import torch
from cake_infer.engine.attention import Sdpa
from cake_infer.engine.attention import rows as plain
from cake_infer.engine.attention.rows import Rows
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")
from cake_infer.engine.attention import ragged

TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass
class Case:
    """Rows somewhere in a store of which everything else is NaN, and what float64 makes of them."""

    rows: Rows
    queries: Tensor
    scale: float

    @property
    def group(self) -> int:
        return self.queries.shape[1] // self.rows.kv_heads

    def columns(self, sequence: int, head: int, newcomers: int) -> slice:
        start, length = int(self.rows.offset[sequence, head]), int(self.rows.length[sequence, head])
        return slice(start, start + (length + newcomers if length >= 0 else 0))

    def expected(self, sliding: int | None, newcomers: int) -> tuple[Tensor, dict[tuple[int, int], Tensor]]:
        """Output `[batch, heads, head_dim]`; the mean attention of each row that does something."""
        out, means = torch.zeros(self.queries.shape, dtype=torch.float64), {}
        for sequence in range(self.rows.batch):
            for head in range(self.rows.kv_heads):
                span = self.columns(sequence, head, newcomers)
                keys, values = self.rows.keys[span].double(), self.rows.values[span].double()
                seen = torch.ones(len(keys), dtype=torch.bool)
                if sliding is not None:
                    seen = self.rows.position[span] > int(self.rows.query_position[sequence]) - sliding
                if not seen.any():
                    continue
                mine = slice(head * self.group, (head + 1) * self.group)
                logits = self.queries[sequence, mine].double() @ keys.T * self.scale
                attention = torch.softmax(logits.masked_fill(~seen, -math.inf), -1)
                out[sequence, mine] = attention @ values
                means[sequence, head] = attention.mean(0)
        return out, means


def make_case(
    lengths: list[list[int]],
    *,
    group: int = 2,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    newcomers: int = 1,
    seed: int = 0,
) -> Case:
    """Rows of these lengths in a random order with gaps between them; a length below 0 is a row that does nothing."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    length = torch.tensor(lengths, dtype=torch.int32)
    offset, end = torch.zeros_like(length), rng.randrange(5)
    order = [(s, h) for s in range(length.shape[0]) for h in range(length.shape[1])]
    rng.shuffle(order)
    for s, h in order:
        offset[s, h] = end
        end += max(0, int(length[s, h])) + newcomers + rng.randrange(4)
    keys, values = (torch.full((end, head_dim), math.nan, dtype=kv_dtype or dtype) for _ in range(2))
    position = torch.full((end,), 2**31 - 1, dtype=torch.int32)
    query_position = torch.tensor([200 + 7 * s for s in range(length.shape[0])], dtype=torch.int32)
    for s, h in order:
        count = int(length[s, h])
        if count >= 0:
            span = slice(int(offset[s, h]), int(offset[s, h]) + count + newcomers)
            for table in (keys, values):
                table[span] = torch.randn(count + newcomers, head_dim, generator=generator).to(table.dtype)
            position[span] = torch.tensor(
                rng.sample(range(int(query_position[s])), count) + [int(query_position[s])] * newcomers
            )
    heads = length.shape[1] * group
    queries = (torch.randn(length.shape[0], heads, head_dim, generator=generator) * 2).to(dtype)
    longest = int(length.max()) + newcomers + rng.randrange(20)
    rows = Rows(keys, values, position, offset, length, query_position, max(1, longest))
    return Case(rows, queries, head_dim**-0.5)


def assert_equals_float64(case: Case, sliding: int | None = None, newcomers: int = 1) -> None:
    expected, means = case.expected(sliding, newcomers)
    tolerance = TOLERANCE[case.queries.dtype]
    out, found = ragged.attend_rows(
        case.queries, case.rows, scale=case.scale, sliding=sliding, newcomers=newcomers, weights=True
    )
    assert out.dtype == case.queries.dtype
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    assert found is not None
    for (sequence, head), mean in means.items():
        row = found[sequence, head, : len(mean)].double()
        torch.testing.assert_close(row, mean, rtol=0, atol=tolerance / 4)


@pytest.mark.parametrize("group", range(1, 9))
def test_every_group_size(group):
    assert_equals_float64(make_case([[0, 65], [1, 130]], group=group, seed=group))


def test_the_output_is_the_same_without_the_attention_row():
    case = make_case([[0, 65], [-1, 130]])
    out, weights = ragged.attend_rows(case.queries, case.rows, scale=case.scale)
    assert weights is None
    assert torch.equal(out, ragged.attend_rows(case.queries, case.rows, scale=case.scale, weights=True)[0])


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_head_size_and_dtype(head_dim, dtype):
    case = make_case([[0, 33], [-1, 41]], group=3, head_dim=head_dim, dtype=dtype, seed=head_dim)
    assert_equals_float64(case)
    assert_equals_float64(case, sliding=60)


@pytest.mark.parametrize("seed", range(6))
def test_random_ragged_shapes(seed):
    rng = random.Random(seed)
    batch, kv_heads = rng.randint(1, 3), rng.randint(1, 3)
    lengths = [[rng.choice([0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 150]) for _ in range(kv_heads)] for _ in range(batch)]
    case = make_case(lengths, group=rng.randint(1, 4), head_dim=rng.choice([16, 64, 96]), seed=seed)
    assert_equals_float64(case, sliding=rng.choice([None, 1, 20, 1000]))


def test_rows_longer_than_all_pieces_take_several_blocks_each(monkeypatch):
    monkeypatch.setattr(ragged, "most_pieces", lambda kv_heads: 4)
    assert_equals_float64(make_case([[180, 40], [199, 0]], head_dim=256, seed=3))  # blocks of 16: up to 13 of them
    assert_equals_float64(make_case([[180, 40], [199, 0]], head_dim=256, seed=4), sliding=30)


def test_kept_rows_may_be_narrower_than_the_queries():
    assert_equals_float64(make_case([[40, 3]], dtype=torch.float32, kv_dtype=torch.bfloat16))


def test_without_newcomers_an_empty_row_gives_zeros():
    case = make_case([[0, 1], [30, -1]], newcomers=0)
    assert_equals_float64(case, newcomers=0)
    out, _ = ragged.attend_rows(case.queries, case.rows, scale=case.scale, newcomers=0)
    assert out[0, :2].abs().max() == 0


def test_logits_beyond_the_range_of_fp32_exponentials():
    case = make_case([[50, 20]])
    case.queries.mul_(200.0)
    assert_equals_float64(case)


def test_a_sequence_does_not_depend_on_its_neighbours_bit_for_bit():
    case = make_case([[90, 33], [5, 150], [0, 64]], seed=5)
    together, weights = ragged.attend_rows(case.queries, case.rows, scale=case.scale, weights=True)
    for sequence in range(3):
        one, rows = slice(sequence, sequence + 1), case.rows
        tables = {name: getattr(rows, name)[one] for name in ("offset", "length", "query_position")}
        alone, row = ragged.attend_rows(case.queries[one], replace(rows, **tables), scale=case.scale, weights=True)
        assert torch.equal(alone[0], together[sequence])
        for head in range(2):
            count = int(case.rows.length[sequence, head]) + 1
            assert torch.equal(row[0, head, :count], weights[sequence, head, :count])


def test_the_launch_does_not_depend_on_lengths(monkeypatch):
    grids = []

    class Recorder:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            def launch(*arguments, **options):
                scalars = [a for a in arguments if not isinstance(a, Tensor)]
                grids.append((grid, scalars, options))
                return self.kernel[grid](*arguments, **options)

            return launch

    for name in ("split_kernel", "combine_kernel", "weights_kernel"):
        monkeypatch.setattr(ragged.kernels, name, Recorder(getattr(ragged.kernels, name)))
    case = make_case([[3, 100], [70, 0]])
    for length in (case.rows.length, torch.full((2, 2), -1, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int32)):
        ragged.attend_rows(case.queries, replace(case.rows, length=length), scale=case.scale, weights=True)
    assert grids[:3] == grids[3:6] == grids[6:]


def test_newcomers_are_written_behind_their_rows_and_nowhere_else():
    for kv_dtype in (torch.float32, torch.bfloat16):
        case = make_case([[0, 5], [-1, 12]], kv_dtype=kv_dtype)
        new = torch.randn(2, 2, 2, 64).transpose(1, 2)  # strided
        before = [table.clone() for table in (case.rows.keys, case.rows.values, case.rows.position)]
        ragged.store_newcomers(case.rows, new[0], new[1])
        for sequence, head in ((0, 0), (0, 1), (1, 1)):
            slot = case.columns(sequence, head, 1).stop - 1
            before[0][slot], before[1][slot] = new[0, sequence, head].to(kv_dtype), new[1, sequence, head].to(kv_dtype)
            before[2][slot] = case.rows.query_position[sequence]
        for table, expected in zip((case.rows.keys, case.rows.values, case.rows.position), before, strict=True):
            step = 2**-7 if table.dtype == torch.bfloat16 else 0  # the interpreter does not round to the nearest
            torch.testing.assert_close(table, expected, rtol=step, atol=0, equal_nan=True)


@pytest.mark.parametrize("seed", range(4))
def test_full_rows_give_up_the_least_attended_slot_and_others_grow(seed):
    rng, window = random.Random(seed), 8
    case = make_case([[rng.randint(9, 40), 0], [-1, 30]], seed=seed)
    rows = case.rows
    limit = torch.tensor([[int(rows.length[0, 0]), 3], [5, rng.choice([30, 31])]], dtype=torch.int32)
    weights = torch.rand(2, 2, rows.longest, generator=torch.Generator().manual_seed(seed)).round(
        decimals=1
    )  # with ties
    reference = replace(
        rows,
        keys=rows.keys.clone(),
        values=rows.values.clone(),
        position=rows.position.clone(),
        length=rows.length.clone(),
    )
    before = rows.position.clone()
    ragged.exchange_least_attended(rows, weights, limit, window=window)
    expected = reference.length.tolist()
    for sequence, head in ((0, 0), (0, 1), (1, 1)):
        start, length = int(rows.offset[sequence, head]), int(reference.length[sequence, head])
        if length < int(limit[sequence, head]):
            expected[sequence][head] += 1
            continue
        at = before[start : start + length + 1].tolist()
        old = [c for c, p in enumerate(at) if p <= int(rows.query_position[sequence]) - window]
        loser = min(old, key=lambda c: (float(weights[sequence, head, c]), at[c]))
        at[loser], at[length] = at[length], at[loser]
        assert rows.position[start : start + length + 1].tolist() == at
    assert rows.length.tolist() == expected
    plain.exchange_least_attended(reference, weights, limit, window=window)
    for name in ("keys", "values", "position", "length"):
        torch.testing.assert_close(getattr(rows, name), getattr(reference, name), rtol=0, atol=0, equal_nan=True)


def test_a_row_all_in_the_window_gives_up_its_oldest():
    case = make_case([[4, 4]])
    case.rows.position.clamp_(max=200)
    limit, weights = torch.tensor([[4, 4]], dtype=torch.int32), torch.rand(1, 2, case.rows.longest)
    oldest = [int(case.rows.position[case.columns(0, head, 1)].min()) for head in range(2)]
    ragged.exchange_least_attended(case.rows, weights, limit, window=10_000)
    assert [int(case.rows.position[case.columns(0, head, 1)][-1]) for head in range(2)] == oldest


@pytest.mark.parametrize(
    ("prompt", "checkpoint", "cache"),
    [
        (60, {}, {"budget": 24, "window": 8}),
        (22, {}, {"budget": 24, "window": 8, "decode_policy": "hold"}),  # full after two steps
        (60, {"model_type": "mistral", "sliding_window": 16}, {"budget": 24, "window": 8, "decode_policy": "hold"}),
        (30, {"model_type": "mistral", "sliding_window": 16}, {"policy": "full"}),
    ],
    ids=["grow", "hold", "hold, sliding", "full, sliding"],
)
def test_decode_steps_over_ragged_rows_equal_those_over_views(
    tmp_path, write_checkpoint, make_runner, random_ids, kept_positions, checkpoint, cache, prompt
):
    from cake_infer.engine import decode
    from cake_infer.engine.sequence import Sequence

    folder = write_checkpoint(tmp_path / "model", **checkpoint)
    ids, new = random_ids(prompt), random_ids(5, seed=1)
    kept, logits = [], []
    for backend in (Sdpa(), ragged.RaggedTriton()):
        runner, sequence = make_runner(folder, **cache), Sequence()
        limit = runner.prepare(sequence, len(ids), len(new) + 1)
        runner.feed(sequence, ids, limit)
        arena = runner.tenancy.arena
        with torch.inference_mode():
            steps = [decode.step(runner.decoder, arena, sequence, t, window=8, attention=backend) for t in new]
        logits.append(torch.stack(steps))
        kept.append((kept_positions(runner), arena.length.tolist()))
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=2e-5)
    assert kept[0] == kept[1]


def test_sequences_of_one_store_decode_together_as_they_do_alone(tmp_path, write_checkpoint, make_runner, random_ids):
    from cake_infer.cache.arena import Arena
    from cake_infer.cache.layout import ArenaSize
    from cake_infer.cache.store import Store
    from cake_infer.engine import decode
    from cake_infer.engine.sequence import Sequence

    runner = make_runner(write_checkpoint(tmp_path / "model"), budget=24, window=8, decode_policy="hold")
    prompts = [random_ids(60), random_ids(4, seed=1), random_ids(31, seed=2)]
    alone, copies, sequences = [], [], []
    new = [random_ids(3, seed=3 + index) for index in range(3)]
    for ids, tokens in zip(prompts, new, strict=True):
        sequence = Sequence()
        runner.feed(sequence, ids, runner.prepare(sequence, len(ids), 20))
        saved, limit = runner.tenancy.arena.save(), sequence.limit
        copies.append((saved, len(ids)))
        with torch.inference_mode():
            alone.append(
                [decode.step(runner.decoder, runner.tenancy.arena, sequence, token, window=8) for token in tokens]
            )
        sequences.append(Sequence(list(ids), sequence.budget, sequence.ring, sequence.rotary, limit))
    sizes = [int(saved.capacity.sum()) for saved, _ in copies]
    row_bytes = runner.layout.head_dim * runner.layout.kv_dtype.itemsize
    store = Store(runner.layout, sum(sizes) * row_bytes, sum(sizes), torch.device("cpu"))
    store.keys.fill_(math.nan), store.values.fill_(math.nan)
    arenas, first = [], 0
    for (saved, _), size in zip(copies, sizes, strict=True):
        arena = Arena(runner.layout, ArenaSize(0, 0, size), store=store, first=first)
        arena.load(saved)
        arenas.append(arena)
        first += size
    for step in range(3):
        with torch.inference_mode():
            logits = decode.batch_step(
                runner.decoder,
                arenas,
                sequences,
                [tokens[step] for tokens in new],
                window=8,
                attention=ragged.RaggedTriton(),
            )
        expected = torch.stack([steps[step] for steps in alone])
        torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5)
