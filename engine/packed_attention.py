"""A decode step's attention over packed rows, in plain torch: they are widened one by one, then like any other."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cache.packed_arena import PackedArena
from .attention import Attention, SlidingMask


def packed_attention(
    arena: PackedArena,
    layer: int,
    queries: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    position: int,
    attention: Attention,
    *,
    scale: float,
    sliding: int | None,
) -> Tensor:
    """Write the newcomer `[kv_heads, head_dim]` behind each row and attend: `[heads, head_dim]` from queries like it.

    The newcomer is not packed: `PackedArena.flush` comes before the step.
    """
    kv_heads = arena.layout.num_kv_heads
    group = queries.shape[0] // kv_heads
    outputs = []
    for head in range(kv_heads):
        row = arena.row(layer, head, extra=1)
        row[0][-1], row[1][-1], row[2][-1] = new_keys[head], new_values[head], position
        keys, values, positions = (table[None] for table in arena.widened(layer, head, queries.dtype))
        mask = None
        if sliding is not None:
            mask = SlidingMask(sliding, torch.tensor([position], device=positions.device), positions)
        part = queries[head * group : (head + 1) * group]
        outputs.append(attention.decode(part, keys, values, scale=scale, sliding=mask)[0])
    arena.length[layer] += 1
    return torch.cat(outputs)
