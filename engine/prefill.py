"""Reading a piece of text: layer by layer, in chunks of tokens inside the layer, evicting as soon as a layer is read.

Only one layer's keys and values exist in full at any time. A layer's weight is widened once and serves every chunk; the
hidden states are updated in place; no tensor has a row per token and a column per token or per vocabulary entry.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from ..cache.arena import Arena, Staged
from ..cache.cascade import Cascade, LayerClaim
from ..cache.layout import kept_limit
from ..cache.policies.base import Policy
from ..cache.scores import LayerView, row_order
from ..models.decoder import Decoder, Layer
from ..models.workspace import Workspace
from .attention import SlidingMask, decode_attention, prefill_attention
from .sequence import Sequence

OnChunk = Callable[[int, int, int], None]  # (layer, tokens of this layer done, tokens of the piece)
Result = TypeVar("Result")
Reading = Generator[tuple[int, int, int], None, Result]  # stops with what OnChunk is told


@dataclass(frozen=True)
class Piece:
    """What stays the same while one piece is read."""

    tokens: int
    first: int  # true position of the first token
    cos: Tensor  # fp32 [tokens, head_dim / 2]
    sin: Tensor
    chunk: int
    work: Workspace | None  # of one chunk; None on a GPU, where torch keeps what is freed

    @property
    def total(self) -> int:
        return self.first + self.tokens

    def chunks(self) -> list[tuple[int, int]]:
        return [(start, min(start + self.chunk, self.tokens)) for start in range(0, self.tokens, self.chunk)]


def reading(
    decoder: Decoder,
    arena: Arena,
    sequence: Sequence,
    ids: Tensor,
    *,
    policy: Policy,
    window: int,
    chunk: int,
) -> Reading[Tensor]:
    """Feed `ids` int64 `[tokens]` to the sequence in the arena. Returns the last hidden state `[1, hidden]`.

    A generator that stops after each (layer, chunk) with what `OnChunk` is told. In between other sequences may be
    decoded, in this arena's store too: the piece touches nothing outside the arena's span.

    Afterwards every layer's rows hold what the policy kept of the old rows and the new tokens, within the sequence's
    budget, packed to the left (`Arena.finish` makes room for decoding). The sequence's ids are extended. If anything
    raises on the way, the rows are spoilt: go back to a checkpoint, or drop the sequence.
    """
    layers = decoder.config.num_layers
    piece = _piece(decoder, sequence, ids, chunk)
    budget = sequence.budget
    evicting = policy.evicts and budget is not None and piece.total > budget
    kv_heads = decoder.config.num_kv_heads
    cascade = Cascade(layers, kv_heads, budget, window) if evicting and budget is not None else None
    limit = budget if evicting else None
    arena.begin(kept_limit(layers * kv_heads, budget=limit, tokens=piece.tokens, held=arena.kept_slots))
    hidden = decoder.embed(ids)  # [tokens, hidden]
    for index in range(layers):
        staged = arena.stage(index, piece.tokens, piece.first)
        if index == layers - 1:
            hidden = yield from _last_layer(decoder, index, hidden, staged, piece, sequence, window)
        else:
            yield from _whole_layer(decoder, index, hidden, staged, piece, sequence)
        _keep(decoder, arena, sequence, staged, index, piece, policy, cascade, window)
    sequence.ids.extend(ids.tolist())
    return hidden


def read(
    decoder: Decoder,
    arena: Arena,
    sequence: Sequence,
    ids: Tensor,
    *,
    policy: Policy,
    window: int,
    chunk: int,
    on_chunk: OnChunk | None = None,
) -> Tensor:
    """`reading` without a pause."""
    return read_through(reading(decoder, arena, sequence, ids, policy=policy, window=window, chunk=chunk), on_chunk)


def read_through(steps: Reading[Result], on_chunk: OnChunk | None = None) -> Result:
    """Run a reading to its end, telling `on_chunk` of each (layer, chunk). Returns what it returns."""
    while True:
        try:
            done = next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result
        if on_chunk:
            on_chunk(*done)


def read_all(decoder: Decoder, arena: Arena, sequence: Sequence, ids: Tensor, *, chunk: int) -> Tensor:
    """The last layer's hidden states of every token, `[tokens, hidden]`; nothing is kept in the arena."""
    piece = _piece(decoder, sequence, ids, chunk)
    arena.begin(0)
    hidden = decoder.embed(ids)
    for index in range(decoder.config.num_layers):
        staged = arena.stage(index, piece.tokens, piece.first)
        read_through(_whole_layer(decoder, index, hidden, staged, piece, sequence))
    return hidden


def _piece(decoder: Decoder, sequence: Sequence, ids: Tensor, chunk: int) -> Piece:
    assert sequence.rotary is not None, "a sequence gets its rotary frequencies before its first piece"
    tokens, first = ids.shape[0], sequence.total
    cos, sin = sequence.rotary.cos_sin(torch.arange(first, first + tokens, device=ids.device))
    work = None
    if ids.device.type == "cpu":
        work = Workspace(decoder.config, min(chunk, tokens), decoder.product_dtype, ids.device)
    return Piece(tokens, first, cos, sin, chunk, work)


def _whole_layer(
    decoder: Decoder,
    index: int,
    hidden: Tensor,
    staged: Staged,
    piece: Piece,
    sequence: Sequence,
) -> Reading[None]:
    """One decoder layer over all tokens, in place in `hidden`."""
    sliding = decoder.config.sliding_windows[index]
    for start, end in piece.chunks():
        layer = decoder.for_products(index)  # asked for again: a decode step may have widened another one meanwhile
        span = hidden[start:end]
        normed = decoder.attention_norm(layer, span, piece.work)
        cos, sin = piece.cos[start:end], piece.sin[start:end]
        _write_keys_values(decoder, layer, normed, staged, start, cos, sin, piece.work)
        queries = decoder.queries(layer, normed, cos, sin, piece.work)  # [heads, chunk, head_dim]
        if sequence.ring is not None and end > piece.tokens - sequence.ring.window:
            sequence.ring.write(index, piece.first + start, queries)
        attended = _attend_chunk(queries, staged, start, end, piece, decoder.scale, sliding)
        span += decoder.attention_output(layer, attended, piece.work)
        span += decoder.mlp(layer, decoder.mlp_norm(layer, span, piece.work), piece.work)
        yield index, end, piece.tokens


def _last_layer(
    decoder: Decoder,
    index: int,
    hidden: Tensor,
    staged: Staged,
    piece: Piece,
    sequence: Sequence,
    window: int,
) -> Reading[Tensor]:
    """The last layer where only the next token matters: keys of all, queries of the window, the rest of one token."""
    sliding = decoder.config.sliding_windows[index]
    for start, end in piece.chunks():
        layer = decoder.for_products(index)
        normed = decoder.attention_norm(layer, hidden[start:end], piece.work)
        cos, sin = piece.cos[start:end], piece.sin[start:end]
        _write_keys_values(decoder, layer, normed, staged, start, cos, sin, piece.work)
        yield index, end, piece.tokens
    layer = decoder.for_products(index)
    start = max(0, piece.tokens - (1 if sequence.ring is None else window))
    normed = decoder.attention_norm(layer, hidden[start:])
    queries = decoder.queries(layer, normed, piece.cos[start:], piece.sin[start:])
    if sequence.ring is not None:
        sequence.ring.write(index, piece.first + start, queries)
    attended = _attend_last(queries[:, -1], staged, piece, decoder.scale, sliding)
    last = hidden[-1:] + decoder.attention_output(layer, attended[:, None])
    last += decoder.mlp(layer, decoder.mlp_norm(layer, last))
    return last


def _write_keys_values(
    decoder: Decoder,
    layer: Layer,
    normed: Tensor,
    staged: Staged,
    start: int,
    cos: Tensor,
    sin: Tensor,
    work: Workspace | None,
) -> None:
    count = normed.shape[0]
    if staged.agree:
        columns = slice(staged.held[0] + start, staged.held[0] + start + count)
        decoder.keys_values(layer, normed, cos, sin, staged.keys[:, columns], staged.values[:, columns], work)
        return
    kv_heads, _, head_dim = staged.keys.shape
    keys, values = (staged.keys.new_empty(kv_heads, count, head_dim) for _ in range(2))
    decoder.keys_values(layer, normed, cos, sin, keys, values, work)
    for head, held in enumerate(staged.held):
        columns = slice(held + start, held + start + count)
        staged.keys[head, columns], staged.values[head, columns] = keys[head], values[head]


def _attend_chunk(
    queries: Tensor, staged: Staged, start: int, end: int, piece: Piece, scale: float, sliding: int | None
) -> Tensor:
    """Attention of a chunk's queries `[heads, chunk, head_dim]` over what is held and the tokens up to its end."""
    if not staged.agree:
        group = queries.shape[0] // len(staged.held)
        parts = [
            _attend_chunk(queries[head * group : (head + 1) * group], one, start, end, piece, scale, sliding)
            for head, one in enumerate(_per_head(staged))
        ]
        return torch.cat(parts)
    held = staged.held[0]
    mask, low = None, 0
    if sliding is not None and piece.total > sliding:
        # Where no query of the chunk sees the piece's first token, none sees what is held, which is older.
        unseen = max(0, start - sliding + 1)
        low = held + unseen if unseen else 0
        position = torch.arange(piece.first + start, piece.first + end, device=queries.device)
        alike = 1 if unseen or not held else None  # new tokens have the same positions in every head
        mask = SlidingMask(sliding, position, staged.position[:alike, low : held + end])
    keys, values = staged.keys[:, low : held + end], staged.values[:, low : held + end]
    return prefill_attention(queries, keys, values, scale=scale, past=held + start, sliding=mask)


def _attend_last(queries: Tensor, staged: Staged, piece: Piece, scale: float, sliding: int | None) -> Tensor:
    """Attention of the last token `[heads, head_dim]` over all columns."""
    if not staged.agree:
        group = queries.shape[0] // len(staged.held)
        parts = [
            _attend_last(queries[head * group : (head + 1) * group], one, piece, scale, sliding)
            for head, one in enumerate(_per_head(staged))
        ]
        return torch.cat(parts)
    hidden = None if sliding is None else staged.position <= piece.total - 1 - sliding
    return decode_attention(queries, staged.keys, staged.values, scale=scale, hidden=hidden)[0]


def _per_head(staged: Staged) -> list[Staged]:
    """A staged layer whose heads hold unequal numbers of tokens, as one staged layer per head."""
    ends = staged.lengths
    return [
        Staged(
            staged.keys[head : head + 1, :end],
            staged.values[head : head + 1, :end],
            staged.position[head : head + 1, :end],
            (staged.held[head],),
            staged.tokens,
        )
        for head, end in enumerate(ends)
    ]


def _keep(
    decoder: Decoder,
    arena: Arena,
    sequence: Sequence,
    staged: Staged,
    index: int,
    piece: Piece,
    policy: Policy,
    cascade: Cascade | None,
    window: int,
) -> None:
    """Deal the budget again over the layers read so far, shrink the earlier ones, and keep the best of this one."""
    if cascade is None or sequence.ring is None:
        arena.keep(index, staged, None, list(staged.lengths), None)
        return
    sliding = decoder.config.sliding_windows[index]
    queries, query_position = sequence.ring.read(index, piece.total)
    view = LayerView(
        layer=index,
        keys=staged.keys,
        positions=staged.position,
        queries=queries,
        query_positions=query_position,
        window=window,
        scale=decoder.scale,
        sliding_window=sliding,
        total=piece.total,
        lengths=None if staged.agree else staged.lengths,
    )
    scored = policy.score(view)
    floor = min(window, piece.total)
    chosen = _Chosen(scored.indicator, staged, piece.total - window, floor)
    caps = tuple(max(min(length, sliding or length) - floor, 0) for length in staged.lengths)
    weight = 1.0 if policy.allocation == "uniform" else scored.preference
    *earlier, lengths = cascade.add(LayerClaim(floor, caps, weight, rank=chosen.rank))
    for before, shares in enumerate(earlier):
        arena.shrink(before, shares)
    arena.keep(index, staged, chosen.order(lengths), lengths, scored.indicator)


class _Chosen:
    """The order in which a staged layer's columns are kept, made once, for as many as are asked for first."""

    def __init__(self, indicator: Tensor, staged: Staged, window_start: int, floor: int) -> None:
        self.indicator, self.staged, self.window_start, self.floor = indicator, staged, window_start, floor
        self._order: Tensor | None = None

    def order(self, lengths: list[int]) -> Tensor:
        """int64 `[kv_heads, >= max(lengths)]`: columns, the most worth keeping first."""
        if self._order is None:
            staged = self.staged
            self._order = row_order(self.indicator, staged.position, self.window_start, staged.lengths, lengths)
        return self._order

    def rank(self, limit: int) -> list[np.ndarray]:
        """Per head the scores of its best columns before the window, at most `limit`, best first."""
        lengths = [min(length, self.floor + limit) for length in self.staged.lengths]
        order = self.order(lengths)[:, self.floor :].clamp_min(0)
        ranked = self.indicator.gather(1, order).cpu().numpy()
        return [row[: length - self.floor] for row, length in zip(ranked, lengths, strict=True)]
