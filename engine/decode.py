"""One decode step in plain torch: the reference of every faster runner of a step.

`grow` writes the new token behind each row. `hold` keeps a row at its limit: the newcomer is written into the one spare
slot behind the row, attention runs over row and newcomer, and then it changes places with the slot to which the current
query paid least attention, outside the last `window` tokens. So the loser stays in the spare slot, aside, until the
next step writes there, and the step can be undone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..cache.arena import Arena
from ..cache.holds.base import HoldRule
from ..cache.packed_arena import PackedArena
from ..models.decoder import Decoder
from .attention import Attention, Sdpa, SlidingMask
from .attention.tables import RowTables
from .holding import held_attention
from .packed_attention import packed_attention
from .packed_holding import cut_packed
from .sequence import Sequence

SDPA = Sdpa()


def step(
    decoder: Decoder,
    arena: Arena,
    sequence: Sequence,
    token: int,
    *,
    window: int,
    attention: Attention = SDPA,
    rule: HoldRule | None = None,
) -> Tensor:
    """Feed one token. Returns the next token's logits fp32 `[vocab]`; rows and the sequence's ids are extended.

    The rows must have room (`Arena.capacity`): the caller checks before the first step.
    """
    return batch_step(decoder, [arena], [sequence], [token], window=window, attention=attention, rules=[rule])[0]


def batch_step(
    decoder: Decoder,
    arenas: list[Arena],
    sequences: list[Sequence],
    tokens: list[int],
    *,
    window: int,
    attention: Attention = SDPA,
    rules: list[HoldRule | None] | None = None,
    together: bool | None = None,
) -> Tensor:
    """Feed one token to each of n sequences. Returns the next tokens' logits fp32 `[n, vocab]`.

    Each sequence attends over its own rows, as long as they are. A ragged backend reads the rows of all sequences in
    one launch; their arenas then share a store. `together`: every matrix meets the n tokens in one product, as on a
    GPU. Otherwise, on a CPU, a layer is widened once and meets one token after another: a product with more rows adds
    up in another order, and a reply would depend on its neighbours. With a hold rule, one of `rules` for each sequence,
    rows are gone through one by one (`holding.py`; packed ones behind the step, `packed_holding.py`); without one, full
    rows give up the slot that is attended to least.
    """
    rules = rules or [None] * len(tokens)
    for arena in arenas:
        if isinstance(arena, PackedArena):
            arena.flush()
    ids = torch.tensor(tokens, device=decoder.device)
    cos, sin = _angles(sequences, decoder.device)
    hidden = decoder.embed(ids)  # [n, hidden]
    config = decoder.config
    tables = None
    if not any(rules) and attention.ragged and all(arena.store is arenas[0].store for arena in arenas):
        tables = RowTables(arenas, [one.limit for one in sequences], [one.total for one in sequences])
    count = len(tokens)
    if together is None:
        together = decoder.device.type != "cpu"
    parts = [slice(0, count)] if together else [slice(i, i + 1) for i in range(count)]
    for index in range(config.num_layers):
        layer = decoder.for_step(index, count)
        queries = hidden.new_empty(config.num_heads, count, config.head_dim)
        keys, values = (hidden.new_empty(config.num_kv_heads, count, config.head_dim) for _ in range(2))
        for part in parts:
            normed = decoder.attention_norm(layer, hidden[part])
            queries[:, part] = decoder.queries(layer, normed, cos[part], sin[part])
            decoder.keys_values(layer, normed, cos[part], sin[part], keys[:, part], values[:, part])
        for i, sequence in enumerate(sequences):
            if sequence.ring is not None:
                sequence.ring.write(index, sequence.total, queries[:, i : i + 1])
        if tables is not None:
            attended = _ragged_attention(decoder, tables, index, queries, keys, values, window, attention)
        else:
            attended = torch.empty_like(queries)
            for i, (arena, sequence, rule) in enumerate(zip(arenas, sequences, rules, strict=True)):
                one = slice(i, i + 1)
                if isinstance(arena, PackedArena):
                    attended[:, i] = packed_attention(
                        arena,
                        index,
                        queries[:, i],
                        keys[:, i],
                        values[:, i],
                        sequence.total,
                        attention,
                        scale=decoder.scale,
                        sliding=config.sliding_windows[index],
                    )
                    continue
                if rule is not None and sequence.limit is not None:
                    attended[:, i] = held_attention(
                        decoder, arena, sequence, index, queries[:, i], keys[:, one], values[:, one], window, rule
                    )
                    continue
                attended[:, i] = _layer_attention(
                    decoder, arena, sequence, index, queries[:, i], keys[:, one], values[:, one], window, attention
                )
        for part in parts:
            hidden[part] += decoder.attention_output(layer, attended[:, part])
            hidden[part] += decoder.mlp(layer, decoder.mlp_norm(layer, hidden[part]))
    if tables is not None:
        tables.advance()
    for sequence, token, rule in zip(sequences, tokens, rules, strict=True):
        sequence.ids.append(token)
        if rule is not None and rule.keeps_scores:
            sequence.read = sequence.total  # what lies with its row is a score like the others
    for arena, sequence, rule in zip(arenas, sequences, rules, strict=True):
        if rule is not None and sequence.limit is not None and isinstance(arena, PackedArena):
            cut_packed(decoder, arena, sequence, window, rule)
    return torch.cat([decoder.logits(hidden[part]) for part in parts])


def _angles(sequences: list[Sequence], device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines fp32 `[n, head_dim / 2]`, each sequence's at its own position and by its own frequencies."""
    pairs = []
    for sequence in sequences:
        assert sequence.rotary is not None, "decoding follows a prefill"
        pairs.append(sequence.rotary.cos_sin(torch.tensor([sequence.total], device=device)))
    cos, sin = zip(*pairs, strict=True)
    return torch.cat(cos), torch.cat(sin)


def _ragged_attention(
    decoder: Decoder,
    tables: RowTables,
    layer: int,
    queries: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    window: int,
    attention: Attention,
) -> Tensor:
    """`_layer_attention` for all n sequences at once: queries and the result `[heads, n, head_dim]`."""
    rows, full, packed = tables.layer(layer), tables.any_full(layer), tables.packed(layer)
    attention.store_newcomers(rows, new_keys.transpose(0, 1), new_values.transpose(0, 1))
    by_row, sliding = queries.transpose(0, 1), decoder.config.sliding_windows[layer]
    if packed is not None:
        assert not full, "packed rows are cut between steps"
        return attention.attend_packed(by_row, rows, packed, scale=decoder.scale, sliding=sliding).transpose(0, 1)
    out, weights = attention.attend_rows(by_row, rows, scale=decoder.scale, sliding=sliding, weights=full)
    if weights is not None:
        attention.exchange_least_attended(rows, weights, tables.limit[layer], window=window)
    return out.transpose(0, 1)


def _layer_attention(
    decoder: Decoder,
    arena: Arena,
    sequence: Sequence,
    layer: int,
    queries: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    window: int,
    attention: Attention,
) -> Tensor:
    """Write the newcomer `[kv_heads, 1, head_dim]` into each row, attend, and let full rows give up a slot."""
    position, sliding = sequence.total, decoder.config.sliding_windows[layer]
    kv_heads = arena.layout.num_kv_heads
    together = arena.agrees(layer)
    group = queries.shape[0] // kv_heads
    outputs = []
    for heads in [slice(0, kv_heads)] if together else [slice(head, head + 1) for head in range(kv_heads)]:
        if together:
            keys, values, positions = arena.rows(layer, extra=1)
        else:
            keys, values, positions = (table[None] for table in arena.row(layer, heads.start, extra=1))
        keys[:, -1], values[:, -1], positions[:, -1] = new_keys[heads, 0], new_values[heads, 0], position
        mask = None
        if sliding is not None:
            mask = SlidingMask(sliding, torch.tensor([position], device=positions.device), positions)
        part = queries[heads.start * group : heads.stop * group]
        output, weights = attention.decode(part, keys, values, scale=decoder.scale, sliding=mask)
        outputs.append(output)
        full = sequence.limit is not None and bool((arena.length[layer, heads] >= sequence.limit[layer, heads]).all())
        if full:
            assert weights is not None, "a backend without weights was chosen for hold"
            losers = least_attended(weights, positions, position, window)
            for table in (keys, values, positions):
                exchange(table, losers)
        else:
            arena.length[layer, heads] += 1
    return torch.cat(outputs)


def least_attended(weights: Tensor, positions: Tensor, position: int, window: int) -> Tensor:
    """Per KV head the column that gets least attention, outside the last `window` tokens; of equals the oldest.

    `weights` `[kv_heads, group, columns]`, `positions` `[kv_heads, columns]`; returns int64 `[kv_heads]`. A slot's
    score is the mean over the query heads of its KV head.
    """
    scores = weights.mean(dim=1)
    scores = scores.masked_fill(positions > position - window, float("inf"))
    lowest = scores == scores.amin(dim=1, keepdim=True)
    return torch.where(lowest, positions, torch.iinfo(positions.dtype).max).argmin(dim=1)


def exchange(table: Tensor, columns: Tensor) -> None:
    """Let the last column and `columns[head]` change places, in `[kv_heads, columns, ...]`."""
    heads = torch.arange(table.shape[0], device=table.device)
    chosen, newcomer = table[heads, columns], table[:, -1].clone()
    table[heads, columns] = newcomer
    table[:, -1] = chosen
