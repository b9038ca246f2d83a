"""Whether a piece of text and its reply fit: context, budget, frequencies, and the arena that they need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..cache.budget import check_budget
from ..cache.layout import ArenaSize
from ..errors import CakeError, PromptError
from ..models.rope import Rotary
from .generation import DEFAULT_MAX_NEW_TOKENS
from .memory import first_budget
from .sequence import Sequence

if TYPE_CHECKING:
    from .runner import Runner


@dataclass(frozen=True)
class Fit:
    """What a piece and its reply will have: new tokens at most, budget, frequencies, and the arena they need."""

    new_tokens: int
    budget: int | None
    rotary: Rotary
    size: ArenaSize


def fit_piece(
    runner: Runner,
    sequence: Sequence,
    tokens: int,
    new_tokens: int,
    *,
    conversation: bool = False,
    limit: int | None = None,
) -> Fit:
    """What feeding a piece and writing its reply would settle; changes nothing.

    conversation: further pieces will follow. limit: bytes of KV memory that it may take, None for any. Raises
    PromptError with both numbers if the text is empty, too long or would need other frequencies than those it was begun
    with.
    """
    if sequence.spoilt:
        raise CakeError("this sequence is being read, or was broken off: its rows mean nothing")
    first, total = sequence.total, sequence.total + tokens
    new_tokens = room_for_reply(total if tokens else 0, new_tokens, runner.context)
    budget = sequence.budget
    if first == 0 and budget is None:
        context = runner.context if conversation else None
        budget = first_budget(runner.decoder.config, runner.cache, runner.layout, total, new_tokens, context=context)
    rotary = runner.rotary(total + new_tokens)
    if sequence.rotary is not None and rotary.key != sequence.rotary.key:
        raise PromptError(
            f"with {total + new_tokens:,} tokens this model turns its keys by other frequencies than those in the "
            "cache: read the whole text anew"
        )
    if budget is not None:
        window = runner.cache.window
        check_budget(budget, window)
        budget = runner.tenancy.affordable(sequence, budget, tokens, new_tokens, window=window, limit=limit)
    return Fit(new_tokens, budget, rotary, runner.tenancy.size_for(sequence, budget, tokens, new_tokens))


def longest_prompts(runner: Runner, count: int) -> list[ArenaSize]:
    """The sizes of so many of the longest prompts, where a store of its own has room for packed rows; else none."""
    if runner.layout.kv_bits is None:
        return []
    reply = min(DEFAULT_MAX_NEW_TOKENS, runner.context // 2)
    return [runner.fit(Sequence(), runner.context - reply, reply).size] * count


def room_for_reply(total: int, new_tokens: int, context: int) -> int:
    """How many of `new_tokens` fit behind a text of `total` tokens. Raises PromptError if it is empty or too long."""
    if total < 1:
        raise PromptError("the prompt is empty: there is no token to read")
    if total >= context:
        raise PromptError(
            f"the prompt has {total:,} tokens, but the model's context is {context:,} and a reply needs at least 1: "
            "shorten the prompt, or stretch the context with the option rope_scaling (KIND:FACTOR)"
        )
    return min(new_tokens, context - total)
