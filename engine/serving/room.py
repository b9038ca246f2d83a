"""How large the server's arena is, and a first run before anybody waits for one."""

from __future__ import annotations

import logging

from ...cache.budget import parse_bytes, size_text
from ...cache.layout import shared_size
from ...errors import MemoryLimit
from ..available import available_memory
from ..engine import Engine
from ..generation import GenerationConfig
from ..memory_limit import free_for_arena
from ..sequence import Sequence
from ..window import FEWEST_COLUMNS
from .options import ServeOptions

log = logging.getLogger(__name__)


def arena_limit(engine: Engine, options: ServeOptions, defaults: GenerationConfig) -> int:
    """Bytes of the arena: what was asked for, else what `parallel` replies to the longest prompts take, as far as there
    is memory beside what reading one of them takes.

    Raises MemoryLimit, with both figures, for more than there is.
    """
    runner = engine.runner
    new_tokens = min(engine.resolved(defaults).max_new_tokens or 1, max(1, engine.context // 2))
    longest = min(options.max_prompt or engine.context, engine.context - new_tokens)
    size = runner.fit(Sequence(), longest, new_tokens).size
    wanted = shared_size(runner.layout, [size] * options.parallel).nbytes(runner.layout)
    alone = shared_size(runner.layout, [size]).nbytes(runner.layout)
    available = available_memory(str(engine.device))
    free = free_for_arena(engine, longest, available)
    if options.arena is not None:
        asked = parse_bytes(options.arena)
        if available is not None and asked > available.bytes:
            raise MemoryLimit(
                f"the arena is to have {size_text(asked)}, but {available.limit} has {size_text(available.bytes)} "
                "free: give it less with the option arena"
            )
        limit = asked
    else:
        limit = wanted if free is None else max(min(wanted, free), min(alone, max(free, 1 << 20)))
    if limit < alone:
        log.warning(
            "the KV arena has %s, and a reply to %s tokens needs %s: longer requests are refused",
            size_text(limit),
            f"{longest:,}",
            size_text(alone),
        )
    return limit


def warm_up(engine: Engine) -> None:
    """Read and write a little, so that what is compiled is compiled before the first request."""
    runner = engine.runner
    sequence = Sequence()
    if runner.policy(None).evicts:
        sequence.budget = engine.cache.window
    count = max(1, min(FEWEST_COLUMNS + engine.cache.window, engine.context - 8))
    token = min(range(engine.config.vocab_size), key=lambda index: index in engine.stop_ids)
    generation = engine.resolved(GenerationConfig(max_new_tokens=3, temperature=0.0, seed=0))
    for _ in runner.generate(sequence, [token] * count, generation):
        pass
