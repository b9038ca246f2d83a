"""A prefill of a policy's own, where it changes what it keeps or reads in pieces: no other's rows stand for those."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ...cache.arena import Arena
from ...cache.layout import ArenaSize, arena_bytes, arena_size
from ...cache.policies.base import Policy
from ...cache.saved_rows import SavedRows
from .. import prefill
from ..pieces import ListedPieces
from ..prefill import OnChunk
from ..runner import Runner
from ..sequence import QueryRing
from ..sequence import Sequence as TextSequence


def size_of_own(runner: Runner, policy: Policy, budget: int | None, piece: int | None, tokens: int) -> ArenaSize:
    """The arena of such a prefill; in pieces, whatever length a row may get."""
    if budget is None or piece is None or piece >= tokens:
        return arena_size(runner.layout, budget=budget, tokens=tokens, new_tokens=0, late=policy.late)
    rows = runner.layout.num_layers * runner.layout.num_kv_heads
    longest = min(tokens, budget * runner.layout.num_layers)
    return arena_size(
        runner.layout,
        budget=budget,
        tokens=piece,
        new_tokens=0,
        held=rows * budget,
        held_longest=longest,
        late=policy.late,
    )


def bytes_of_own(runner: Runner, policies: Sequence[tuple[Policy, int | None, int | None]], tokens: int) -> int:
    """What the rows of all of these policies take, with their budgets (None keeps all) and pieces, and the largest
    arena that one is read in."""
    rows = runner.layout.num_layers * runner.layout.num_kv_heads
    lengths = [tokens if budget is None else min(budget, tokens) for _, budget, _ in policies]
    kept = [length * rows * runner.layout.kept_slot_bytes for length in lengths]
    arenas = [arena_bytes(runner.layout, size_of_own(runner, *one, tokens)) for one in policies]
    return sum(kept) + max(arenas, default=0)


def read_on_its_own(
    runner: Runner,
    ids: list[int],
    policy: Policy,
    budget: int,
    *,
    window: int,
    piece: int | None,
    new_tokens: int,
    on_chunk: OnChunk | None = None,
) -> SavedRows:
    """A packed copy of the rows that the policy leaves of a prompt, read in an arena of its own."""
    return prefill_alone(
        runner, ids, policy, budget, window=window, piece=piece, new_tokens=new_tokens, on_chunk=on_chunk
    )[0]


def prefill_alone(
    runner: Runner,
    ids: list[int],
    policy: Policy,
    budget: int | None,
    *,
    window: int,
    piece: int | None,
    new_tokens: int,
    on_chunk: OnChunk | None = None,
) -> tuple[SavedRows, TextSequence]:
    """The rows, and the sequence that goes on from them. Without a budget nothing is evicted, and nobody votes."""
    config, decoder = runner.decoder.config, runner.decoder
    arena = Arena(runner.layout, size_of_own(runner, policy, budget, piece, len(ids)), decoder.device)
    ring = None
    if budget is not None:
        ring = QueryRing(
            config.num_layers, window, config.num_heads, config.head_dim, decoder.compute_dtype, decoder.device
        )
    sequence = TextSequence(budget=budget, ring=ring, rotary=runner.rotary(len(ids) + new_tokens))
    for part in ListedPieces(ids, piece or len(ids)):
        steps = prefill.reading(
            decoder,
            arena,
            sequence,
            torch.tensor(part, device=decoder.device),
            policy=policy,
            window=window,
            chunk=runner.chunk,
            separators=runner.separators if "separators" in policy.needs else None,
            attention=runner.attention,
            window_pass=runner.window_pass,
        )
        prefill.read_through(steps, on_chunk if len(part) == len(ids) else None)
    arena.finish(np.zeros_like(arena.length))
    return arena.save(), sequence
