"""A conversation over one compressed cache. A turn reads only what is new; history is the ids that were fed.

What an earlier turn's eviction dropped stays dropped: kept sets only shrink, and positions go on from the true count.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

from ..cache.budget import Budget, check_budget
from ..errors import OptionError, PromptError
from .generation import GenerationConfig
from .reply import OnProgress, reply
from .results import Piece
from .sequence import Sequence
from .statistics import Statistics
from .text import check_text

if TYPE_CHECKING:
    from .engine import Engine

log = logging.getLogger(__name__)

KV_MEMORY_SHARE = 0.5  # of --kv-memory for what is kept: a turn is read beside what the conversation holds


class Chat:
    """A conversation with a model that has a chat template. One turn at a time.

    messages: the turns so far as role and content. stats: figures of the last turn. A turn that fails, or is broken
    off before its first token, leaves no trace; a reply that is broken off stays, as far as it came.
    """

    def __init__(self, engine: Engine, system: str | None = None) -> None:
        engine.chat_template()
        self.engine = engine
        self._system = system
        self._budget: int | None = None
        self.stats: Statistics | None = None
        self._told_apart = False
        self.clear()

    def clear(self) -> None:
        """Start over: forget every turn. System text and budget stay."""
        self._sequence = Sequence()
        self._pending: list[int] = []  # chosen but not yet fed: the last token of a reply that did not end by itself
        self.messages: list[dict[str, str]] = []
        self.stats = None

    @property
    def system(self) -> str | None:
        """The system text. It can be set while the conversation is empty: templates put it in front of everything."""
        return self._system

    @system.setter
    def system(self, text: str | None) -> None:
        if self.messages:
            raise OptionError("the system text stands in front of the conversation: clear the conversation first")
        self._system = text

    @property
    def context(self) -> int:
        """The most tokens a conversation can have, by true position."""
        return self.engine.context

    @property
    def tokens_used(self) -> int:
        """True tokens so far, kept or not."""
        return self._sequence.total + len(self._pending)

    @property
    def budget(self) -> int | None:
        """Tokens kept per layer and KV head; None while nothing has fixed it, or if nothing is evicted."""
        return self._sequence.budget if self._sequence.total else self._budget

    def set_budget(self, budget: int | str) -> None:
        """Change the budget from the next turn on. What is already gone does not come back."""
        runner = self.engine.runner
        if not runner.policy(None).evicts:
            raise OptionError(f"the policy {self.engine.cache.policy!r} keeps everything: there is no budget to set")
        tokens = Budget.parse(budget).tokens(max(1, self._sequence.total))
        self._budget = check_budget(tokens, self.engine.cache.window)

    def send(
        self,
        text: str,
        *,
        config: GenerationConfig | None = None,
        on_progress: OnProgress | None = None,
        **options: Any,
    ) -> Iterator[Piece]:
        """Say something and stream the reply. Options as for `Engine.stream`.

        Raises PromptError before anything is changed if the turn does not fit the context (both numbers are said).
        """
        check_text(text, "the message")
        if not text.strip():
            raise PromptError("the message is empty")
        generation = self.engine._generation(config, options)
        return self._turn(text, self._turn_ids(text), generation, on_progress)

    def _turn_ids(self, text: str) -> list[int]:
        template = self.engine.chat_template()
        if self.messages:
            return [*self._pending, *template.encode_turn(text)]
        first = [{"role": "system", "content": self._system}] if self._system else []
        return template.encode([*first, {"role": "user", "content": text}])

    def _turn(
        self, text: str, ids: list[int], generation: GenerationConfig, on_progress: OnProgress | None
    ) -> Iterator[Piece]:
        runner = self.engine.runner
        total = self._sequence.total + len(ids)
        if total >= self.context:
            raise PromptError(
                f"with this message the conversation has {total:,} tokens, but the context is {self.context:,}: "
                "clear the conversation (/clear), or send less"
            )
        sequence, saved = self._sequence, None
        if sequence.total:
            saved = runner.checkpoint(sequence)
            length = min(total + (generation.max_new_tokens or 0), self.context)
            if sequence.rotary is not None and runner.rotary(length).key != sequence.rotary.key:
                log.info("the rotary frequencies change with the length: the conversation is read anew")
                sequence, ids = Sequence(), [*sequence.ids, *ids]
        if self._budget is not None:
            sequence.budget = self._budget
        pieces: list[Piece] = []
        before = len(sequence.ids) + len(ids)
        try:
            stream = reply(self.engine, sequence, ids, generation, on_progress=on_progress, share=KV_MEMORY_SHARE)
            with closing(stream):
                for piece in stream:
                    pieces.append(piece)
                    if piece.finish_reason is not None:
                        self._keep(text, sequence, pieces, before)
                    yield piece
        finally:
            if not pieces or (pieces[-1].finish_reason is None and sequence.spoilt):
                if saved is not None:
                    runner.restore(self._sequence, saved)
                else:
                    self._sequence = Sequence()
            elif pieces[-1].finish_reason is None:
                self._keep(text, sequence, pieces, before)

    def _keep(self, text: str, sequence: Sequence, pieces: list[Piece], before: int) -> None:
        """Take a turn into the history, whole or as far as it came."""
        self._sequence = sequence
        # A reply's last token has been shown and not fed, unless an end token followed it: the next turn feeds it.
        chosen = [piece.id for piece in pieces if piece.id is not None]
        self._pending = chosen[sequence.total - before :]
        self.messages += [
            {"role": "user", "content": text},
            {"role": "assistant", "content": "".join(piece.text for piece in pieces)},
        ]
        self.stats = pieces[-1].stats
        if not self._told_apart and self.engine.chat_template().differs_from_full_render(self._transcript()):
            self._told_apart = True
            log.warning(
                "this model's template would write earlier turns differently by now; the conversation goes on from "
                "the tokens that were fed, and nothing is read again"
            )

    def _transcript(self) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self._system}] if self._system else []
        return [*system, *self.messages]
