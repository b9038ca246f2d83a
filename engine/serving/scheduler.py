"""One thread that owns the engine's steps: requests join and leave the batch between two of them."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from ...errors import ArenaFull
from ..batch import Batch
from ..engine import Engine
from ..member import Outcome
from ..openmp import release_workers
from .errors import ApiError
from .jobs import Event, Job

log = logging.getLogger(__name__)

MOST_RETRY_S = 60
READERS = 2  # prompts that are read in turn: a short one does not wait until a long one has been read


class Watcher(Protocol):
    """What is told of the scheduler's work, in its own thread."""

    def waited(self, job: Job, seconds: float) -> None: ...
    def token(self, job: Job, seconds: float, *, first: bool) -> None: ...
    def over(self, job: Job, why: str) -> None: ...


class Scheduler:
    """Runs jobs over one continuous batch, first come, first served. Start it, and close it at the end.

    parallel: how many at once. queue: how many more may wait, for a place or for room in the arena. limit: bytes of the
    arena. slice_s: see `Batch`. post: hands a function to the event loop, which calls it in its own thread; whatever a
    job brings goes there, all of a step in one call.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        parallel: int,
        queue: int,
        limit: int,
        slice_s: float,
        post: Callable[[Callable[[], None]], object],
        watcher: Watcher,
    ) -> None:
        self.engine, self.parallel, self.queue, self.limit = engine, parallel, queue, limit
        self._post, self._watcher = post, watcher
        self._changed = threading.Condition()
        self._arrived: deque[Job] = deque()
        self._left: list[Job] = []
        self._waiting: deque[Job] = deque()  # only the thread's own, as is what follows
        self._running: dict[int, Job] = {}  # by the sequence's id()
        self._events: list[tuple[Job, list[Event]]] = []
        self._lasted = 1.0  # seconds of a job, smoothed
        self._deadline: float | None = None
        self._closed = False
        self.arena_bytes = 0
        self.failed: BaseException | None = None
        self._batch = Batch(engine.runner, most=parallel, limit=limit, fixed=True, slice_s=slice_s, readers=READERS)
        self._thread = threading.Thread(target=self._live, name="cake-infer-steps", daemon=True)

    def start(self) -> None:
        release_workers()  # of the thread that has loaded the model: from here on the steps' own thread calls torch
        self._thread.start()

    # -- from other threads -------------------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Replies and documents in the batch."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Those that wait for a place."""
        return len(self._waiting) + len(self._arrived)

    @property
    def stopping(self) -> bool:
        return self._deadline is not None or self.failed is not None

    def submit(self, jobs: list[Job]) -> None:
        """Let jobs wait for their turn, all or none. Raises ApiError: 429 where too many wait, 503 at the end."""
        with self._changed:
            if self.stopping or self._closed:
                raise ApiError(503, "the server is stopping: ask again when it is back", headers={"Retry-After": "5"})
            there = self.running + self.waiting
            if there + len(jobs) > self.parallel + self.queue:
                seconds = min(MOST_RETRY_S, max(1, math.ceil(self._lasted * self.waiting / self.parallel)))
                raise ApiError(
                    429,
                    f"{there} replies are running or waiting, as many as may: ask again later",
                    code="queue_full",
                    headers={"Retry-After": str(seconds)},
                )
            self._arrived.extend(jobs)
            self._changed.notify()

    def cancel(self, jobs: list[Job]) -> None:
        """Nobody wants these any more: their rows are free before the next step, and nothing more comes of them."""
        with self._changed:
            self._left.extend(job for job in jobs if not job.cancelled)
            for job in jobs:
                job.cancelled = True
            self._changed.notify()

    def drain(self, seconds: float) -> None:
        """Take nothing more; what waits is refused, and what runs gets so many seconds before it is cut."""
        with self._changed:
            if self._deadline is None:
                self._deadline = time.perf_counter() + seconds
            self._changed.notify()

    def close(self) -> None:
        """Cut what still runs and end the thread. Safe to call twice."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()
        self._batch.close()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _live(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:  # a fault of the scheduler itself: nobody may wait for it for ever
            log.critical("the scheduler failed", exc_info=error)
            with self._changed:
                self._closed, self.failed = True, error
                self._waiting.extend(self._arrived)
                self._arrived.clear()
            for job in (*self._waiting, *self._running.values()):
                self._events.append((job, [error]))
            self._waiting.clear()
            self._running.clear()
            self._hand_over()

    def _turn(self) -> bool:
        """Wait until there is something to do, and do it: who leaves, who joins, and one step. False at the end."""
        with self._changed:
            while not (self._closed or self._arrived or self._left or len(self._batch) or self._due()):
                self._changed.wait()
            left, self._left = self._left, []
            arrived = list(self._arrived)
            self._waiting.extend(arrived)
            self._arrived.clear()
            closed = self._closed
        for job in left:
            self._drop(job)
        if closed or self._due():
            self._cut(everything=closed or time.perf_counter() >= (self._deadline or 0))
        self._refuse_impossible(arrived)
        self._admit()
        if len(self._batch):
            self._step()
        self.arena_bytes = self._batch.arena.used_bytes
        self._hand_over()
        return not closed

    def _due(self) -> bool:
        """Whether the server stops and somebody is still there to be told."""
        return self._deadline is not None and bool(self._waiting or self._running)

    def _drop(self, job: Job) -> None:
        if job in self._waiting:
            self._waiting.remove(job)
        elif self._running.pop(id(job.sequence), None) is not None:
            self._batch.leave(job.sequence)
        else:
            return  # it was over already
        self._watcher.over(job, "cancelled")

    def _cut(self, *, everything: bool) -> None:
        for job in self._waiting:
            self._tell(job, [ApiError(503, "the server is stopping", headers={"Retry-After": "5"})], "refused")
        self._waiting.clear()
        if everything:
            for job in list(self._running.values()):
                del self._running[id(job.sequence)]
                self._batch.leave(job.sequence)
                self._tell(job, job.cut(), "cut")

    def _refuse_impossible(self, arrived: list[Job]) -> None:
        """What could not run even alone is told so at once, before its turn."""
        for job in arrived:
            if job not in self._waiting:
                continue
            try:
                # with the budget that was asked for, not with what the arena could do with
                job.size = self.engine.runner.fit(job.sequence, len(job.ids), job.generation.max_new_tokens or 0).size
                self._batch.arena.check(job.size)
            except ArenaFull:
                pass
            except BaseException as error:
                self._refuse(job, error)

    def _admit(self) -> None:
        """Let those join whose turn it is, as far as there is room."""
        while self._waiting and len(self._batch) < self.parallel:
            job = self._waiting[0]
            try:
                self._join(job)
            except ArenaFull as error:
                if len(self._batch):
                    return  # its turn comes when others have left
                self._refuse(job, error)
            except BaseException as error:
                self._refuse(job, error)
            else:
                self._waiting.popleft()
                self._running[id(job.sequence)] = job
                self._watcher.waited(job, time.perf_counter() - job.asked)

    def _join(self, job: Job) -> None:
        self._batch.join(job.sequence, job.ids, job.generation, stop_ids=job.stop_ids, timing=job.timing, keep=job.keep)

    def _refuse(self, job: Job, error: BaseException) -> None:
        self._waiting.remove(job)
        self._tell(job, [error], "error")

    def _step(self) -> None:
        try:
            outcomes = self._batch.step()
        except BaseException as error:
            self._fail(error)
            return
        now = time.perf_counter()
        for outcome in outcomes:
            if (job := self._running.get(id(outcome.sequence))) is not None:
                self._take(job, outcome, now)

    def _take(self, job: Job, outcome: Outcome, now: float) -> None:
        if outcome.token is not None:
            before = job.last_token
            self._watcher.token(job, now - (job.asked if before is None else before), first=before is None)
            job.first_token = job.first_token or now
            job.last_token = now
        try:
            events = job.take(outcome, self._batch)
        except BaseException as error:  # of one job: a document that cannot be packed
            log.exception("a request failed")
            self._batch.leave(job.sequence)
            events = [error]
        if not events:
            return
        last = events[-1]
        if isinstance(last, BaseException) or last.finish_reason is not None:
            del self._running[id(job.sequence)]
            self._lasted += 0.2 * (now - job.asked - self._lasted)
            self._tell(job, events, "error" if isinstance(last, BaseException) else str(last.finish_reason))
        else:
            self._events.append((job, events))

    def _fail(self, error: BaseException) -> None:
        """A step has failed: whoever was in it has left the batch."""
        log.error("a step failed", exc_info=error)
        there = {id(sequence) for sequence in self._batch.sequences}
        for key, job in list(self._running.items()):
            if key not in there:
                del self._running[key]
                self._tell(job, [error], "error")

    def _tell(self, job: Job, events: list[Event], why: str) -> None:
        self._events.append((job, events))
        self._watcher.over(job, why)

    def _hand_over(self) -> None:
        """All events since the last time, in one call of the event loop."""
        if not self._events:
            return
        events, self._events = self._events, []

        def deliver() -> None:
            for job, found in events:
                job.sink(job, found)

        try:
            self._post(deliver)
        except RuntimeError:  # the loop has been closed: nobody is there any more
            log.debug("%d events had no listener", len(events))
