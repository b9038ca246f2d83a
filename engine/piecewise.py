"""Reading a text piece by piece, each evicted from before the next one is read: memory is that of a piece.

Each piece goes on from the rows that are kept of those before it, as a turn of a chat does (`prefill.reading`): they
move in front of its tokens, its last tokens' queries vote on both, and what is dropped stays dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from ..cache.budget import Budget
from ..cache.layout import ArenaSize, arena_bytes
from ..errors import OptionError, PromptError
from .piece_memory import piece_arena, piece_budget
from .pieces import Pieces
from .sequence import Sequence
from .timing import Timing

if TYPE_CHECKING:
    from .runner import Runner

# told the tokens of the text that have been read (a share of a piece as such), and of the whole text where it is known
OnTokens = Callable[[int, int | None], None]


def read_pieces(
    runner: Runner,
    sequence: Sequence,
    pieces: Pieces,
    new_tokens: int,
    *,
    timing: Timing,
    conversation: bool = False,
    on_tokens: OnTokens | None = None,
) -> tuple[Tensor, int]:
    """Feed a text to a sequence. Returns the next token's logits fp32 `[vocab]` and how many new tokens fit behind it.

    Others may have the engine while a piece is waited for. There is room for the reply after `Runner.make_room`.
    Raises PromptError for an empty text, or for one longer than the context, with both numbers, at the piece that is
    too much; OptionError where the policy, the budget or the frequencies need the whole text.
    """
    check_pieces(runner, pieces, new_tokens)
    before, limit, logits = sequence.total, 0, None
    for ids in pieces:
        tell = None if on_tokens is None else _teller(on_tokens, pieces, sequence.total - before, len(ids), runner)
        with runner.access.alone():
            if not sequence.total and sequence.budget is None:
                sequence.budget = piece_budget(
                    runner.decoder.config,
                    runner.cache,
                    runner.layout,
                    tokens=pieces.tokens,
                    piece=pieces.size,
                    new_tokens=new_tokens,
                    context=runner.context,
                    conversation=conversation,
                )
            total = sequence.total + len(ids)
            if total >= runner.context:
                raise PromptError(
                    f"the text has at least {total:,} tokens, but the model's context is {runner.context:,} and a "
                    "reply needs at least 1: send less, or stretch the context with the option rope_scaling "
                    "(KIND:FACTOR)"
                )
            last = pieces.tokens is not None and total - before >= pieces.tokens
            _reserve(runner, sequence, len(ids), new_tokens, go_on=not last and len(ids) == pieces.size)
            limit = runner.prepare(sequence, len(ids), new_tokens, conversation=conversation)
            started = time.perf_counter()
            with runner.access.whole(sequence):
                logits = runner.feed(sequence, ids, 0, on_chunk=tell)
        timing.prefill_s += time.perf_counter() - started
        timing.prompt_tokens += len(ids)
        timing.pieces += 1
    if logits is None:
        raise PromptError("the prompt is empty: there is no token to read")
    return logits, limit


def check_pieces(runner: Runner, pieces: Pieces, new_tokens: int) -> None:
    """Raise OptionError where the engine cannot read this text in pieces."""
    if runner.cache.choice is None:
        raise OptionError(
            f"the policy {runner.cache.policy} keeps everything, so pieces would save nothing: leave the option "
            "stream_prefill out, or take a policy that evicts"
        )
    if pieces.tokens is None and runner.cache.kv_memory is None and Budget.parse(runner.cache.budget).count is None:
        raise OptionError(
            f"a budget of {runner.cache.budget} is of the prompt's length, which is not known while it is read in "
            "pieces: give the option budget in tokens"
        )
    longest = runner.context if pieces.tokens is None else pieces.tokens + new_tokens
    if runner.rotary(1).key != runner.rotary(min(longest, runner.context)).key:
        raise OptionError(
            "this model's rotary frequencies depend on the length of the whole text, so it cannot be read in pieces: "
            "give the option rope_scaling as linear or yarn, or leave the option stream_prefill out"
        )


def _reserve(runner: Runner, sequence: Sequence, tokens: int, new_tokens: int, *, go_on: bool) -> None:
    """Room for this piece and, as far as it can be foreseen, for all that follow, so that the arena need not grow."""
    tenancy, budget = runner.tenancy, sequence.budget
    if budget is None:
        return
    lengths = tenancy.lengths(sequence)
    wanted = ArenaSize(0, 0, 0)
    if lengths is None and go_on:
        wanted = piece_arena(runner.layout, runner.cache, budget=budget, piece=tokens, new_tokens=new_tokens)
        if not tenancy.is_active(sequence):
            tenancy.set_aside()
    elif lengths is not None:
        needed = tenancy.size_for(sequence, budget, tokens, new_tokens)
        if not tenancy.arena.size.covers(needed, runner.layout):  # some layer keeps more than was foreseen
            wanted = tenancy.size_for(sequence, budget, tokens + int(lengths.max()) // 4, new_tokens)
    if wanted.staging and (tenancy.allowed is None or arena_bytes(runner.layout, wanted) <= tenancy.allowed):
        tenancy.enlarge(sequence, wanted)


def _teller(
    on_tokens: OnTokens, pieces: Pieces, before: int, tokens: int, runner: Runner
) -> Callable[[int, int, int], None]:
    """A piece's progress as tokens of the text: each (layer, chunk) counts as its share of the piece."""
    layers, share = runner.decoder.config.num_layers, pieces.share
    total = pieces.tokens if pieces.tokens is not None else round((before + tokens) / share) if share else None

    def tell(layer: int, done: int, of: int) -> None:
        on_tokens(before + (layer * of + done) // layers, total)

    return tell
