"""Rows behind the 2^31st number of a store, as a GPU's large arenas have them: slots are widened before they are
multiplied.

In Triton's interpreter, over memory that is promised and never used. Numbers that wrapped around would be read from,
and written to, the zeros in front of the store.
"""

from __future__ import annotations

import mmap

import pytest
import torch
from cake_infer.engine.attention import rows as plain
from cake_infer.engine.attention.packed import PackedPart
from cake_infer.engine.attention.rows import Rows
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")
from cake_infer.engine.attention import ragged, ragged_packed

DIM, COUNT, FAR = 256, 37, 1 << 31
FIRST = FAR // DIM + 3  # slots in front of the row
KEEP_NOTHING = getattr(mmap, "MAP_NORESERVE", 0x4000)


def promised(numbers: int, dtype: torch.dtype) -> Tensor:
    """Zeros, as many again in front of them, of which memory is used only where something is written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | KEEP_NOTHING
    try:
        memory = mmap.mmap(-1, 2 * numbers * dtype.itemsize, flags=flags)
    except OSError:
        pytest.skip("this machine promises no memory that it has not got")
    return torch.frombuffer(memory, dtype=dtype)[numbers:]


@pytest.fixture
def far() -> tuple[Rows, Rows]:
    """A row of COUNT tokens far behind in its store, and the same in a store of its own; keys and values are one."""
    generator = torch.Generator().manual_seed(0)
    slots = FIRST + COUNT + 1
    numbers = torch.randn(COUNT + 1, DIM, generator=generator).half()
    store = promised(slots * DIM, torch.float16).view(slots, DIM)
    store[FIRST : FIRST + COUNT] = numbers[:COUNT]
    position = torch.zeros(slots, dtype=torch.int32)
    position[FIRST:] = torch.arange(COUNT + 1)
    offset, length, at = (torch.tensor(value, dtype=torch.int32) for value in ([[FIRST]], [[COUNT]], [COUNT]))
    there = Rows(store, store, position, offset, length, at, COUNT + 1)
    near = numbers.clone()
    here = Rows(near, near, position[FIRST:].clone(), offset - FIRST, length.clone(), at, COUNT + 1)
    return there, here


def test_newcomers_attention_and_exchange(far: tuple[Rows, Rows]) -> None:
    there, here = far
    generator = torch.Generator().manual_seed(1)
    queries, new = (torch.randn(1, heads, DIM, generator=generator).half() for heads in (3, 1))
    ragged.store_newcomers(there, new, new)
    plain.store_newcomers(here, new, new)
    assert torch.equal(there.keys[FIRST:], here.keys)
    out, means = ragged.attend_rows(queries, there, scale=0.05, sliding=30, weights=True)
    logits = (queries[0].double() @ here.keys.double().T * 0.05)[:, 8:]
    attention = torch.softmax(logits, -1)
    torch.testing.assert_close(out[0].double(), attention @ here.keys[8:].double(), rtol=0, atol=2e-3)
    torch.testing.assert_close(means[0, 0, 8:].double(), attention.mean(0), rtol=0, atol=1e-5)
    weights, limit = torch.rand(1, 1, COUNT + 1, generator=generator), torch.tensor([[COUNT]], dtype=torch.int32)
    ragged.exchange_least_attended(there, weights, limit, window=4)
    loser = int(weights[0, 0, : COUNT - 3].argmin())
    assert there.position[FIRST + loser] == COUNT
    assert there.position[-1] == loser
    assert torch.equal(there.keys[FIRST + loser], here.keys[-1])
    assert torch.equal(there.keys[-1], here.keys[loser])


def test_the_fused_step_puts_keys_and_values_there(far: tuple[Rows, Rows]) -> None:
    from cake_infer.engine import triton_step

    there, _ = far
    generator = torch.Generator().manual_seed(3)
    q, k = (torch.randn(1, DIM, generator=generator).half() for _ in range(2))
    cos, sin = torch.ones(1, DIM // 2), torch.zeros(1, DIM // 2)  # nothing turns
    queries = torch.empty(1, 1, DIM, dtype=torch.float16)
    triton_step.place_kernel[(1, 2)](
        q,
        k,
        k,
        cos,
        cos,
        cos,
        sin,
        queries,
        queries,
        *there.tables,
        DIM,
        DIM,
        DIM,
        1,
        1e-5,
        0.0,
        HEADS=1,
        KV_HEADS=1,
        HALF=DIM // 2,
        HALF_PAD=DIM // 2,
        NORM=False,
        RING=False,
    )
    assert torch.equal(queries[0], q)
    assert torch.equal(there.keys[-1:], k)
    assert there.position[-1] == COUNT


def test_packed_rows() -> None:
    """Codes of 8 bits, a byte each."""
    generator = torch.Generator().manual_seed(2)
    first, groups = FAR // DIM // 32 * 32 + 32, 2
    slots = first + 32 * groups
    codes = torch.randint(0, 256, (32 * groups, DIM), generator=generator, dtype=torch.uint8)
    table = promised(slots * DIM, torch.uint8).view(slots, DIM)
    table[first:] = codes

    class Store:
        bits = 8
        key_codes = value_codes = table
        key_scale = torch.full((slots // 32, DIM), 0.01, dtype=torch.float16)
        key_minimum = torch.full((slots // 32, DIM), -1.0, dtype=torch.float16)
        value_scale = torch.full((slots, 1), 0.01, dtype=torch.float16)
        value_minimum = torch.full((slots, 1), -1.0, dtype=torch.float16)
        position = torch.zeros(slots, dtype=torch.int32)
        tables = (key_codes, value_codes, key_scale, key_minimum, value_scale, value_minimum, position, position)

    numbers = codes.double() * float(torch.tensor(0.01).half()) - 1.0
    rest, zero = torch.randn(1, DIM, generator=generator), torch.zeros(1, 1, dtype=torch.int32)
    rows = Rows(rest, rest, zero[0], zero, zero, zero[0], 1)
    queries = torch.randn(1, 2, DIM, generator=generator)
    part = PackedPart(Store(), zero + first, zero + 32 * groups, 32 * groups)  # type: ignore[arg-type]
    out = ragged_packed.attend_packed(queries, rows, part, scale=0.05)
    everything = torch.cat([numbers, rest.double()])
    wanted = torch.softmax(queries[0].double() @ everything.T * 0.05, -1) @ everything
    torch.testing.assert_close(out[0].double(), wanted, rtol=0, atol=1e-5)
