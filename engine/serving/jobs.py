"""What the scheduler runs: one sequence each, a reply or a document that is read; and where its pieces go."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...cache.layout import ArenaSize
from ..batch import Batch
from ..generation import GenerationConfig
from ..member import Outcome
from ..reply import Written
from ..results import Piece
from ..sequence import Sequence
from ..timing import Timing

if TYPE_CHECKING:
    from ..document import Document
    from ..engine import Engine

log = logging.getLogger(__name__)

Event = Piece | BaseException  # an exception is the last one, and so is a piece with a finish reason
Sink = Callable[["Job", list[Event]], None]


@dataclass(eq=False)
class Job:
    """A sequence that is to be fed `ids`. `sink` gets its events, in the event loop's thread.

    index: which of a request's choices it is. Times are of `time.perf_counter`: when it was asked for, when its first
    token came, and its last one.
    """

    engine: Engine
    ids: list[int]
    generation: GenerationConfig
    sequence: Sequence
    stop_ids: frozenset[int]
    sink: Sink
    index: int = 0
    cancelled: bool = False
    asked: float = field(default_factory=time.perf_counter)
    first_token: float | None = None
    last_token: float | None = None
    timing: Timing = field(default_factory=Timing)
    size: ArenaSize | None = None  # what it takes of the arena
    keep: bool = False  # whether its rows are wanted when it is over

    def take(self, outcome: Outcome, batch: Batch) -> list[Event]:
        """What a step has brought, as events. A job that is over has left the batch."""
        raise NotImplementedError

    def cut(self) -> list[Event]:
        """The end of a job that is not finished, because the server stops."""
        raise NotImplementedError


@dataclass(eq=False)
class ReplyJob(Job):
    """A reply, as pieces of text."""

    def __post_init__(self) -> None:
        self.written = Written(self.engine, self.sequence, self.ids, self.generation, self.timing)

    def take(self, outcome: Outcome, batch: Batch) -> list[Event]:
        if outcome.error is not None:
            return [outcome.error]
        events: list[Event] = []
        if outcome.token is not None:
            piece = self.written.push(outcome.token)
            if piece is not None:
                events.append(piece)
        if self.written.finished or outcome.finished:
            batch.leave(self.sequence)
            events.append(self._end())
        return events

    def cut(self) -> list[Event]:
        return [self._end()]

    def _end(self) -> Piece:
        last = self.written.end()
        if last.stats is not None:
            log.debug("%s", last.stats.line())
        return last


@dataclass(frozen=True)
class Read(Piece):
    """A document has been read."""

    document: Document | None = None


@dataclass(eq=False)
class ReadJob(Job):
    """A document that is read; its one event is the document."""

    finish: Callable[[Sequence], Document] | None = None
    keep: bool = True

    def take(self, outcome: Outcome, batch: Batch) -> list[Event]:
        if outcome.error is not None:
            return [outcome.error]
        batch.leave(self.sequence, keep=True)
        assert self.finish is not None
        return [Read("", finish_reason="stop", document=self.finish(self.sequence))]

    def cut(self) -> list[Event]:
        from .errors import ApiError

        return [ApiError(503, "the server is stopping: the document was not read to its end")]
