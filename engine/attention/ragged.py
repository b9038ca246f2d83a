"""Launches the Triton kernels of `triton_decode`: fixed configurations, no host reads, fit for a CUDA graph.

Each function is the fast twin of the one of the same name in `rows.py`, with the same arguments. Nothing here waits for
the device, and what is launched depends on shapes, dtypes and `Rows.longest` alone: a captured launch serves every
offset and length that the tables will hold.
"""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from . import triton_decode as kernels
from .packed import PackedPart
from .rows import Rows
from .sdpa import Sdpa

_TILE_BYTES = 16384  # of keys or of values in a block: three stages of both leave room for two programs on an SM
_PROGRAMS = 512  # pieces of all rows of one sequence together: about four programs for each SM of a large GPU
TOGETHER = 16  # pieces that are joined at a time


def next_power(value: int) -> int:
    """The least power of 2 that is not below `value`."""
    return 1 << max(0, value - 1).bit_length()


def block_columns(head_dim: int, dtype: torch.dtype) -> int:
    """Columns of a row that are worked at a time."""
    return max(16, min(128, _TILE_BYTES // (next_power(head_dim) * dtype.itemsize)))


def most_pieces(kv_heads: int) -> int:
    """In how many pieces a row is cut at most. By the heads of one sequence, not by the batch: the pieces, and so the
    rounding, of a sequence are the same whatever its neighbours."""
    return max(16, min(128, next_power(_PROGRAMS // kv_heads)))


def store_newcomers(rows: Rows, new_keys: Tensor, new_values: Tensor) -> None:
    """See `rows.store_newcomers`. The new keys and values may be strided, but for their last dimension."""
    assert new_keys.stride(-1) == 1 == new_values.stride(-1)
    head_dim = rows.keys.shape[1]
    kernels.store_kernel[(rows.batch * rows.kv_heads,)](
        new_keys,
        new_values,
        *rows.tables,
        new_keys.stride(0),
        new_keys.stride(1),
        new_values.stride(0),
        new_values.stride(1),
        KV_HEADS=rows.kv_heads,
        HEAD_DIM=head_dim,
        DIM_PAD=next_power(head_dim),
        num_warps=1,
    )


def attend_rows(
    queries: Tensor, rows: Rows, *, scale: float, sliding: int | None = None, newcomers: int = 1, weights: bool = False
) -> tuple[Tensor, Tensor | None]:
    """See `rows.attend_rows`. Two launches, three with `weights`; fp32 inside whatever the dtypes are."""
    batch, heads, head_dim = queries.shape
    assert all(table.is_contiguous() for table in rows.tables), "stores are flat, and so are tables"
    queries = queries.contiguous()
    group, device = heads // rows.kv_heads, queries.device
    wider = max(queries.dtype, rows.keys.dtype, key=lambda dtype: dtype.itemsize)  # what products are made in
    block, most = block_columns(head_dim, wider), most_pieces(rows.kv_heads)
    longest = rows.longest
    pieces = max(1, min(most, -(-longest // block)))  # a row is cut by its length: no more than these can be there
    group_pad, dim_pad = max(16, next_power(group)), max(16, next_power(head_dim))
    partial = torch.empty(batch * heads, pieces, head_dim, dtype=torch.float32, device=device)
    peak, total = (torch.empty(batch * heads, pieces, dtype=torch.float32, device=device) for _ in range(2))
    logits = torch.empty(batch * heads, longest, dtype=torch.float32, device=device) if weights else peak
    lse = torch.empty(batch * heads, dtype=torch.float32, device=device)
    out = torch.empty_like(queries)
    grid = (batch * rows.kv_heads, pieces)
    kernels.split_kernel[grid](
        queries,
        *rows.tables,
        partial,
        peak,
        total,
        logits,
        scale * math.log2(math.e),
        sliding or 0,
        longest,
        pieces,
        NEWCOMERS=newcomers,
        KV_HEADS=rows.kv_heads,
        GROUP=group,
        GROUP_PAD=group_pad,
        HEAD_DIM=head_dim,
        DIM_PAD=dim_pad,
        BLOCK=block,
        PIECES=most,
        SLIDING=sliding is not None,
        KEEP_LOGITS=weights,
        WIDEN=triton.knobs.runtime.interpret,
        num_warps=4,
        num_stages=2 if wider.itemsize > 2 else 3,
    )
    kernels.combine_kernel[(batch * heads,)](
        partial,
        peak,
        total,
        rows.length,
        out,
        lse,
        pieces,
        NEWCOMERS=newcomers,
        GROUP=group,
        HEAD_DIM=head_dim,
        DIM_PAD=dim_pad,
        BLOCK=block,
        PIECES=most,
        TOGETHER=TOGETHER,
        num_warps=4,
    )
    if not weights:
        return out, None
    means = torch.empty(batch, rows.kv_heads, longest, dtype=torch.float32, device=device)
    kernels.weights_kernel[grid](
        logits,
        lse,
        rows.length,
        means,
        longest,
        NEWCOMERS=newcomers,
        GROUP=group,
        GROUP_PAD=next_power(group),
        BLOCK=block,
        PIECES=most,
        num_warps=1,
    )
    return out, means


def exchange_least_attended(rows: Rows, weights: Tensor, limit: Tensor, *, window: int) -> None:
    """See `rows.exchange_least_attended`."""
    head_dim = rows.keys.shape[1]
    kernels.exchange_kernel[(rows.batch * rows.kv_heads,)](
        rows.keys,
        rows.values,
        rows.position,
        weights,
        rows.offset,
        rows.length,
        limit,
        rows.query_position,
        weights.shape[-1],
        window,
        KV_HEADS=rows.kv_heads,
        HEAD_DIM=head_dim,
        DIM_PAD=next_power(head_dim),
        BLOCK=min(1024, next_power(max(16, rows.longest))),
        num_warps=4,
    )


class RaggedTriton(Sdpa):
    """Decode steps by the kernels here and in `ragged_packed`, prefills by torch's own."""

    name = "triton"
    ragged = True

    store_newcomers = staticmethod(store_newcomers)
    attend_rows = staticmethod(attend_rows)

    @staticmethod
    def attend_packed(
        queries: Tensor, rows: Rows, packed: PackedPart, *, scale: float, sliding: int | None = None, newcomers: int = 1
    ) -> Tensor:
        """See `packed.attend_packed`."""
        from .ragged_packed import attend_packed  # which takes the shapes of pieces from here

        return attend_packed(queries, rows, packed, scale=scale, sliding=sliding, newcomers=newcomers)

    exchange_least_attended = staticmethod(exchange_least_attended)
