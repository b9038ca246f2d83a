"""What a comparison takes in memory, said and checked before it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ...cache.budget import size_text
from ...cache.config import CacheConfig
from ..available import available_memory
from ..memory import Plan, plan_run, weights_of
from ..memory_limit import check_memory
from .own_prefill import bytes_of_own
from .replay import ROWS_AT_ONCE

if TYPE_CHECKING:
    from ..engine import Engine
    from .study import Cell

FP32, INT64 = 4, 8


def check_study(
    engine: Engine,
    tokens: int,
    after: int,
    policies: Sequence[CacheConfig],
    budgets: int,
    merging: Sequence[Cell] = (),
    *,
    replies: bool = False,
) -> str:
    """A line that says what the longest prompt needs: `tokens` read, `after` fed on top of them.

    merging: the cells of policies that merge or read in pieces: on their own, and their rows are held. replies: they
    are written from caches of their own, which together hold as much as the full one, and come out of it by way of a
    copy.
    Raises MemoryLimit if it does not fit.
    """
    config, plan = engine.config, prompt_plan(engine, tokens, after)
    rows = config.num_layers * config.num_kv_heads
    scores = len(policies) * config.num_kv_heads * tokens * (FP32 + INT64)
    orders = len(policies) * rows * tokens * INT64
    queries = config.num_layers * engine.cache.window * config.num_heads * config.head_dim * FP32
    wide = 2 * config.hidden_size + 2 * config.intermediate_size + 3 * config.num_heads * config.head_dim
    fed = max(ROWS_AT_ONCE, 2 * after) * wide * FP32
    logits = 4 * 2 * after * config.vocab_size * FP32
    own = scores + orders + queries + fed + logits + (2 * plan.arena if replies else 0)
    if merging:
        cells = [cell for cell in merging if cell.budget is not None and cell.budget < tokens]
        own += bytes_of_own(engine.runner, [(one.policy, one.budget or 0, one.piece) for one in cells], tokens)
    compared = f"{len(policies)} {'policy' if len(policies) == 1 else 'policies'}"
    compared += f" at {budgets} {'budget' if budgets == 1 else 'budgets'}"
    return check_plan(
        engine,
        replace(plan, chunk=plan.chunk + own),
        f"the longest prompt has {tokens:,} tokens; with {compared} it needs",
        f"its full cache {size_text(plan.arena)}, the rest {size_text(plan.total + own - plan.weights - plan.arena)}",
    )


def prompt_plan(engine: Engine, tokens: int, after: int) -> Plan:
    """What reading a prompt of so many tokens takes, and feeding `after` more."""
    weights, stored = weights_of(
        None if engine.random_weights else engine.model_path, engine.config, engine.dtype, engine.quant
    )
    return plan_run(
        engine.config,
        engine.cache,
        weights=weights,
        stored=stored,
        prompt_tokens=tokens,
        new_tokens=after,
        chunk=engine.chunk,
        device=engine.device,
    )


def check_plan(engine: Engine, plan: Plan, what: str, parts: str) -> str:
    """The line that says what something needs, and of what `parts` that is. Raises MemoryLimit if it does not fit."""
    # the weights are there already; the rest has to find room
    check_memory(replace(plan, weights=0), available_memory(str(engine.device)))
    return f"{what} {size_text(plan.total)}: weights {size_text(plan.weights)}, {parts}"
