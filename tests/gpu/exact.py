"""Whether kernels are right: attention over ragged and packed rows, hold, and the window's statistics, against torch.

An error is the norm of the difference over the norm of what is right, the largest over rows: long rows of random
numbers give small outputs, of which an absolute bar would let anything pass. What is no number never passes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import replace

import torch
from setting import Check
from torch import Tensor

# head_dim and query heads of a KV head; each is compiled anew, some seconds in all
SHAPES = {
    torch.float32: ((64, 3), (128, 4)),
    torch.float16: ((128, 8),),
    torch.bfloat16: ((64, 1), (96, 2), (128, 4), (256, 8)),
}
CLOSE = {torch.float32: 3e-5, torch.float16: 3e-3, torch.bfloat16: 1.5e-2}
PACKED = ((8, torch.float32), (4, torch.bfloat16), (2, torch.float16))


def kernels(check: Check) -> None:
    """Ragged attention with hold, and the window's statistics, over random shapes, against float64 and fp32."""
    chance, dry = random.Random(0), check.scale.dry
    for dtype, shapes in SHAPES.items():
        if dry and dtype != torch.float32:
            continue
        name = _name(dtype)
        with check.attempt(f"attention {name}"):
            errors, exchanged = [], True
            for head_dim, group in ((16, 2),) if dry else shapes:
                error, same = _attention(check, chance, dtype, head_dim, group, 20 if dry else 30000)
                errors.append(error)
                exchanged &= same
            _judge(check, f"attention {name}: largest error", largest(errors), CLOSE[dtype])
            check.same(f"hold {name}: slots exchanged as in torch", exchanged)
    with check.attempt("attention beyond 2^31 numbers"):
        error = _far(check, torch.float32 if dry else torch.bfloat16)
        _judge(check, "attention beyond 2^31 numbers: largest error", error, CLOSE[torch.bfloat16])
    for bits, dtype in PACKED:
        if dry and dtype != torch.float32:
            continue
        with check.attempt(f"attention over {bits}-bit rows"):
            error = _packed(check, bits, dtype, 16 if dry else 128, 40 if dry else 30000)
            _judge(check, f"attention over {bits}-bit rows, {_name(dtype)}: largest error", error, CLOSE[dtype])
    for dtype in (torch.float32,) if dry else (torch.float32, torch.bfloat16):
        with check.attempt(f"window statistics {_name(dtype)}"):
            error = largest(
                _statistics(check, dtype, n, sliding)
                for n in ((40,) if dry else (700, 20000))
                for sliding in (None, 17)
            )
            _judge(check, f"window statistics {_name(dtype)}: largest error", error, 1e-3)


def largest(errors: Iterable[float]) -> float:
    """The largest; NaN where one of them is, which Python's `max` may pass over."""
    found = list(errors)
    return math.nan if any(math.isnan(error) for error in found) else max(found)


def _judge(check: Check, name: str, error: float, bar: float) -> None:
    check.tell(name, error, "", f"at most {bar:g}", error <= bar)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _error(found: Tensor, wanted: Tensor) -> float:
    """Of two tensors with a row's heads in front; 0 where both are 0."""
    difference, norm = float((found.double() - wanted).norm()), float(wanted.norm())
    return difference if norm == 0 else difference / norm


def _attention(
    check: Check, chance: random.Random, dtype: torch.dtype, head_dim: int, group: int, most: int
) -> tuple[float, bool]:
    """Rows of all lengths in a store of which everything else is NaN."""
    from cake_infer.engine.attention import ragged
    from cake_infer.engine.attention import rows as plain

    batch, kv_heads, device = 3, 2, check.device
    lengths = [[chance.choice([-1, 0, 1, 17, chance.randrange(most)]) for _ in range(kv_heads)] for _ in range(batch)]
    lengths[0] = [most, 0]
    length = torch.tensor(lengths, dtype=torch.int32)
    room = (length + 2).clamp(min=0).flatten()
    offset = (room.cumsum(0) - room).view(batch, kv_heads).int()
    slots = int(room.sum())
    generator = torch.Generator(device=device).manual_seed(head_dim * group)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    keys, values = (torch.full((slots, head_dim), math.nan, dtype=dtype, device=device) for _ in range(2))
    for start, count in zip(offset.flatten().tolist(), length.flatten().tolist(), strict=True):
        for table in (keys, values):
            table[start : start + max(count, 0)] = normal(max(count, 0), head_dim)
    rows = plain.Rows(
        keys=keys,
        values=values,
        position=torch.randperm(slots, generator=generator, device=device).int(),
        offset=offset.to(device),
        length=length.to(device),
        query_position=torch.full((batch,), slots, dtype=torch.int32, device=device),
        longest=most + 1,
    )
    queries = normal(batch, kv_heads * group, head_dim) * 2
    new_keys, new_values = normal(batch, kv_heads, head_dim), normal(batch, kv_heads, head_dim)
    limit = torch.where(rows.length > 5, rows.length, rows.length + 9)  # some are full, some are not
    wide = replace(rows, keys=keys.double(), values=values.double(), position=rows.position.clone())
    wide = replace(wide, length=rows.length.clone())
    ragged.store_newcomers(rows, new_keys, new_values)
    plain.store_newcomers(wide, new_keys.double(), new_values.double())
    errors = []
    for sliding in (slots // 2, None):
        about = {"scale": head_dim**-0.5, "sliding": sliding, "weights": True}
        out, means = ragged.attend_rows(queries, rows, **about)
        wanted, attention = plain.attend_rows(queries.double(), wide, **about)
        for sequence in range(batch):
            for head in range(kv_heads):
                mine, columns = slice(head * group, (head + 1) * group), max(lengths[sequence][head], 0) + 1
                errors.append(_error(out[sequence, mine], wanted[sequence, mine]))
                if lengths[sequence][head] >= 0:
                    pair = (means[sequence, head, :columns], attention[sequence, head, :columns].double())
                    errors.append(_error(*pair))
    # by the kernel's own weights: rounding may order two slots that are all but equal the other way round
    plain.exchange_least_attended(wide, means, limit, window=4)
    ragged.exchange_least_attended(rows, means, limit, window=4)
    same = torch.equal(rows.length, wide.length) and torch.equal(rows.position, wide.position)
    return largest(errors), same and torch.equal(rows.keys.double().nan_to_num(9), wide.keys.nan_to_num(9))


def _far(check: Check, dtype: torch.dtype) -> float:
    """A row whose first number is behind the 2^31st of its store; the store itself is never filled."""
    from cake_infer.engine.attention import ragged
    from cake_infer.engine.attention import rows as plain

    head_dim, count, device = 128, 300, check.device
    first = 40 if check.scale.dry else (1 << 31) // head_dim + 5
    keys, values = (torch.empty(first + count + 1, head_dim, dtype=dtype, device=device) for _ in range(2))
    for table in (keys, values):
        table[first:] = torch.randn(count + 1, head_dim, device=device)
    table = torch.tensor([[first]], dtype=torch.int32, device=device)
    length = torch.full_like(table, count)
    position = torch.zeros(first + count + 1, dtype=torch.int32, device=device)
    at = torch.zeros(1, dtype=torch.int32, device=device)
    rows = plain.Rows(keys, values, position, table, length, at, count + 1)
    near = replace(rows, keys=keys[first:], values=values[first:], position=position[first:], offset=table - first)
    queries, new = (torch.randn(1, heads, head_dim, device=device).to(dtype) for heads in (4, 1))
    ragged.store_newcomers(rows, new, new)
    if not torch.equal(keys[-1:], new[0]):
        return math.nan
    out, _ = ragged.attend_rows(queries, rows, scale=head_dim**-0.5)
    near = replace(near, keys=near.keys.double(), values=near.values.double())
    return _error(out, plain.attend_rows(queries.double(), near, scale=head_dim**-0.5)[0])


def _packed(check: Check, bits: int, dtype: torch.dtype, head_dim: int, most: int) -> float:
    """Rows in two parts, against float64 over the numbers that torch makes of the codes."""
    from cake_infer.cache.layout import ArenaLayout
    from cake_infer.cache.packed_store import PackedStore
    from cake_infer.cache.quantise import pack_keys, pack_values, whole_groups, widen_keys, widen_values
    from cake_infer.engine.attention.packed import PackedPart
    from cake_infer.engine.attention.ragged_packed import attend_packed
    from cake_infer.engine.attention.rows import Rows

    device, lengths, group = check.device, [[most, 0], [33, most // 2]], 3
    generator = torch.Generator(device=device).manual_seed(bits)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    layout = ArenaLayout(1, 2, head_dim, dtype, dtype, kv_bits=bits, window=8)
    store = PackedStore(layout, sum(whole_groups(n) for row in lengths for n in row), device)
    offsets, numbers, end = [], [], 0
    for n in (n for row in lengths for n in row):
        keys, values = torch.zeros(n, head_dim, device=device), torch.zeros(n, head_dim, device=device)
        if n:
            stop = end + whole_groups(n)
            parts = pack_keys(normal(n, head_dim), bits), pack_values(normal(n, head_dim), bits)
            store.key_codes[end:stop], store.value_codes[end : end + n] = parts[0][0], parts[1][0]
            store.key_scale[end // 32 : stop // 32], store.key_minimum[end // 32 : stop // 32] = parts[0][1:]
            store.value_scale[end : end + n], store.value_minimum[end : end + n] = parts[1][1:]
            widen_keys(keys, *parts[0], bits)
            widen_values(values, *parts[1], bits)
        offsets.append(end)
        numbers.append((keys, values))
        end += whole_groups(n)
    length, offset = (torch.tensor(table, dtype=torch.int32).view(2, 2) for table in (lengths, offsets))
    rest = torch.tensor([[0, 9], [18, 27]], dtype=torch.int32, device=device)
    rows = Rows(
        keys=normal(40, head_dim),
        values=normal(40, head_dim),
        position=torch.zeros(40, dtype=torch.int32, device=device),
        offset=rest,
        length=torch.full_like(rest, 8),
        query_position=torch.zeros(2, dtype=torch.int32, device=device),
        longest=9,
    )
    queries = normal(2, 2 * group, head_dim)
    scale = head_dim**-0.5
    out = attend_packed(queries, rows, PackedPart(store, offset.to(device), length.to(device), most), scale=scale)
    errors = []
    for index, (keys, values) in enumerate(numbers):
        sequence, head = divmod(index, 2)
        span, mine = slice(9 * index, 9 * index + 9), slice(head * group, (head + 1) * group)
        all_keys = torch.cat([keys.double(), rows.keys[span].double()])
        all_values = torch.cat([values.double(), rows.values[span].double()])
        wanted = torch.softmax(queries[sequence, mine].double() @ all_keys.T * scale, -1) @ all_values
        errors.append(_error(out[sequence, mine], wanted))
    return largest(errors)


def _statistics(check: Check, dtype: torch.dtype, n: int, sliding: int | None) -> float:
    from cake_infer.cache.scores import cake_statistics, device_statistics
    from cake_infer.cache.view import LayerView

    generator = torch.Generator().manual_seed(n)
    window, head_dim = check.scale.window, 16 if check.scale.dry else 128
    view = LayerView(
        layer=0,
        keys=torch.randn(2, n, head_dim, generator=generator).to(dtype),
        positions=torch.arange(n).repeat(2, 1),
        queries=(2 * torch.randn(8, window, head_dim, generator=generator)).to(dtype),
        query_positions=torch.arange(n - window, n),
        window=window,
        scale=head_dim**-0.5,
        sliding_window=sliding,
        total=n,
    )
    there = {name: getattr(view, name).to(check.device) for name in ("keys", "positions", "queries", "query_positions")}
    ours, theirs = device_statistics(replace(view, **there, memo={}), 200.0, 5), cake_statistics(view, 200.0, 5)
    found, wanted = ours.indicator.cpu(), theirs.indicator
    seen = wanted.isfinite()  # the window's own columns are infinite
    if not torch.equal(seen, found.isfinite()) or int(seen.sum()) != 2 * (n - window):
        return math.nan
    return largest(
        [
            abs(ours.dispersion - theirs.dispersion) / max(theirs.dispersion, 1e-9),
            abs(ours.shift - theirs.shift) / max(theirs.shift, 1e-9),
            float((found - wanted)[seen].abs().max() / wanted[seen].abs().max()),
        ]
    )
