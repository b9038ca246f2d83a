"""One reply: the runner's tokens turned into text, stop strings honoured, figures gathered."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

from ..cache.budget import Budget
from .generation import GenerationConfig
from .results import FinishReason, Piece, Progress
from .runner import Timing
from .sequence import Sequence
from .statistics import Statistics, mean_length, peak_memory_bytes
from .text import TextStream

if TYPE_CHECKING:
    from .engine import Engine

log = logging.getLogger(__name__)

OnProgress = Callable[[Progress], None]


def reply(
    engine: Engine,
    sequence: Sequence,
    prompt_ids: list[int],
    generation: GenerationConfig,
    *,
    on_progress: OnProgress | None = None,
    conversation: bool = False,
    timing: Timing | None = None,
) -> Generator[Piece, None, None]:
    """Feed `prompt_ids` to a sequence and yield the reply. `generation` is resolved; see `Engine.stream`.

    The end token is not part of the reply; then, and where only held-back text is left, the last piece has no id.
    """
    runner, timing = engine.runner, timing or Timing()
    if not sequence.total and sequence.budget is None and engine.cache.policy != "full":
        tell_if_raised(Budget.parse(engine.cache.budget), len(prompt_ids), engine.cache.window)
    text = TextStream(engine.tokenizer, prompt_ids, stop=generation.stop) if engine.tokenizer is not None else None
    count, finish, tail = 0, "length", ""
    tokens = runner.generate(
        sequence,
        prompt_ids,
        generation,
        stop_ids=engine.stop_ids,
        on_chunk=_chunk_reporter(engine.config.num_layers, on_progress),
        on_wait=None if on_progress is None else partial(on_progress, Progress("compile", 0, 0)),
        timing=timing,
        conversation=conversation,
    )
    with closing(tokens):
        for token in tokens:
            if token.finish_reason == "stop":
                finish = "stop"
                break
            count += 1
            certain = text.push(token.id) if text is not None else ""
            top = token.logprobs
            yield Piece(
                certain,
                token.id,
                logprob=top.logprob if top else None,
                top_logprobs=top.top if top else None,
            )
            if text is not None and text.stopped:
                finish = "stop"
                break
    if text is not None and not text.stopped:
        tail = text.finish()
    reason: FinishReason = "stop" if finish == "stop" else "length"
    yield Piece(tail, finish_reason=reason, stats=_statistics(engine, sequence, timing, generation, count, reason))


def tell_if_raised(budget: Budget, prompt_tokens: int, window: int) -> None:
    """Log that a percentage of a short prompt is less than the window, where it is."""
    notice = budget.raised(prompt_tokens, window)
    if notice is not None:
        log.info(notice)


def _chunk_reporter(layers: int, on_progress: OnProgress | None) -> Callable[[int, int, int], None] | None:
    if on_progress is None:
        return None
    callback = on_progress

    def report(layer: int, done: int, tokens: int) -> None:
        callback(Progress("prefill", layer * tokens + done, layers * tokens, layer, layers))

    return report


def _statistics(
    engine: Engine, sequence: Sequence, timing: Timing, generation: GenerationConfig, count: int, reason: str
) -> Statistics:
    layout = engine.runner.layout
    slot = 2 * layout.head_dim * layout.kv_dtype.itemsize  # a key and a value
    full = timing.total * layout.num_layers * layout.num_kv_heads
    return Statistics(
        prompt_tokens=timing.prompt_tokens,
        prefill_s=timing.prefill_s,
        kept_tokens=mean_length(timing.lengths),
        full_tokens=timing.total,
        kept_bytes=sum(length for row in timing.lengths for length in row) * slot,
        full_bytes=full * slot,
        new_tokens=count,
        decode_s=timing.decode_s,
        decode_steps=timing.decode_steps,
        peak_memory=peak_memory_bytes(engine.device),
        load_s=engine.load_s,
        layer_lengths=timing.lengths,
        budget=sequence.budget,
        policy=engine.runner.policy(sequence.budget).describe(),
        seed=generation.seed,
        finish_reason=reason,
    )
