"""One reply: the runner's tokens turned into text, stop strings honoured, figures gathered."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ..cache.budget import Budget
from ..cache.layout import kept_bytes
from .generation import GenerationConfig
from .picker import Token
from .pieces import Pieces
from .piecewise import OnTokens
from .results import FinishReason, Piece, Progress
from .sequence import Sequence
from .statistics import Statistics, mean_length, peak_memory_bytes
from .text import TextStream
from .timing import Timing

if TYPE_CHECKING:
    from .engine import Engine

log = logging.getLogger(__name__)

OnProgress = Callable[[Progress], None]
CONTEXT = 64  # of the prompt's last ids, for the text of a reply that begins in the middle of a character


def reply(
    engine: Engine,
    sequence: Sequence,
    prompt_ids: list[int] | Pieces,
    generation: GenerationConfig,
    *,
    on_progress: OnProgress | None = None,
    conversation: bool = False,
    timing: Timing | None = None,
) -> Generator[Piece, None, None]:
    """Feed `prompt_ids` to a sequence and yield the reply. `generation` is resolved; see `Engine.stream`.

    Ids that come in pieces are read as they come.

    The end token is not part of the reply; then, and where only held-back text is left, the last piece has no id.
    """
    if not sequence.total and sequence.budget is None and engine.cache.policy != "full":
        tokens = prompt_ids.tokens if isinstance(prompt_ids, Pieces) else len(prompt_ids)
        if tokens is not None:
            tell_if_raised(Budget.parse(engine.cache.budget), tokens, engine.cache.window)
    timing = timing or Timing()
    whole = None if isinstance(prompt_ids, Pieces) else prompt_ids
    written = None if whole is None else Written(engine, sequence, whole, generation, timing)
    chosen = engine.runner.generate(
        sequence,
        prompt_ids,
        generation,
        stop_ids=engine.stop_ids,
        on_chunk=chunk_reporter(engine.config.num_layers, on_progress),
        on_tokens=token_reporter(on_progress),
        timing=timing,
        conversation=conversation,
        on_wait=wait_reporter(on_progress),
    )
    with closing(chosen):
        for token in chosen:
            written = written or Written(engine, sequence, sequence.ids[-CONTEXT:], generation, timing)
            piece = written.push(token)
            if piece is not None:
                yield piece
            if written.finished:
                break
    yield (written or Written(engine, sequence, sequence.ids[-CONTEXT:], generation, timing)).end()


def tell_if_raised(budget: Budget, prompt_tokens: int, window: int) -> None:
    """Log that a percentage of a short prompt is less than the window, where it is."""
    notice = budget.raised(prompt_tokens, window)
    if notice is not None:
        log.info(notice)


class Written:
    """A reply while it is written: the runner's tokens go in, pieces come out.

    sequence: what is fed; timing: the figures that whoever runs the sequence fills in. finished: nothing more is wanted
    (an end token, a stop string, or the last of the tokens that were asked for).
    """

    def __init__(
        self,
        engine: Engine,
        sequence: Sequence,
        prompt_ids: list[int],
        generation: GenerationConfig,
        timing: Timing,
    ) -> None:
        self.engine, self.sequence, self.generation, self.timing = engine, sequence, generation, timing
        self.prompt_ids = prompt_ids
        tokenizer = engine.tokenizer
        self._text = TextStream(tokenizer, prompt_ids, stop=generation.stop) if tokenizer is not None else None
        self._count = 0
        self._reason: FinishReason = "length"
        self.finished = False

    def push(self, token: Token) -> Piece | None:
        """The piece that a token brings; None for an end token, which is no text."""
        self.finished = token.finish_reason is not None
        if token.finish_reason == "stop":
            self._reason = "stop"
            return None
        self._count += 1
        certain = self._text.push(token.id) if self._text is not None else ""
        if self._text is not None and self._text.stopped:
            self._reason, self.finished = "stop", True
        top = token.logprobs
        return Piece(certain, token.id, logprob=top.logprob if top else None, top_logprobs=top.top if top else None)

    def end(self) -> Piece:
        """The last piece: text that was held back, why the reply ends, and the figures."""
        tail = self._text.finish() if self._text is not None and not self._text.stopped else ""
        return Piece(tail, finish_reason=self._reason, stats=self._statistics())

    def _statistics(self) -> Statistics:
        engine, timing = self.engine, self.timing
        layout = engine.runner.layout
        rows = layout.num_layers * layout.num_kv_heads
        return Statistics(
            prompt_tokens=timing.prompt_tokens,
            pieces=timing.pieces,
            prefill_s=timing.prefill_s,
            kept_tokens=mean_length(timing.lengths),
            full_tokens=timing.total,
            kept_bytes=sum(kept_bytes(layout, length) for row in timing.lengths for length in row),
            full_bytes=rows * kept_bytes(replace(layout, kv_bits=None), timing.total),
            new_tokens=self._count,
            decode_s=timing.decode_s,
            decode_steps=timing.decode_steps,
            peak_memory=peak_memory_bytes(engine.device),
            load_s=engine.load_s,
            layer_lengths=timing.lengths,
            budget=self.sequence.budget,
            kv_bits=layout.kv_bits,
            policy=self.sequence.kept_by or engine.runner.policy_of(self.sequence).describe(),
            seed=self.generation.seed,
            finish_reason=self._reason,
        )


def chunk_reporter(layers: int, on_progress: OnProgress | None) -> Callable[[int, int, int], None] | None:
    """Tells `on_progress` how far the prefill is."""
    if on_progress is None:
        return None
    callback = on_progress

    def report(layer: int, done: int, tokens: int) -> None:
        callback(Progress("prefill", layer * tokens + done, layers * tokens, layer, layers))

    return report


def token_reporter(on_progress: OnProgress | None) -> OnTokens | None:
    """Tells `on_progress` how many tokens of a text that comes in pieces have been read."""
    if on_progress is None:
        return None
    callback = on_progress

    def report(tokens: int, total: int | None) -> None:
        callback(Progress("prefill", tokens, max(total or 0, 0), tokens=tokens))

    return report


def wait_reporter(on_progress: OnProgress | None) -> Callable[[], None] | None:
    """Tells `on_progress` that the step is being compiled."""
    return None if on_progress is None else partial(on_progress, Progress("compile", 0, 0))
