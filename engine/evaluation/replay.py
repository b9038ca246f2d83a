"""Feeding known tokens on top of what many policies kept of one full cache: all of them in one pass over the weights.

The rows of a policy are gathered out of the full cache, layer by layer, while that layer is worked; no compressed cache
exists as a whole. The tokens may branch: several continuations of one shared beginning are fed together, each blind to
the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ...cache.arena import Arena
from ...models.decoder import Decoder
from ...models.rope import Rotary
from .kept import Kept

ROWS_AT_ONCE = 2048  # tokens of all policies together that go through a layer in one product


@dataclass(frozen=True)
class Branches:
    """Tokens to feed: a shared beginning and continuations of it, one behind the other.

    ids: int64 `[n]`. positions: int64 `[n]`, true ones. visible: bool `[n, n]`, row i sees column j.
    """

    ids: Tensor
    positions: Tensor
    visible: Tensor

    @classmethod
    def make(cls, first: int, shared: Sequence[int], *tails: Sequence[int]) -> Branches:
        """`shared` at positions from `first` on, and every tail right behind it."""
        parts = [(0, shared), *enumerate(tails, start=1)]
        ids = torch.tensor([token for _, part in parts for token in part], dtype=torch.int64)
        branch = torch.tensor([number for number, part in parts for _ in part], dtype=torch.int64)
        start = [first] + [first + len(shared)] * len(tails)
        positions = torch.tensor([start[number] + i for number, part in parts for i in range(len(part))])
        positions = positions.to(torch.int64)
        same = (branch[:, None] == branch[None]) | (branch[None] == 0)
        return cls(ids, positions, same & (positions[None] <= positions[:, None]))

    def __len__(self) -> int:
        return self.ids.shape[0]


@torch.inference_mode()
def replay(
    decoder: Decoder,
    arena: Arena,
    tokens: int,
    rotary: Rotary,
    branches: Branches,
    kept: Sequence[Kept | None],
    *,
    rows_at_once: int = ROWS_AT_ONCE,
) -> Iterator[Tensor]:
    """The last layer's hidden states `[n, hidden]` of the branches' tokens on top of each of `kept`, in their order.

    The arena's rows hold, first, the `tokens` of a full cache in order of position; None keeps all of them.
    """
    if not len(branches):
        empty = torch.empty(0, decoder.config.hidden_size, dtype=decoder.compute_dtype, device=decoder.device)
        yield from [empty] * len(kept)
        return
    at_once = max(1, rows_at_once // len(branches))
    for start in range(0, len(kept), at_once):
        group = kept[start : start + at_once]
        hidden = _pass(decoder, arena, tokens, rotary, branches, group)
        yield from hidden.view(len(group), len(branches), -1)


def _pass(
    decoder: Decoder, arena: Arena, tokens: int, rotary: Rotary, branches: Branches, group: Sequence[Kept | None]
) -> Tensor:
    """Hidden states `[len(group) * n, hidden]`."""
    config, device, n = decoder.config, decoder.device, len(branches)
    positions, visible = branches.positions.to(device), branches.visible.to(device)
    cos, sin = (table.repeat(len(group), 1) for table in rotary.cos_sin(positions))
    hidden = decoder.embed(branches.ids.to(device)).repeat(len(group), 1)
    for index in range(config.num_layers):
        layer = decoder.for_products(index)
        keys, values = (table[:, :tokens] for table in arena.rows(index)[:2])  # [kv_heads, tokens, head_dim]
        normed = decoder.attention_norm(layer, hidden)
        queries = decoder.queries(layer, normed, cos, sin)  # [heads, group * n, head_dim]
        shape = (config.num_kv_heads, hidden.shape[0], config.head_dim)
        own_keys, own_values = (torch.empty(shape, dtype=queries.dtype, device=device) for _ in range(2))
        decoder.keys_values(layer, normed, cos, sin, own_keys, own_values)
        sight = _Sight(visible, positions, config.sliding_windows[index])
        attended = torch.empty_like(queries)
        for number, one in enumerate(group):
            span = slice(number * n, (number + 1) * n)
            mine = (own_keys[:, span], own_values[:, span])
            attended[:, span] = _attend(queries[:, span], keys, values, *mine, one, index, sight, decoder.scale)
        hidden += decoder.attention_output(layer, attended)
        hidden += decoder.mlp(layer, decoder.mlp_norm(layer, hidden))
    return hidden


@dataclass(frozen=True)
class _Sight:
    """What the branches' tokens see of each other, and of kept columns, which a sliding window may hide."""

    visible: Tensor
    positions: Tensor
    sliding: int | None

    def mask(self, columns: Tensor) -> Tensor:
        """bool `[..., n, kept + n]` for kept columns at positions `[..., kept]`."""
        n = len(self.positions)
        query = self.positions[:, None]
        before = torch.ones(*columns.shape[:-1], n, columns.shape[-1], dtype=torch.bool, device=columns.device)
        own = self.visible
        if self.sliding is not None:
            before = columns[..., None, :] > query - self.sliding
            own = own & (self.positions[None] > query - self.sliding)
        return torch.cat([before, own.expand(*columns.shape[:-1], n, n)], dim=-1)


def _attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    own_keys: Tensor,
    own_values: Tensor,
    kept: Kept | None,
    layer: int,
    sight: _Sight,
    scale: float,
) -> Tensor:
    """Attention `[heads, n, head_dim]` of the branches' queries over kept rows of a layer and over each other."""
    kv_heads, tokens, head_dim = keys.shape
    if kept is not None and (kept.bits is not None or kept.rows is not None or not kept.agrees(layer)):
        group = queries.shape[0] // kv_heads
        parts = []
        for head in range(kv_heads):
            one = slice(head, head + 1)
            columns = kept.columns(layer, head)
            past = [table[None] for table in kept.numbers(layer, head, keys[head], values[head])]
            if kept.rows is not None:
                own = kept.own_row(layer, head)
                past, columns = [own[0][None], own[1][None]], own[2].long()
            span = queries[head * group : (head + 1) * group]
            mask = sight.mask(columns)
            parts.append(_grouped(span, past, own_keys[one], own_values[one], mask, scale))
        return torch.cat(parts)
    if kept is None:
        columns = torch.arange(tokens, device=keys.device)
        return _grouped(queries, [keys, values], own_keys, own_values, sight.mask(columns), scale)
    chosen = kept.orders[layer][:, : kept.lengths[layer][0]]  # [kv_heads, length]
    index = chosen[..., None].expand(-1, -1, head_dim)
    past = [table.gather(1, index) for table in (keys, values)]
    mask = sight.mask(chosen if sight.sliding is not None else chosen[0])
    return _grouped(queries, past, own_keys, own_values, mask[:, None] if mask.dim() == 3 else mask, scale)


def _grouped(
    queries: Tensor, past: list[Tensor], own_keys: Tensor, own_values: Tensor, mask: Tensor, scale: float
) -> Tensor:
    """Queries `[heads, n, head_dim]` over `[kv_heads, past + n, head_dim]`, nothing expanded in memory."""
    keys = torch.cat([past[0].to(queries.dtype), own_keys], dim=1)
    values = torch.cat([past[1].to(queries.dtype), own_values], dim=1)
    heads, n, head_dim = queries.shape
    shape = (keys.shape[0], heads // keys.shape[0], keys.shape[1], head_dim)
    out = scaled_dot_product_attention(
        queries.reshape(shape[0], shape[1], n, head_dim),
        keys[:, None].expand(shape),
        values[:, None].expand(shape),
        attn_mask=mask,
        scale=scale,
    )
    return out.reshape(heads, n, head_dim)
