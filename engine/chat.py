"""A conversation over one compressed cache. A turn reads only what is new; history is the ids that were fed.

What an earlier turn's eviction dropped stays dropped: kept sets only shrink, and positions go on from the true count.
"""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import OptionError, PromptError
from .chat_budget import ChatBudget
from .chat_file import SavedChat, read_chat, write_chat
from .encoding import check_length
from .generation import GenerationConfig
from .moment import Moment
from .pieces import ListedPieces, piece_size
from .piecewise import check_pieces
from .reply import OnProgress, reply
from .results import Piece
from .sequence import Sequence
from .statistics import Statistics
from .text import check_text
from .timing import Timing

if TYPE_CHECKING:
    from .engine import Engine

log = logging.getLogger(__name__)


class Chat:
    """A conversation with a model that has a chat template. One turn at a time.

    messages: the turns so far as role and content. stats: figures of the last turn. A turn that fails, or is broken
    off before its first token, leaves no trace; a reply that is broken off stays, as far as it came.
    """

    def __init__(self, engine: Engine, system: str | None = None, *, stream_prefill: bool | int | None = None) -> None:
        """`stream_prefill`: turns with more tokens than that are read in pieces of so many, see `Engine.stream`."""
        engine.chat_template()
        self._piece = piece_size(stream_prefill)
        if self._piece is not None:
            check_pieces(engine.runner, ListedPieces([], self._piece), 0)
        if engine.runner.short is not None:
            engine.runner.short.load_ahead()
        self.engine = engine
        self._system = check_text(system, "the system text") if system is not None else None
        self._budget = ChatBudget(engine)
        self.stats: Statistics | None = None
        self._told_apart = False
        self._speaking = False
        self.clear()

    def clear(self) -> None:
        """Start over: forget every turn. System text and budget stay."""
        self._check_idle()
        self._sequence = Sequence()
        self._undo: Moment | None = None  # before the last turn
        self._pending: list[int] = []  # chosen but not yet fed: the last token of a reply that did not end by itself
        self._finished_by: int | None = None  # the end token of the last reply, which is never fed
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
        self._system = check_text(text, "the system text") if text is not None else None

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
        return self._budget.count(self._sequence)

    @property
    def budget_text(self) -> str:
        """The budget in words: what a percentage has come to, and how much of the conversation is left."""
        return self._budget.text(self._sequence)

    def set_budget(self, budget: int | str) -> None:
        """Change the budget. What a smaller one has no room for is given up at once, and does not come back.

        A percentage is of the conversation so far, or of the first message's prompt, and at least the window; a number
        of tokens below it raises BudgetError. A policy that judges by hidden states waits for the next turn.
        """
        self._check_idle()
        moment = self._moment()
        try:
            self._budget.set(budget, self._sequence)
        except BaseException:
            if self._sequence.spoilt:
                self._go_back(moment)
            raise

    def send(
        self,
        text: str,
        *,
        config: GenerationConfig | None = None,
        on_progress: OnProgress | None = None,
        **options: Any,
    ) -> Generator[Piece, None, None]:
        """Say something and stream the reply. Options as for `Engine.stream`. One turn at a time.

        Raises PromptError before anything is changed if the turn does not fit the context (both numbers are said).
        """
        self._check_idle()
        check_text(text, "the message")
        check_length(self.engine, text, self._sequence.total, on_progress)
        if not text.strip():
            raise PromptError("the message is empty")
        generation = self.engine._generation(config, options)
        ids = self._turn_ids(text)
        total, wanted = self._sequence.total + len(ids), generation.max_new_tokens or 0
        room = self.context - total
        if room <= 0:
            raise PromptError(
                f"with this message the conversation has {total:,} tokens, but the context is {self.context:,}: "
                "send less, undo the last turn, or clear the conversation"
            )
        if room < wanted:
            log.warning(
                "the reply can have %s tokens at most, where up to %s are asked for: there the context of %s ends; "
                "undo turns or clear the conversation for more",
                *(f"{count:,}" for count in (room, wanted, self.context)),
            )
        return self._turn(text, ids, generation, on_progress)

    def _check_idle(self) -> None:
        if self._speaking:
            raise OptionError("the reply is still being written: read it to its end, or close its stream first")

    def _turn_ids(self, text: str) -> list[int]:
        template = self.engine.chat_template()
        if self.messages:
            return [*self._pending, *template.encode_turn(text, finished_by=self._finished_by)]
        first = [{"role": "system", "content": self._system}] if self._system else []
        return template.encode([*first, {"role": "user", "content": text}])

    def _turn(
        self, text: str, ids: list[int], generation: GenerationConfig, on_progress: OnProgress | None
    ) -> Generator[Piece, None, None]:
        self._check_idle()
        runner, sequence = self.engine.runner, self._sequence
        moment = self._moment()
        before = sequence.total + len(ids)
        pieces: list[Piece] = []
        self._speaking = True
        try:
            if sequence.total:
                length = min(before + (generation.max_new_tokens or 0), self.context)
                if sequence.rotary is not None and runner.rotary(length).key != sequence.rotary.key:
                    log.info("the rotary frequencies change with the length: the conversation is read anew")
                    sequence, ids = Sequence(budget=sequence.budget), [*sequence.ids, *ids]
            self._budget.before_turn(sequence, before, first=not self._sequence.total)
            timing = Timing()
            stream = reply(
                self.engine,
                sequence,
                ids if self._piece is None or len(ids) <= self._piece else ListedPieces(ids, self._piece),
                generation,
                on_progress=on_progress,
                conversation=True,
                timing=timing,
            )
            with closing(stream):
                for piece in stream:
                    pieces.append(piece)
                    if piece.finish_reason is not None:
                        self._keep(text, sequence, pieces, before, timing.finished_by)
                    yield piece
        finally:
            self._speaking = False
            if not pieces or (pieces[-1].finish_reason is None and sequence.spoilt):
                self._go_back(moment)
            else:
                if pieces[-1].finish_reason is None:
                    self._keep(text, sequence, pieces, before, None)
                self._undo = replace(moment, undo=None)  # one step back: a copy of the kept rows, no more

    def _keep(self, text: str, sequence: Sequence, pieces: list[Piece], before: int, end: int | None) -> None:
        """Take a turn into the history, whole or as far as it came."""
        self._sequence = sequence
        # A reply's last token has been shown and not fed, unless an end token followed it: the next turn feeds it.
        chosen = [piece.id for piece in pieces if piece.id is not None]
        self._pending, self._finished_by = chosen[sequence.total - before :], end
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

    def _moment(self) -> Moment:
        sequence = self.engine.runner.copy(self._sequence)
        return Moment(sequence, self._pending, self._finished_by, list(self.messages), self.stats, self._undo)

    def _go_back(self, moment: Moment) -> None:
        self._sequence = self.engine.runner.copy(moment.sequence)  # that one stays as it is, for a second time
        self._pending, self._finished_by = moment.pending, moment.finished_by
        self.messages, self.stats, self._undo = list(moment.messages), moment.stats, moment.undo

    # -- going back, and files ----------------------------------------------------------------------------------------

    def undo(self) -> str:
        """Take the last turn back, message and reply, rows included; returns the message. Budget and system text stay.

        One turn: a copy of the rows before it is kept, and no more. Raises PromptError where there is none.
        """
        self._check_idle()
        moment = self._moment()
        text = self._take_back()
        try:
            self._budget.apply(self._sequence)  # it may have been made smaller meanwhile
        except BaseException:
            self._go_back(moment)
            raise
        return text

    def _take_back(self) -> str:
        if self._undo is None:
            raise PromptError(
                "only the last turn can be taken back, once, and none that came from a file"
                if self.messages
                else "there is no turn to take back"
            )
        text = self.messages[-2]["content"]
        self._go_back(self._undo)
        return text

    def regenerate(
        self, *, config: GenerationConfig | None = None, on_progress: OnProgress | None = None, **options: Any
    ) -> Generator[Piece, None, None]:
        """Take the last reply back and write another one to the same message (the same one, if greedy).

        Where that fails, or ends before its first token, the old reply stays.
        """
        self._check_idle()
        if self._undo is None:
            raise PromptError(
                "only a reply written just now can be written again"
                if self.messages
                else "there is no reply to write again"
            )
        moment = self._moment()
        text = self._take_back()
        try:
            stream = self.send(text, config=config, on_progress=on_progress, **options)
        except BaseException:
            self._go_back(moment)
            raise
        self._go_back(moment)
        return self._again(moment, stream)

    def _again(self, moment: Moment, stream: Generator[Piece, None, None]) -> Generator[Piece, None, None]:
        assert moment.undo is not None
        self._check_idle()
        self._go_back(moment.undo)
        came = False
        try:
            with closing(stream):
                for piece in stream:
                    came = True
                    yield piece
        finally:
            if not came or len(self.messages) < len(moment.messages):
                self._go_back(moment)

    def save(self, path: str | Path) -> None:
        """Write the conversation to a file, to go on with it later by `load`. Raises SnapshotError, PromptError."""
        self._check_idle()
        if not self._sequence.total:
            raise PromptError("there is nothing to save: the conversation is empty")
        copy = self.engine.runner.copy(self._sequence)
        write_chat(self.engine, path, SavedChat(copy, self._system, self.messages, self._pending, self._finished_by))

    def load(self, path: str | Path) -> None:
        """Go on with a conversation that `save` has written; the present one is dropped.

        Raises SnapshotError, before anything is changed, for a file that cannot be gone on from.
        """
        self._check_idle()
        saved = read_chat(self.engine, path)
        self.clear()
        self._sequence, self._system, self.messages = saved.sequence, saved.system, saved.messages
        self._pending, self._finished_by = saved.pending, saved.finished_by
        self._budget.take(saved.sequence.budget)

    def _transcript(self) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self._system}] if self._system else []
        return [*system, *self.messages]
