"""Greedy replies out of what policies kept of one full cache: decoded together, from an arena of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from ...cache.arena import Arena
from ...cache.layout import ArenaSize, arena_size
from ...cache.saved_rows import SavedRows
from ...cache.shared import SharedArena
from ..prefill import read_through
from ..runner import Runner
from ..sequence import Sequence as TextSequence
from .fidelity import allowed
from .kept import Kept
from .study import Reading

Ended = Callable[[list[int]], bool]


@torch.inference_mode()
def greedy_replies(
    runner: Runner,
    reading: Reading,
    kept: Sequence[Kept | None],
    suffix: list[int],
    tokens: int,
    *,
    stop_ids: frozenset[int] = frozenset(),
    ended: Ended | None = None,
    not_first: frozenset[int] = frozenset(),
) -> list[list[int]]:
    """For each of `kept` the likeliest reply of at most `tokens`, a stop token left out; `ended` may end it earlier.

    No reply begins with an id of `not_first`. The suffix is read as a piece on top of the kept rows, which are copied
    out of the full cache, or a policy's own prefill: both stay as they are. As many are decoded together as hold no
    more slots than the full cache does; the full cache speaks once.
    """
    found: dict[int, list[int]] = {}
    for group in _groups(kept, reading.tokens * runner.layout.num_layers * runner.layout.num_kv_heads):
        sizes = [_size(runner, reading, kept[number], len(suffix), tokens) for number in group]
        shared = SharedArena(runner.layout, runner.decoder.device, batch=len(group))
        shared.reserve(sizes)
        speakers = []
        for number, size in zip(group, sizes, strict=True):
            arena = shared.admit(size)
            sequence, logits = _begin(runner, reading, arena, kept[number], suffix, tokens)
            arena.settle()
            speakers.append(_Speaker(arena, sequence, logits))
        if tokens > 1:
            runner.step.prepare(speakers[0].arena, speakers[0].sequence, window=runner.cache.window)
        talking = speakers
        while talking:
            for one in talking:
                one.say(runner, tokens, stop_ids, ended, not_first)
            talking = [one for one in talking if not one.over]
            if talking:
                arenas, sequences = [one.arena for one in talking], [one.sequence for one in talking]
                said = [one.found[-1] for one in talking]
                logits = runner.batch_step(shared, arenas, sequences, said, window=runner.cache.window)
                for one, row in zip(talking, logits, strict=True):
                    one.logits = row
        found.update((number, one.found) for number, one in zip(group, speakers, strict=True))
    whole = next((number for number, one in enumerate(kept) if one is None), None)
    return [list(found[number if one is not None or whole is None else whole]) for number, one in enumerate(kept)]


@dataclass(eq=False)
class _Speaker:
    """A reply in the making. logits: fp32 `[vocab]` of its next token."""

    arena: Arena
    sequence: TextSequence
    logits: Tensor
    found: list[int] = field(default_factory=list)
    over: bool = False

    def say(
        self, runner: Runner, tokens: int, stop_ids: frozenset[int], ended: Ended | None, not_first: frozenset[int]
    ) -> None:
        """Choose the next token, and see whether the reply is over."""
        logits = allowed(runner, self.logits)
        if not_first and not self.found:
            logits[list(not_first)] = float("-inf")
        token = int(logits.argmax())
        if token in stop_ids:
            self.over = True
            return
        self.found.append(token)
        self.over = len(self.found) == tokens or (ended is not None and ended(self.found))


def _groups(kept: Sequence[Kept | None], most: int) -> Iterator[list[int]]:
    """Which of `kept` are decoded together: `most` slots at once, everything (None) by itself and once."""
    group: list[int] = []
    slots = 0
    for number, one in enumerate(kept):
        if one is None:
            continue
        if group and slots + one.slots > most:
            yield group
            group, slots = [], 0
        group.append(number)
        slots += one.slots
    if group:
        yield group
    yield from [[number] for number, one in enumerate(kept) if one is None][:1]


def _size(runner: Runner, reading: Reading, kept: Kept | None, suffix: int, tokens: int) -> ArenaSize:
    lengths = _lengths(runner, reading, kept)
    return arena_size(
        runner.layout,
        budget=None,
        tokens=suffix,
        new_tokens=tokens + 1,
        held=int(lengths.sum()),
        held_longest=int(lengths.max()),
    )


def _lengths(runner: Runner, reading: Reading, kept: Kept | None) -> np.ndarray:
    """int64 `[layers, kv_heads]`."""
    layout = runner.layout
    if kept is None:
        return np.full((layout.num_layers, layout.num_kv_heads), reading.tokens, dtype=np.int64)
    return np.array(kept.lengths, dtype=np.int64)


def _begin(
    runner: Runner, reading: Reading, arena: Arena, kept: Kept | None, suffix: list[int], tokens: int
) -> tuple[TextSequence, Tensor]:
    """Put the kept rows into an empty arena and read the suffix; the logits of the first token with it."""
    saved = kept_rows(runner, reading, kept)
    saved.capacity = saved.length if suffix else saved.length + tokens + 1
    arena.load(saved)
    sequence = TextSequence(ids=reading.sequence.ids[: reading.tokens], rotary=reading.sequence.rotary)
    if not suffix:
        return sequence, reading.logits.clone()
    return sequence, read_through(runner.reading(arena, sequence, suffix, tokens + 1))


def kept_rows(runner: Runner, reading: Reading, kept: Kept | None) -> SavedRows:
    """A packed copy of the rows that a policy keeps, out of the full cache in the runner's arena or its own prefill."""
    if kept is not None and kept.rows is not None:
        return replace(kept.rows)
    arena, layout = runner.tenancy.arena, runner.layout
    everything = torch.arange(reading.tokens, device=runner.decoder.device)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    positions: list[Tensor] = []
    length = _lengths(runner, reading, kept)
    for layer in range(layout.num_layers):
        for head in range(layout.num_kv_heads):
            columns = everything if kept is None else kept.columns(layer, head)
            row = arena.row(layer, head)
            if kept is None:
                pair = row[0][: reading.tokens], row[1][: reading.tokens]
            else:
                pair = kept.numbers(layer, head, row[0], row[1])
            keys.append(pair[0])
            values.append(pair[1])
            positions.append(columns.to(torch.int32))
    position = torch.cat(positions)
    score = torch.zeros(len(position), device=position.device)
    return SavedRows(torch.cat(keys), torch.cat(values), position, score, length, length.copy())
