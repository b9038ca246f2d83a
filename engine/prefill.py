"""Reading a piece of text: layer by layer, in chunks of tokens inside the layer, evicting as soon as a layer is read.

Only one layer's keys and values exist in full at any time. A layer's weight is widened once and serves every chunk; the
hidden states are updated in place; no tensor has a row per token and a column per token or per vocabulary entry.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from ..cache.arena import Arena
from ..cache.layout import kept_limit
from ..cache.policies.base import Policy
from ..cache.staged import Staged
from ..cache.view import LayerView, WindowPass
from ..models.decoder import Decoder, Layer
from ..models.workspace import Workspace
from .attention import Attention, Sdpa
from .inputs import ALL_QUERIES, LayerInputs
from .keeping import keep_best
from .piece import Piece, layer_view
from .sequence import Sequence
from .short import ShortPieces
from .staged_attention import attend_chunk, attend_last

OnChunk = Callable[[int, int, int], None]  # (layer, tokens of this layer done, tokens of the piece)
SDPA = Sdpa()
Result = TypeVar("Result")
Reading = Generator[tuple[int, int, int], None, Result]  # stops with what OnChunk is told


class Observer(Protocol):
    """Looks at every layer of a piece as a policy would, whatever the piece's own policy does with it."""

    @property
    def needs(self) -> frozenset[str]:
        """The inputs it reads beyond keys and positions."""

    def layer(self, staged: Staged, view: LayerView) -> None:
        """A layer that has been read; nothing of it stays valid afterwards."""


def reading(
    decoder: Decoder,
    arena: Arena,
    sequence: Sequence,
    ids: Tensor,
    *,
    policy: Policy,
    window: int,
    chunk: int,
    separators: frozenset[int] | None = None,
    attention: Attention = SDPA,
    window_pass: WindowPass | None = None,
    observer: Observer | None = None,
    short: ShortPieces | None = None,
) -> Reading[Tensor]:
    """Feed `ids` int64 `[tokens]` to the sequence in the arena. Returns the last hidden state `[1, hidden]`.

    A generator that stops after each (layer, chunk) with what `OnChunk` is told. In between other sequences may be
    decoded, in this arena's store too: the piece touches nothing outside the arena's span. An observer needs a sequence
    with a ring of queries. `short` works the products, of a piece that it takes.

    Afterwards every layer's rows hold what the policy kept of the old rows and the new tokens, within the sequence's
    budget, packed to the left (`Arena.finish` makes room for decoding). The sequence's ids are extended. If anything
    raises on the way, the rows are spoilt: go back to a checkpoint, or drop the sequence.
    """
    layers = decoder.config.num_layers
    budget = sequence.budget
    evicting = policy.evicts and budget is not None and sequence.total + ids.shape[0] > budget
    needs = policy.needs if evicting else frozenset[str]()
    if observer is not None:
        needs |= observer.needs
    piece = _piece(decoder, sequence, ids, chunk, attention, needs, short)
    kv_heads = decoder.config.num_kv_heads
    cascade = policy.cascade(layers, kv_heads, budget, window) if evicting and budget is not None else None
    limit = budget if evicting and not policy.late else None
    longest = int(arena.held.max()) + piece.tokens
    arena.begin(kept_limit(layers * kv_heads, budget=limit, tokens=piece.tokens, held=arena.kept_slots), longest)
    hidden = decoder.embed(ids)  # [tokens, hidden]
    for index in range(layers):
        staged = arena.stage(index, piece.tokens, piece.first)
        inputs = _inputs(decoder, index, staged, piece) if cascade is not None or observer is not None else None
        last = index == layers - 1 and not piece.needs & ALL_QUERIES
        if piece.short is not None:
            hidden = yield from _short_layer(decoder, index, hidden, staged, piece, sequence, inputs, last=last)
        elif last:
            hidden = yield from _last_layer(decoder, index, hidden, staged, piece, sequence, window)
        else:
            yield from _whole_layer(decoder, index, hidden, staged, piece, sequence, inputs)
        if inputs is None or sequence.ring is None:
            arena.keep(index, staged, None, list(staged.lengths), None)
            continue
        view = layer_view(decoder, sequence, staged, index, piece, window, inputs, separators)
        view = replace(view, window_pass=window_pass)
        if observer is not None:
            observer.layer(staged, view)
        if cascade is None:
            arena.keep(index, staged, None, list(staged.lengths), None)
            continue
        keep_best(arena, staged, view, policy.score(view), cascade, policy.merger)
    sequence.ids.extend(ids.tolist())
    sequence.read = sequence.total
    return hidden[-1:]


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


def read_all(
    decoder: Decoder, arena: Arena, sequence: Sequence, ids: Tensor, *, chunk: int, attention: Attention = SDPA
) -> Tensor:
    """The last layer's hidden states of every token, `[tokens, hidden]`; nothing is kept in the arena."""
    piece = _piece(decoder, sequence, ids, chunk, attention)
    arena.begin(0)
    hidden = decoder.embed(ids)
    for index in range(decoder.config.num_layers):
        staged = arena.stage(index, piece.tokens, piece.first)
        read_through(_whole_layer(decoder, index, hidden, staged, piece, sequence))
    return hidden


def _piece(
    decoder: Decoder,
    sequence: Sequence,
    ids: Tensor,
    chunk: int,
    attention: Attention,
    needs: frozenset[str] = frozenset(),
    short: ShortPieces | None = None,
) -> Piece:
    assert sequence.rotary is not None, "a sequence gets its rotary frequencies before its first piece"
    tokens, first = ids.shape[0], sequence.total
    cos, sin = sequence.rotary.cos_sin(torch.arange(first, first + tokens, device=ids.device))
    work = None
    if ids.device.type == "cpu" and short is None:
        work = Workspace(decoder.config, min(chunk, tokens), decoder.product_dtype, ids.device)
    return Piece(ids, tokens, first, cos, sin, chunk, work, attention, needs, short)


def _whole_layer(
    decoder: Decoder,
    index: int,
    hidden: Tensor,
    staged: Staged,
    piece: Piece,
    sequence: Sequence,
    inputs: LayerInputs | None = None,
) -> Reading[None]:
    """One decoder layer over all tokens, in place in `hidden`."""
    sliding = decoder.config.sliding_windows[index]
    for start, end in piece.chunks():
        layer = decoder.for_products(index)  # asked for again: a decode step may have widened another one meanwhile
        span = hidden[start:end]
        normed = decoder.attention_norm(layer, span, piece.work)
        cos, sin = piece.cos[start:end], piece.sin[start:end]
        if inputs is not None:
            inputs.hidden(start, normed)
        _write_keys_values(decoder, layer, normed, staged, start, cos, sin, piece.work)
        queries = decoder.queries(layer, normed, cos, sin, piece.work)  # [heads, chunk, head_dim]
        if sequence.ring is not None and end > piece.tokens - sequence.ring.window:
            sequence.ring.write(index, piece.first + start, queries)
        lse, before = None, None
        if inputs is not None:
            before = inputs.before(span)
            if inputs.wants_log_sum_exp and (sliding is None or piece.total <= sliding):
                lse = torch.empty(queries.shape[:2], device=queries.device)
        attended = attend_chunk(piece.attention, queries, staged, start, end, piece.first, decoder.scale, sliding, lse)
        if inputs is not None:
            inputs.queries(queries, cos, sin, start, lse)
        span += decoder.attention_output(layer, attended, piece.work)
        if inputs is not None:
            inputs.after(before, span)
        span += decoder.mlp(layer, decoder.mlp_norm(layer, span, piece.work), piece.work)
        yield index, end, piece.tokens


def _short_layer(
    decoder: Decoder,
    index: int,
    hidden: Tensor,
    staged: Staged,
    piece: Piece,
    sequence: Sequence,
    inputs: LayerInputs | None,
    *,
    last: bool,
) -> Reading[Tensor]:
    """`_whole_layer`, or with `last` `_last_layer`, of a piece that `piece.short` takes: one chunk."""
    short, tokens, sliding = piece.short, piece.tokens, decoder.config.sliding_windows[index]
    assert short is not None
    read = (index, hidden, piece.cos, piece.sin, staged, piece.first)
    wants = inputs is not None and inputs.wants_log_sum_exp and (sliding is None or piece.total <= sliding)
    if last or short.attends(tokens, staged.held):
        queries, lse = short.layer(*read, last=last)
    else:
        queries = short.before_attention(*read)
        lse = torch.empty(queries.shape[:2])
        about = (staged, 0, tokens, piece.first, decoder.scale, sliding, lse if wants else None)
        short.after_attention(index, attend_chunk(piece.attention, queries, *about), hidden, staged)
    if sequence.ring is not None:
        sequence.ring.write(index, piece.first, queries)
    if inputs is not None and not last:
        inputs.queries(queries, piece.cos, piece.sin, 0, lse if wants else None)
    yield index, piece.tokens, piece.tokens
    return hidden[-1:] if last else hidden


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
    attended = attend_last(piece.attention, queries[:, -1], staged, piece.total, decoder.scale, sliding)
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


def _inputs(decoder: Decoder, index: int, staged: Staged, piece: Piece) -> LayerInputs:
    config = decoder.config
    return LayerInputs(
        piece.needs,
        staged,
        first=piece.first,
        scale=decoder.scale,
        sliding=config.sliding_windows[index],
        heads=config.num_heads,
    )
