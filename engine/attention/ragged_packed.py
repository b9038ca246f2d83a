"""Launches the Triton kernels of `triton_packed`, as `ragged.py` does: no host reads, shapes alone say what runs."""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from ...cache.quantise import GROUP
from . import triton_decode, triton_packed
from .packed import PackedPart
from .ragged import TOGETHER, block_columns, most_pieces, next_power
from .rows import Rows


def attend_packed(
    queries: Tensor, rows: Rows, packed: PackedPart, *, scale: float, sliding: int | None = None, newcomers: int = 1
) -> Tensor:
    """See `packed.attend_packed`. Three launches; fp32 inside but for the products."""
    batch, heads, head_dim = queries.shape
    store, offset, length = packed.store, packed.offset, packed.length
    assert offset.is_contiguous(), "tables are flat"
    assert length.is_contiguous(), "tables are flat"
    queries = queries.contiguous()
    group, device = heads // rows.kv_heads, queries.device
    most = most_pieces(rows.kv_heads)
    wider = max(queries.dtype, rows.keys.dtype, key=lambda dtype: dtype.itemsize)
    block, packed_block = block_columns(head_dim, wider), max(GROUP, block_columns(head_dim, torch.float32))
    behind = max(1, min(most, -(-packed.longest // packed_block)))  # pieces of packed rows
    pieces = behind + max(1, min(most, -(-rows.longest // block)))
    partial = torch.empty(batch * heads, pieces, head_dim, dtype=torch.float32, device=device)
    peak = torch.full((batch * heads, pieces), -math.inf, dtype=torch.float32, device=device)
    total = torch.empty_like(peak)
    out = torch.empty_like(queries)
    shape = {
        "KV_HEADS": rows.kv_heads,
        "GROUP": group,
        "GROUP_PAD": max(16, next_power(group)),
        "HEAD_DIM": head_dim,
        "DIM_PAD": max(16, next_power(head_dim)),
        "PIECES": most,
        "SLIDING": sliding is not None,
        "WIDEN": triton.knobs.runtime.interpret,
    }
    exponent = scale * math.log2(math.e)
    triton_packed.packed_split_kernel[(batch * rows.kv_heads, behind)](
        queries,
        *store.tables[:-1],  # all but the scores
        offset,
        length,
        rows.query_position,
        partial,
        peak,
        total,
        exponent,
        sliding or 0,
        pieces,
        CODE_BYTES=store.key_codes.shape[1],
        BITS=store.bits,
        VALUE_GROUPS=store.value_scale.shape[1],
        BLOCK=packed_block,
        num_warps=4,
        **shape,
    )
    triton_decode.split_kernel[(batch * rows.kv_heads, pieces - behind)](
        queries,
        *rows.tables,
        partial[:, behind:],
        peak[:, behind:],
        total[:, behind:],
        peak,
        exponent,
        sliding or 0,
        rows.longest,
        pieces,
        NEWCOMERS=newcomers,
        BLOCK=block,
        KEEP_LOGITS=False,
        num_warps=4,
        num_stages=2 if wider.itemsize > 2 else 3,
        **shape,
    )
    triton_packed.join_kernel[(batch * heads,)](
        partial,
        peak,
        total,
        out,
        pieces,
        HEAD_DIM=head_dim,
        DIM_PAD=shape["DIM_PAD"],
        PIECES=next_power(pieces),
        TOGETHER=TOGETHER,
        num_warps=4,
    )
    return out
