"""Attention over packed rows and the rest of them in Triton equals float64, in Triton's interpreter on a CPU."""

from __future__ import annotations

import math

import pytest
import torch
from cake_infer.cache.layout import ArenaLayout
from cake_infer.cache.packed_store import PackedStore
from cake_infer.engine.attention import packed
from cake_infer.engine.attention.packed import PackedPart
from cake_infer.engine.attention.rows import Rows

pytest.importorskip("triton", reason="triton is not installed")
from cake_infer.engine.attention import ragged_packed

TOLERANCE = {torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def numbers(codes, scale, minimum, bits, dim):
    """What `[slots, bytes]` of codes stand for in float64, by the documented format; a pair for each number."""
    channels = torch.arange(dim)
    found = (codes[:, channels * bits // 8].int() >> (channels * bits % 8)) & (2**bits - 1)
    return minimum.double() + found.double() * scale.double()


def make_store(dim: int, bits: int, slots: int, generator) -> PackedStore:
    store = PackedStore(ArenaLayout(1, 2, dim, torch.float32, torch.float32, kv_bits=bits, window=8), slots)
    for table in store.tables[:2]:
        table.copy_(torch.randint(0, 256, table.shape, generator=generator))
    for scale, minimum in ((store.key_scale, store.key_minimum), (store.value_scale, store.value_minimum)):
        scale.copy_((0.5 + torch.rand(scale.shape, generator=generator)) / 2**bits)
        minimum.copy_(torch.randn(minimum.shape, generator=generator))
    store.position.copy_(torch.randperm(10 * slots, generator=generator)[:slots])
    return store


@pytest.mark.parametrize(
    ("bits", "dim", "dtype", "sliding"),
    [
        (8, 64, torch.float32, None),
        (4, 48, torch.float32, 900),
        (2, 128, torch.bfloat16, 900),
        (4, 64, torch.float16, None),
    ],
)
def test_attention_over_both_parts_is_that_of_one_softmax(bits, dim, dtype, sliding):
    generator, group = torch.Generator().manual_seed(bits + dim), 3
    packed_length = torch.tensor([[0, 33], [300, 64]], dtype=torch.int32)
    packed_offset = torch.tensor([[0, 32], [128, 448]], dtype=torch.int32)
    store = make_store(dim, bits, 544, generator)
    behind = torch.ones(544, dtype=torch.bool)
    for start, count in zip(packed_offset.flatten().tolist(), packed_length.flatten().tolist(), strict=True):
        behind[start : start + count] = False
    store.value_scale[behind] = store.value_minimum[behind] = math.nan
    length = torch.tensor([[5, 12], [-1, 30]], dtype=torch.int32)
    offset = torch.tensor([[1, 10], [30, 40]], dtype=torch.int32)
    keys, values = (torch.randn(80, dim, generator=generator).to(dtype) for _ in range(2))
    position = torch.randperm(1000, generator=generator)[:80].int()
    unowned = torch.ones(80, dtype=torch.bool)
    for start, count in ((1, 6), (10, 13), (40, 31)):
        unowned[start : start + count] = False
    keys[unowned] = values[unowned] = math.nan
    query_position = torch.tensor([1000, 1200], dtype=torch.int32)
    rows = Rows(keys, values, position, offset, length, query_position, longest=40)
    queries = torch.randn(2, 2 * group, dim, generator=generator).to(dtype)
    packed_length[1, 0] = -1  # a row that does nothing
    out = ragged_packed.attend_packed(
        queries, rows, PackedPart(store, packed_offset, packed_length, 320), scale=dim**-0.5, sliding=sliding
    )
    plain = packed.attend_packed(
        queries.double(), rows, PackedPart(store, packed_offset, packed_length, 320), scale=dim**-0.5, sliding=sliding
    )
    groups = torch.arange(544) // 32
    wide = dim // store.value_scale.shape[1]
    channel_groups = torch.arange(dim) // wide
    all_keys = numbers(store.key_codes, store.key_scale[groups], store.key_minimum[groups], bits, dim)
    pairs = (table[:, channel_groups] for table in (store.value_scale, store.value_minimum))
    all_values = numbers(store.value_codes, *pairs, bits, dim)
    for sequence in range(2):
        for head in range(2):
            mine = slice(head * group, (head + 1) * group)
            n = int(length[sequence, head])
            if n < 0:
                assert torch.all(out[sequence, mine] == 0)
                continue
            start, first = int(packed_offset[sequence, head]), int(offset[sequence, head])
            behind_it = slice(start, start + int(packed_length[sequence, head]))
            rest = slice(first, first + n + 1)
            both = (
                torch.cat([all_keys[behind_it], keys[rest].double()]),
                torch.cat([all_values[behind_it], values[rest].double()]),
            )
            where = torch.cat([store.position[behind_it], position[rest]])
            logits = queries[sequence, mine].double() @ both[0].T * dim**-0.5
            if sliding is not None:
                hidden = where <= int(query_position[sequence]) - sliding
                assert hidden.any()
                logits[:, hidden] = -math.inf
            wanted = torch.softmax(logits, -1) @ both[1]
            torch.testing.assert_close(out[sequence, mine].double(), wanted, rtol=0, atol=TOLERANCE[dtype])
            torch.testing.assert_close(plain[sequence, mine], wanted, rtol=0, atol=1e-5)
