"""What packed rows at their limit give up for the tokens of a reply: a group of 32, between two steps, in plain torch.

A group of packed keys shares its scales, so that no single slot of it can be overwritten without packing the others
anew, which would add an error each time. So a whole group leaves: when 32 tokens have left the window of a row at its
limit, they and the packed groups are compared, and the group whose tokens are worth least together goes. If it is a
packed one, those 32 are packed in its place. What stays keeps its codes, bit for bit, however long the reply is.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..cache.holds.base import HeldRow, HoldRule, OneByOne
from ..cache.packed_arena import PackedArena
from ..cache.quantise import GROUP
from ..models.decoder import Decoder
from .holding import attend_row
from .sequence import Sequence


def cut_packed(decoder: Decoder, arena: PackedArena, sequence: Sequence, window: int, rule: HoldRule) -> None:
    """Cut rows that have grown by 32 tokens beyond their limit, by the newest query's attention, worked anew.

    Rows below their limit are left to `PackedArena.flush`.
    """
    assert isinstance(rule, OneByOne)
    assert sequence.limit is not None
    assert sequence.ring is not None, "a rule needs the votes of a sequence"
    full = arena.due & (arena.packed.length + window >= sequence.limit)
    for layer in np.flatnonzero(full.any(axis=1)).tolist():
        queries = sequence.ring.read(layer, sequence.total)[0][:, -1]  # [heads, head_dim]
        group = queries.shape[0] // arena.layout.num_kv_heads
        rows = []
        for head in range(arena.layout.num_kv_heads):
            keys, values, positions = (table[None] for table in arena.widened(layer, head, queries.dtype, extra=0))
            part = queries[head * group : (head + 1) * group]
            weights = attend_row(decoder, layer, sequence.total - 1, part, keys, values, positions)[1]
            # the next row is widened into the same buffer
            rows.append(HeldRow(weights[0], positions[0].clone(), torch.zeros_like(weights[0, 0])))
        worth = rule.worth(rows, sequence.total - 1)
        for head in full[layer].nonzero()[0].tolist():
            outside = int(arena.packed.length[layer, head]) + GROUP
            arena.exchange(layer, head, least_group(worth[head][:outside], rows[head].positions[:outside]))


def least_group(worth: Tensor, positions: Tensor) -> int:
    """The group of 32 tokens that are worth least together, of equals the oldest; fp32 and int32 `[groups * 32]`."""
    sums = worth.view(-1, GROUP).sum(1)
    oldest = positions.view(-1, GROUP).amin(1)
    return int(torch.where(sums == sums.amin(), oldest, torch.iinfo(oldest.dtype).max).argmin())
