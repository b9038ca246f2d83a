"""From the scheduler's thread to the task of a request: a bounded box of events."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from .jobs import Event, Job


class Mailbox:
    """What the jobs of one request bring, in order, until somebody takes it. Of the event loop's thread alone.

    room: how many events may lie here. A client that reads so slowly that there are more is given up: `overflow` is
    called once, and nothing more is kept.
    """

    def __init__(self, room: int, overflow: Callable[[], None]) -> None:
        self._room, self._overflow = room, overflow
        self._events: deque[tuple[Job, Event]] = deque()
        self._wanted: asyncio.Future[None] | None = None
        self.closed = False  # the client is gone, or was given up

    def put(self, job: Job, events: list[Event]) -> None:
        if self.closed:
            return
        self._events.extend((job, event) for event in events)
        if len(self._events) > self._room:
            self.close()
            self._overflow()
        self._wake()

    def close(self) -> None:
        """Nobody is there to read: whoever waits is woken, and gets nothing more."""
        self.closed = True
        self._events.clear()
        self._wake()

    async def take(self) -> list[tuple[Job, Event]]:
        """All that has come, at least one event; nothing once the box is closed."""
        while not self._events and not self.closed:
            self._wanted = asyncio.get_running_loop().create_future()
            await self._wanted
        found = list(self._events)
        self._events.clear()
        return found

    def _wake(self) -> None:
        if self._wanted is not None and not self._wanted.done():
            self._wanted.set_result(None)
        self._wanted = None
