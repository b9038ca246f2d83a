"""The packed part of one layer's rows, as an attention backend is given it in a decode step; and the plain torch form.

See `rows.py`, whose rows are the part that is not packed, with the newcomers. The functions here read the tables on the
host: they are the reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...cache.packed_store import PackedStore
from ...cache.quantise import GROUP, whole_groups, widen_keys, widen_values
from .rows import Rows


@dataclass(frozen=True)
class PackedPart:
    """offset, length: int32 `[batch, kv_heads]`, contiguous, in slots of the store; offsets are whole groups, a row may
    be empty, and one of a negative length does nothing. longest: no row is or becomes longer, see `Rows`."""

    store: PackedStore
    offset: Tensor
    length: Tensor
    longest: int


def attend_packed(
    queries: Tensor, rows: Rows, packed: PackedPart, *, scale: float, sliding: int | None = None, newcomers: int = 1
) -> Tensor:
    """Attention `[batch, heads, head_dim]` of new queries over both parts of their rows, in one softmax.

    Queries, `rows`, `sliding` as in `rows.attend_rows`.
    """
    group, store = queries.shape[1] // rows.kv_heads, packed.store
    out = torch.zeros_like(queries)
    offsets, lengths = packed.offset.tolist(), packed.length.tolist()
    for sequence, head, _, span in rows.spans(newcomers):
        first, n = offsets[sequence][head], lengths[sequence][head]
        slots = slice(first, first + whole_groups(n))
        groups = slice(slots.start // GROUP, slots.stop // GROUP)
        keys, values = (queries.new_empty(n, queries.shape[2]) for _ in range(2))
        widen_keys(keys, store.key_codes[slots], store.key_scale[groups], store.key_minimum[groups], store.bits)
        widen_values(values, store.value_codes[slots], store.value_scale[slots], store.value_minimum[slots], store.bits)
        keys = torch.cat([keys, rows.keys[span].to(keys.dtype)])
        values = torch.cat([values, rows.values[span].to(keys.dtype)])
        mine = slice(head * group, (head + 1) * group)
        logits = (queries[sequence, mine] @ keys.t()).float() * scale  # [group, columns]
        if sliding is not None:
            position = torch.cat([store.position[first : first + n], rows.position[span]])
            logits.masked_fill_(position <= rows.query_position[sequence] - sliding, float("-inf"))
        attention = torch.softmax(logits, -1).nan_to_num_(0.0)  # a row that shows nothing gives 0
        out[sequence, mine] = attention.to(queries.dtype) @ values
    return out
