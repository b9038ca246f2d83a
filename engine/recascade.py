"""Slicing the cake anew while a reply is written: every so many steps the layers' preferences are measured again.

A step of decoding with `hold` gives up a slot of a row for a newcomer of the same row, so each layer keeps the share
that the prompt gave it. Here, after every so many tokens, the window's queries (the ring: by then the reply's own) vote
once more on what each layer holds, and the same number of slots is dealt over the layers by the preferences that come
of it. A layer that gets less drops what is wanted least at once; one that gets more grows by the newcomers that follow,
no further than until it is time again, without giving up a slot for them. Nothing that was dropped comes back, and at
no step are there more slots than before.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ..cache.arena import Arena
from ..cache.budget import deal_seats
from ..cache.policies.base import LayerScore, Policy
from ..cache.row_order import row_order
from ..cache.view import LayerView
from ..models.decoder import Decoder
from .sequence import Sequence
from .stepper import OnWait, Step


class RecascadingStep:
    """Another step, in front of which the cake is sliced anew when it is time."""

    def __init__(
        self, step: Step, decoder: Decoder, policy: Callable[[int | None], Policy], every: int, spare: int
    ) -> None:
        """`policy` of a budget is one of layer weights, heads sharing equally. spare: slots of a held row behind its
        limit."""
        self._step, self._decoder, self._policy, self._every, self._spare = step, decoder, policy, every, spare

    @property
    def at_hand(self) -> bool:
        """As the other step's."""
        return self._step.at_hand

    def __call__(self, arena: Arena, sequence: Sequence, token: int, *, window: int) -> Tensor:
        """See `Step`."""
        if is_due(arena, sequence, self._every):
            policy = self._policy(sequence.budget)
            recascade(self._decoder, arena, sequence, policy, window=window, every=self._every, spare=self._spare)
        return self._step(arena, sequence, token, window=window)

    def prepare(self, arena: Arena, sequence: Sequence, *, window: int, on_wait: OnWait | None = None) -> None:
        """See `Step`."""
        self._step.prepare(arena, sequence, window=window, on_wait=on_wait)


def is_due(arena: Arena, sequence: Sequence, every: int) -> bool:
    """After every so many tokens behind the last prefill, where rows have reached their limits."""
    written = sequence.total - sequence.read
    if not written or written % every or sequence.ring is None or sequence.limit is None:
        return False
    return bool((arena.length >= sequence.limit).all())


def recascade(
    decoder: Decoder, arena: Arena, sequence: Sequence, policy: Policy, *, window: int, every: int, spare: int
) -> None:
    """Deal the slots of all rows anew, cut the rows of layers that get less, and move rows to where others may grow.

    `sequence.limit` gets the new lengths `[layers, kv_heads]`; their sum stays. Rows of a layer are equally long.
    """
    assert sequence.limit is not None, "only held rows have a length to deal"
    layers, floor = arena.layout.num_layers, min(window, sequence.total)
    lengths = arena.length[:, 0].copy()
    scored = [_score(decoder, arena, sequence, policy, layer, window) for layer in range(layers)]
    sliding = decoder.config.sliding_windows
    most = [min(int(n) + every, own or int(n) + every) for n, own in zip(lengths, sliding, strict=True)]
    caps = [max(cap - floor, 0) for cap in most]
    weights = [one.preference if isinstance(one.preference, (int, float)) else sum(one.preference) for one in scored]
    shares = deal_seats(weights, caps, int(lengths.sum()) - layers * floor)
    limit = np.array([floor + share for share in shares], dtype=np.int64)
    for layer in range(layers):
        if limit[layer] < lengths[layer]:
            _cut(arena, layer, scored[layer].indicator, sequence.total - window, int(limit[layer]))
    sequence.limit = np.repeat(limit[:, None], arena.layout.num_kv_heads, axis=1)
    arena.finish(sequence.limit - arena.length + spare)


def _score(decoder: Decoder, arena: Arena, sequence: Sequence, policy: Policy, layer: int, window: int) -> LayerScore:
    """What the last queries say of a layer's rows."""
    assert sequence.ring is not None
    queries, query_positions = sequence.ring.read(layer, sequence.total)
    keys, _, positions = arena.rows(layer)
    return policy.score(
        LayerView(
            layer=layer,
            keys=keys,
            positions=positions,
            queries=queries,
            query_positions=query_positions,
            window=window,
            scale=decoder.scale,
            sliding_window=decoder.config.sliding_windows[layer],
            total=sequence.total,
            first=sequence.total,
        )
    )


def _cut(arena: Arena, layer: int, indicator: Tensor, window_start: int, length: int) -> None:
    """Keep the window and the best of a layer's rows, in order of worth."""
    _, _, positions = arena.rows(layer)
    order = row_order(indicator, positions, window_start, None, length)
    for head in range(arena.layout.num_kv_heads):
        keys, values, position = arena.row(layer, head)
        for table in (keys, values, position):
            table[:length] = table.index_select(0, order[head])
        start = int(arena.offset[layer, head])
        arena.score[start : start + length] = torch.index_select(indicator[head], 0, order[head])
    arena.length[layer] = length
