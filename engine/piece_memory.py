"""What reading a text in pieces takes: its budget, and an arena for any number of pieces."""

from __future__ import annotations

from dataclasses import astuple, replace
from typing import TYPE_CHECKING

import torch

from ..cache.budget import Budget, parse_bytes
from ..cache.config import CacheConfig
from ..cache.layout import LONGEST_ROW, ArenaLayout, ArenaSize, arena_bytes, arena_size, packed_bytes
from ..models.config import ModelConfig
from .fitting import room_for_reply
from .memory import FP32, Plan, first_budget, plan_run, weights_of, working_bytes
from .precision import planned_layout

if TYPE_CHECKING:
    from .engine import Engine

ID_BYTES = 36  # of a Python list with one number: all ids of a text are remembered


def piece_budget(
    config: ModelConfig,
    cache: CacheConfig,
    layout: ArenaLayout,
    *,
    tokens: int | None,
    piece: int,
    new_tokens: int,
    context: int,
    conversation: bool = False,
) -> int | None:
    """C in tokens of a text with so many tokens (None: unknown), of all of it where the budget is a share.

    conversation: other texts will follow.
    """
    if cache.choice is not None and cache.kv_memory is None:
        return Budget.parse(cache.budget).tokens(tokens or 0, cache.window)
    first = piece if tokens is None else min(piece, tokens)
    alone = tokens == first and not conversation
    return first_budget(config, cache, layout, first, new_tokens, context=None if alone else context)


def plan_pieces(
    config: ModelConfig,
    cache: CacheConfig,
    *,
    weights: int,
    stored: torch.dtype,
    prompt_tokens: int,
    new_tokens: int,
    chunk: int,
    piece: int,
    context: int,
    conversation: bool = False,
    device: torch.device | str = "cpu",
    compiled: bool = True,
) -> Plan:
    """The peak of reading one prompt in pieces and writing one reply, see `plan_run`.

    Hidden states, staging and what else grows with the prompt are those of one piece, and of what is kept before it.
    """
    if piece >= prompt_tokens:
        return plan_run(
            config,
            cache,
            weights=weights,
            stored=stored,
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            chunk=chunk,
            device=device,
            conversation=context if conversation else None,
            compiled=compiled,
        )
    target = torch.device(device)
    layout = planned_layout(config, cache, stored, target)
    budget = piece_budget(
        config, cache, layout, tokens=prompt_tokens, piece=piece, new_tokens=new_tokens, context=context
    )
    assert budget is not None, "a policy that keeps everything does not read in pieces"
    fixed = replace(cache, budget=budget, kv_memory=None)
    plan = plan_run(
        config,
        fixed,
        weights=weights,
        stored=stored,
        prompt_tokens=piece,
        new_tokens=new_tokens,
        chunk=chunk,
        device=device,
        compiled=compiled,
    )
    size = piece_arena(layout, fixed, budget=budget, piece=piece, new_tokens=new_tokens)
    before = 2 * budget  # columns in front of a piece, which are voted on but have no angles or hidden states
    working = working_bytes(
        config,
        fixed,
        layout,
        budget=budget,
        prompt_tokens=before + piece,
        chunk=min(chunk, piece),
        device=target,
        compiled=compiled,
    )
    arena = arena_bytes(layout, size)
    if cache.kv_memory is not None:  # then it is made as it turns out to be needed
        arena = min(arena, parse_bytes(cache.kv_memory))
    if any(config.sliding_windows):  # what each KV head's kept rows may see is a mask of its own
        working += 2 * config.num_kv_heads * min(chunk, piece) * (budget + piece)
    return replace(
        plan,
        prompt_tokens=prompt_tokens,
        arena=arena,
        kept=size.kept * layout.kept_slot_bytes + packed_bytes(layout, size.packed),
        staging=size.staging * (2 * layout.head_dim * layout.staging_dtype.itemsize + 8),
        chunk=working - before * (config.head_dim * FP32 + 8) + prompt_tokens * ID_BYTES,
    )


def plan_reply(
    engine: Engine, prompt_tokens: int | None, new_tokens: int, piece: int | None, *, conversation: bool = False
) -> Plan:
    """What an engine, whose weights need not be there yet, takes for one reply; see `Engine.check_room`."""
    size = engine.context if piece is None else piece
    tokens = min(size + 1, engine.context - 1) if prompt_tokens is None else prompt_tokens
    folder = None if engine.random_weights else engine.model_path
    weights, stored = weights_of(folder, engine.config, engine.dtype, engine.quant)
    return plan_pieces(
        engine.config,
        engine.cache,
        weights=weights,
        stored=stored,
        prompt_tokens=tokens,
        new_tokens=room_for_reply(tokens, new_tokens, engine.context),
        chunk=engine.chunk,
        piece=size,
        context=engine.context,
        conversation=conversation,
        device=engine.device,
        compiled=engine.step != "eager",
    )


def piece_arena(layout: ArenaLayout, cache: CacheConfig, *, budget: int, piece: int, new_tokens: int) -> ArenaSize:
    """Slots that reading any number of pieces of `piece` tokens one after another needs, as a rule, see `arena_size`.

    Rows hold the whole budget beside each piece but the first; the longest is taken to be `LONGEST_ROW` budgets.
    """
    rows = layout.num_layers * layout.num_kv_heads
    first, other = (
        arena_size(
            layout,
            budget=budget,
            tokens=piece,
            new_tokens=new_tokens,
            hold=cache.spare,
            held=rows * held,
            held_longest=LONGEST_ROW * held,
            late=cache.late,
        )
        for held in (0, budget)
    )
    return ArenaSize(*(max(pair) for pair in zip(astuple(first), astuple(other), strict=True)))
