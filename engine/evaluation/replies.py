"""Greedy replies out of what a policy kept of one full cache, from an arena of their own."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ...cache.arena import Arena
from ...cache.layout import arena_size
from ...cache.saved_rows import SavedRows
from ..prefill import read_through
from ..runner import Runner
from ..sequence import Sequence as TextSequence
from .fidelity import allowed
from .study import Kept, Reading

Ended = Callable[[list[int]], bool]


@torch.inference_mode()
def greedy_reply(
    runner: Runner,
    reading: Reading,
    kept: Kept | None,
    suffix: list[int],
    tokens: int,
    *,
    stop_ids: frozenset[int] = frozenset(),
    ended: Ended | None = None,
    not_first: frozenset[int] = frozenset(),
) -> list[int]:
    """The likeliest reply of at most `tokens`, a stop token left out; `ended` may end it earlier, and it does not begin
    with an id of `not_first`.

    The suffix is read as a piece on top of the kept rows, which are copied out of the full cache: that one stays as it
    is, for the next policy.
    """
    saved = kept_rows(runner, reading, kept)
    held = int(saved.length.sum())
    size = arena_size(
        runner.layout,
        budget=None,
        tokens=len(suffix),
        new_tokens=tokens + 1,
        held=held,
        held_longest=int(saved.length.max()),
    )
    arena = Arena(runner.layout, size, runner.decoder.device)
    saved.capacity = saved.length if suffix else saved.length + tokens + 1
    arena.load(saved)
    sequence = TextSequence(ids=reading.sequence.ids[: reading.tokens], rotary=reading.sequence.rotary)
    logits = reading.logits.clone()
    if suffix:
        logits = read_through(runner.reading(arena, sequence, suffix, tokens + 1))
    if tokens > 1:
        runner.step.prepare(arena, sequence, window=runner.cache.window)
    found: list[int] = []
    while len(found) < tokens:
        logits = allowed(runner, logits)
        if not_first and not found:
            logits[list(not_first)] = float("-inf")
        token = int(logits.argmax())
        if token in stop_ids:
            break
        found.append(token)
        if len(found) == tokens or (ended is not None and ended(found)):
            break
        logits = runner.step(arena, sequence, token, window=runner.cache.window)
    return found


def kept_rows(runner: Runner, reading: Reading, kept: Kept | None) -> SavedRows:
    """A packed copy of the rows that a policy keeps, out of the full cache in the runner's arena."""
    arena, layout = runner.tenancy.arena, runner.layout
    everything = torch.arange(reading.tokens, device=runner.decoder.device)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    positions: list[Tensor] = []
    length = np.zeros((layout.num_layers, layout.num_kv_heads), dtype=np.int64)
    for layer in range(layout.num_layers):
        for head in range(layout.num_kv_heads):
            columns = everything if kept is None else kept.columns(layer, head)
            row = arena.row(layer, head)
            keys.append(row[0].index_select(0, columns))
            values.append(row[1].index_select(0, columns))
            positions.append(columns.to(torch.int32))
            length[layer, head] = len(columns)
    position = torch.cat(positions)
    score = torch.zeros(len(position), device=position.device)
    return SavedRows(torch.cat(keys), torch.cat(values), position, score, length, length.copy())
