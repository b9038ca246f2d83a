"""Evicting between two turns: a smaller budget takes hold at once, by the votes of the queries that there are."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..cache.layout import kept_limit
from ..cache.policies.base import Policy
from ..cache.staged import Staged
from .inputs import LayerInputs
from .keeping import keep_best
from .piece import Piece, layer_view
from .sequence import Sequence

if TYPE_CHECKING:
    from .runner import Runner

OF_NEW_TOKENS = frozenset({"hidden_states", "hidden_similarity"})  # inputs that are gone when a piece has been read


def can_shrink(policy: Policy) -> bool:
    """Whether a policy can judge rows without new tokens: not if it goes by their hidden states."""
    return policy.evicts and not policy.needs & OF_NEW_TOKENS


def shrink(runner: Runner, sequence: Sequence, budget: int) -> None:
    """Give a sequence another budget, in tokens per layer and KV head, and evict what is beyond it.

    This is the reading of a piece of no tokens: the window's queries vote on all rows, and the same cascade deals.
    Afterwards the rows are parked, and the arena is freed. Raises MemoryLimit, with rows and budget as they were; if
    anything else raises, the sequence is spoilt.
    """
    policy = runner.policy(budget)
    assert can_shrink(policy), "this policy judges by the hidden states of new tokens"
    with runner.access.alone():
        lengths = runner.tenancy.lengths(sequence)
        if lengths is not None and sequence.ring is not None and lengths.sum() > budget * lengths.size:
            runner.tenancy.activate(sequence)
            runner.tenancy.reserve(sequence, budget, 0, 0)
            with runner.access.whole(sequence), torch.inference_mode():
                _evict(runner, sequence, policy, budget)
            runner.tenancy.vacate()
        sequence.budget = budget


def _evict(runner: Runner, sequence: Sequence, policy: Policy, budget: int) -> None:
    assert sequence.rotary is not None
    arena, decoder, window = runner.tenancy.arena, runner.decoder, runner.cache.window
    runner.torch_threads.all()
    layers, kv_heads = arena.length.shape
    cascade = policy.cascade(layers, kv_heads, budget, window)
    limit = kept_limit(layers * kv_heads, budget=None if policy.late else budget, tokens=0, held=arena.kept_slots)
    nothing = torch.empty(0, dtype=torch.int64, device=decoder.device)
    cos, sin = sequence.rotary.cos_sin(nothing)
    piece = Piece(nothing, 0, sequence.total, cos, sin, runner.chunk, None, runner.attention, policy.needs)
    separators = runner.separators if "separators" in policy.needs else None
    arena.begin(limit, int(arena.held.max()))
    for index in range(layers):
        staged = arena.stage(index, 0, sequence.total)
        inputs, first = _inputs(runner, sequence, staged, index, policy)
        view = layer_view(decoder, sequence, staged, index, piece, window, inputs, separators)
        view = replace(view, first=first, window_pass=runner.window_pass)
        keep_best(arena, staged, view, policy.score(view), cascade, policy.merger)
    runner.make_room(arena, sequence, 0)
    sequence.read = sequence.total


def _inputs(runner: Runner, sequence: Sequence, staged: Staged, index: int, policy: Policy) -> tuple[LayerInputs, int]:
    """What is asked of all queries, from those that are remembered, and the position of the first of these.

    Sums that lie with the rows have counted all queries but those of the reply.
    """
    assert sequence.ring is not None
    assert sequence.rotary is not None
    config, total = runner.decoder.config, sequence.total
    inputs = LayerInputs(
        policy.needs,
        staged,
        first=total,
        scale=runner.decoder.scale,
        sliding=config.sliding_windows[index],
        heads=config.num_heads,
    )
    count = min(runner.cache.window, total - sequence.read if "carried" in policy.needs else total)
    if count:
        queries, positions = sequence.ring.read(index, total)
        cos, sin = sequence.rotary.cos_sin(positions[-count:])
        inputs.queries(queries[:, -count:], cos, sin, -count, None)
    return inputs, total - count
