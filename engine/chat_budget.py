"""What a conversation may keep, as the user has said it, and what it has come to."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from ..cache.budget import Budget
from ..errors import MemoryLimit, OptionError
from .reply import tell_if_raised
from .sequence import Sequence
from .shrinking import can_shrink, shrink

if TYPE_CHECKING:
    from .engine import Engine


class ChatBudget:
    """The budget of one conversation. wanted: tokens or a percentage; None for the engine's own."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.wanted: Budget | None = None
        self._source = ""  # what it is a percentage of

    def set(self, budget: int | str, sequence: Sequence) -> None:
        """See `Chat.set_budget`. If it raises, it has changed nothing but, perhaps, spoilt the sequence."""
        if not self._engine.runner.policy(None).evicts:
            raise OptionError(f"the policy {self._engine.cache.policy!r} keeps everything: there is no budget to set")
        wanted, source = Budget.parse(budget), ""
        total, window = sequence.total, self._engine.cache.window
        if wanted.count is not None or total:
            tell_if_raised(wanted, total, window)
            source = share_text(wanted, total, window)
            wanted = Budget(count=wanted.tokens(total, window))
        self.apply(sequence, wanted)
        self.wanted, self._source = wanted, source

    def take(self, count: int | None) -> None:
        """Go on with the budget that a saved conversation has."""
        self.wanted, self._source = None if count is None else Budget(count=count), ""

    def apply(self, sequence: Sequence, wanted: Budget | None = None) -> None:
        """Give a sequence that has been read the budget, at once if the policy and the memory allow it."""
        wanted, runner = wanted or self.wanted, self._engine.runner
        if wanted is None or wanted.count is None or not sequence.total:
            return
        if can_shrink(runner.policy(wanted.count)):
            with suppress(MemoryLimit):  # then the next turn does it, which must have the memory anyway
                shrink(runner, sequence, wanted.count)

    def before_turn(self, sequence: Sequence, tokens: int, *, first: bool) -> None:
        """Give a sequence its budget for a turn after which it will have `tokens` tokens, the reply left out."""
        if self.wanted is None or (self.wanted.count is None and not first):
            return
        if self.wanted.count is None:
            tell_if_raised(self.wanted, tokens, self._engine.cache.window)
            self._source = share_text(self.wanted, tokens, self._engine.cache.window)
        sequence.budget = self.wanted.tokens(tokens, self._engine.cache.window)

    def count(self, sequence: Sequence) -> int | None:
        """Tokens kept per layer and KV head; None while nothing has fixed it, or if nothing is evicted."""
        if self.wanted is not None and self.wanted.count is not None:
            return self.wanted.count
        return sequence.budget

    def text(self, sequence: Sequence) -> str:
        """In words: what a percentage has come to, whether a change waits for the next turn, and what is left."""
        runner, cache, count = self._engine.runner, self._engine.cache, self.count(sequence)
        if not runner.policy(None).evicts:
            return f"none: the policy {cache.policy} keeps everything"
        if count is None:
            if self.wanted is None and cache.kv_memory is not None:
                return f"as much as {cache.kv_memory} of KV memory holds"
            return (self.wanted or Budget.parse(cache.budget)).describe()
        text = Budget(count=count).describe() + self._source
        lengths = runner.tenancy.lengths(sequence)
        if lengths is None:
            return text
        if sequence.budget != count:
            text += ", from the next message on"
        return f"{text}; {kept_text(float(lengths.mean()), sequence.total)}"


def share_text(wanted: Budget, total: int, window: int) -> str:
    """What a percentage is of, or that it was raised to the window; nothing for a number of tokens."""
    if wanted.count is not None:
        return ""
    raised = wanted.raised(total, window) is not None
    return f" (the window: {wanted} of {total:,} is less)" if raised else f" ({wanted} of {total:,})"


def kept_text(kept: float, total: int) -> str:
    """What is left of a text."""
    if kept >= total:
        return f"all {total:,} tokens so far are kept"
    return f"{kept:,.0f} of {total:,} tokens so far are kept, and what is gone does not come back"
