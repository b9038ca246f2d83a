"""A decode step's attention over rows that a hold rule keeps at their limit: plain torch, one row at a time.

The rule `attention` at every step, which every runner has in a form of its own, does not come here (see `decode.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..cache.arena import Arena
from ..cache.holds.base import AtIntervals, HeldRow, HoldRule, OneByOne, best
from ..models.decoder import Decoder
from .attention import SlidingMask
from .attention.sdpa import decode_attention
from .sequence import Sequence


def held_attention(
    decoder: Decoder,
    arena: Arena,
    sequence: Sequence,
    layer: int,
    queries: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    window: int,
    rule: HoldRule,
) -> Tensor:
    """Write the newcomer `[kv_heads, 1, head_dim]` into each row and attend: `[heads, head_dim]`.

    Rows at their limit then give up a slot, or are cut back where the rule works at intervals; others grow by one.
    """
    assert sequence.limit is not None, "a rule was chosen for rows without a limit"
    position = sequence.total
    group = queries.shape[0] // arena.layout.num_kv_heads
    rows, outputs = [], []
    for head in range(arena.layout.num_kv_heads):
        keys, values, positions = (table[None] for table in arena.row(layer, head, extra=1))
        scores = _scores(arena, layer, head, extra=1)
        keys[:, -1], values[:, -1], positions[:, -1] = new_keys[head], new_values[head], position
        scores[-1] = 0.0
        part = queries[head * group : (head + 1) * group]
        output, weights = attend_row(decoder, layer, position, part, keys, values, positions)
        outputs.append(output)
        rows.append(HeldRow(weights[0], positions[0], scores))
    if isinstance(rule, OneByOne) and rule.every == 1:
        _give_up(arena, layer, rows, rule.losers(rows, position, window), sequence)
    else:
        arena.length[layer] += 1
        _cut_back(decoder, arena, layer, rows, sequence, position + 1, window, rule)
    return torch.cat(outputs)


def cut_grown(decoder: Decoder, arena: Arena, sequence: Sequence, window: int, rule: HoldRule) -> None:
    """Between two steps of any runner: cut rows that have grown by the rule's interval beyond their limit.

    For rules that ask for nothing but at their cuts. The newest query's attention is worked anew from the ring.
    """
    assert sequence.limit is not None
    assert sequence.ring is not None, "a rule needs the votes of a sequence"
    newest, cut = sequence.total - 1, False
    for layer in range(arena.layout.num_layers):
        if not (arena.length[layer] >= sequence.limit[layer] + rule.every).any():
            continue
        cut, rows = True, []
        queries = sequence.ring.read(layer, sequence.total)[0][:, -1]  # [heads, head_dim]
        group = queries.shape[0] // arena.layout.num_kv_heads
        for head in range(arena.layout.num_kv_heads):
            keys, values, positions = (table[None] for table in arena.row(layer, head))
            scores = _scores(arena, layer, head)
            if rule.keeps_scores:  # a step leaves none with a newcomer
                scores.masked_fill_(positions[0] >= sequence.read, 0.0)
            part = queries[head * group : (head + 1) * group]
            weights = attend_row(decoder, layer, newest, part, keys, values, positions)[1]
            rows.append(HeldRow(weights[0], positions[0], scores))
        _cut_back(decoder, arena, layer, rows, sequence, sequence.total, window, rule)
    if cut and rule.keeps_scores:
        sequence.read = sequence.total


def attend_row(
    decoder: Decoder, layer: int, position: int, queries: Tensor, keys: Tensor, values: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention of one KV head's queries `[group, head_dim]` at a position: the output, and weights `[1, group, n]`."""
    sliding, hidden = decoder.config.sliding_windows[layer], None
    if sliding is not None:
        at = torch.tensor([position], device=positions.device)
        hidden = ~SlidingMask(sliding, at, positions).visible(1)[:, 0, 0]
    return decode_attention(queries, keys, values, scale=decoder.scale, hidden=hidden)


def start_rule(arena: Arena, rule: HoldRule, *, goes_on: bool) -> None:
    """After a prefill: slots that a rule keeps scores with begin at 0, unless those of the prefill are of its kind."""
    if not rule.keeps_scores or goes_on:
        return
    for layer in range(arena.layout.num_layers):
        for head in range(arena.layout.num_kv_heads):
            _scores(arena, layer, head).zero_()


def _scores(arena: Arena, layer: int, head: int, extra: int = 0) -> Tensor:
    """The scores of a row's slots, no copy."""
    start = int(arena.offset[layer, head])
    return arena.score[start : start + int(arena.length[layer, head]) + extra]


def _give_up(arena: Arena, layer: int, rows: list[HeldRow], losers: list[int], sequence: Sequence) -> None:
    """Let the newcomer of each full row change places with its loser; the loser stays behind the row for one step."""
    assert sequence.limit is not None
    for head, (row, loser) in enumerate(zip(rows, losers, strict=True)):
        if arena.length[layer, head] < sequence.limit[layer, head]:
            arena.length[layer, head] += 1
            continue
        keys, values, positions = arena.row(layer, head, extra=1)
        for table in (keys, values, positions, row.scores):
            old = table[loser].clone()
            table[loser] = table[-1]
            table[-1] = old


def _cut_back(
    decoder: Decoder,
    arena: Arena,
    layer: int,
    rows: list[HeldRow],
    sequence: Sequence,
    total: int,
    window: int,
    rule: HoldRule,
) -> None:
    """Cut rows that have grown by the rule's interval beyond their limit, the newest token being the `total`-th."""
    assert sequence.limit is not None
    due = arena.length[layer] >= sequence.limit[layer] + rule.every
    worth = None
    if isinstance(rule, OneByOne) and (rule.keeps_scores or due.any()):
        worth = rule.worth(rows, total - 1)
    for head in due.nonzero()[0].tolist():
        limit = int(sequence.limit[layer, head])
        keys, values, positions = arena.row(layer, head)
        scores = _scores(arena, layer, head)
        if worth is not None:
            chosen = best(worth[head], positions, limit, window)
            kept = scores[chosen]
        else:
            assert isinstance(rule, AtIntervals)
            assert sequence.ring is not None
            group = sequence.ring.heads // arena.layout.num_kv_heads
            own = sequence.ring.read(layer, total)[0][head * group : (head + 1) * group]
            chosen, kept = rule.cut(keys, positions, scores, own, decoder.scale, limit, window)
        for table in (keys, values, positions):
            table[:limit] = table[chosen]
        scores[:limit] = kept
        arena.length[layer, head] = limit
