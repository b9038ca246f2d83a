"""Attention of a piece's tokens over a staged layer: what is held, in front, and the new tokens behind it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cache.staged import Staged
from .attention import Attention, SlidingMask


def attend_chunk(
    attention: Attention,
    queries: Tensor,
    staged: Staged,
    start: int,
    end: int,
    first: int,
    scale: float,
    sliding: int | None,
    lse: Tensor | None = None,
) -> Tensor:
    """Attention of a chunk's queries `[heads, chunk, head_dim]` over what is held and the tokens up to its end.

    `lse` fp32 `[heads, chunk]` gets the log-sum-exps; only where nothing slides.
    """
    if not staged.agree:
        group = queries.shape[0] // len(staged.held)
        parts = []
        for head, one in enumerate(_per_head(staged)):
            span = slice(head * group, (head + 1) * group)
            own = None if lse is None else lse[span]
            parts.append(attend_chunk(attention, queries[span], one, start, end, first, scale, sliding, own))
        return torch.cat(parts)
    held = staged.held[0]
    mask, low = None, 0
    if sliding is not None and first + staged.tokens > sliding:
        # Where no query of the chunk sees the piece's first token, none sees what is held, which is older.
        unseen = max(0, start - sliding + 1)
        low = held + unseen if unseen else 0
        position = torch.arange(first + start, first + end, device=queries.device)
        alike = 1 if unseen or not held else None  # new tokens have the same positions in every head
        mask = SlidingMask(sliding, position, staged.position[:alike, low : held + end])
    keys, values = staged.keys[:, low : held + end], staged.values[:, low : held + end]
    return attention.prefill(queries, keys, values, scale=scale, past=held + start, sliding=mask, lse=lse)


def attend_last(
    attention: Attention, queries: Tensor, staged: Staged, total: int, scale: float, sliding: int | None
) -> Tensor:
    """Attention of the last token `[heads, head_dim]` over all columns."""
    if not staged.agree:
        group = queries.shape[0] // len(staged.held)
        parts = [
            attend_last(attention, queries[head * group : (head + 1) * group], one, total, scale, sliding)
            for head, one in enumerate(_per_head(staged))
        ]
        return torch.cat(parts)
    mask = None
    if sliding is not None:
        at = torch.arange(total - 1, total, device=queries.device)  # no copy from the host, which a GPU would wait for
        mask = SlidingMask(sliding, at, staged.position)
    if queries.device.type != "cpu":  # `decode` rounds logits to the dtype of the queries there
        past = staged.keys.shape[1] - 1
        only = queries[:, None]
        return attention.prefill(only, staged.keys, staged.values, scale=scale, past=past, sliding=mask)[:, 0]
    return attention.decode(queries, staged.keys, staged.values, scale=scale, sliding=mask)[0]


def _per_head(staged: Staged) -> list[Staged]:
    """A staged layer whose heads hold unequal numbers of tokens, as one staged layer per head."""
    ends = staged.lengths
    return [
        Staged(
            staged.keys[head : head + 1, :end],
            staged.values[head : head + 1, :end],
            staged.position[head : head + 1, :end],
            staged.score[head : head + 1, :end],
            (staged.held[head],),
            staged.tokens,
        )
        for head, end in enumerate(ends)
    ]
