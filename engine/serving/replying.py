"""The response to a request that runs: whole or as server-sent events, watched for a client that goes away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from ..results import Piece
from .answers import Answer, event
from .errors import ApiError, as_api_error
from .jobs import Event, Job
from .mailbox import Mailbox

if TYPE_CHECKING:
    from .scheduler import Scheduler

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies would gather what should be seen at once
]


def error_response(error: BaseException) -> JSONResponse:
    """The answer that an exception is."""
    told = as_api_error(error)
    return JSONResponse(told.body(), status_code=told.status, headers=told.headers)


class Running(Response):
    """Jobs of one request from their submission to their end; they are cancelled whatever ends this."""

    def __init__(self, scheduler: Scheduler, jobs: list[Job], *, room: int) -> None:
        self.scheduler, self.jobs = scheduler, jobs
        self.box = Mailbox(room, self._give_up)
        self.background = None
        self._transport: Any = None
        for job in jobs:
            job.sink = self.box.put

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._transport = scope.get("state", {}).get("transport")
        watch = asyncio.create_task(self._watch(receive))
        try:
            self.scheduler.submit(self.jobs)
            await self.answer(scope, receive, send)
        except ApiError as error:
            await error_response(error)(scope, receive, send)
        except OSError:
            pass  # the client is gone
        finally:
            self.box.close()
            self.scheduler.cancel(self.jobs)
            watch.cancel()
            with suppress(asyncio.CancelledError):
                await watch

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError

    async def _watch(self, receive: Receive) -> None:
        """Until the client goes away, in which case whoever waits for the jobs is woken."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.box.close()

    def _give_up(self) -> None:
        """The client does not read what it is sent."""
        self.scheduler.cancel(self.jobs)
        if self._transport is not None:
            self._transport.abort()


class WholeReply(Running):
    """The answer in one piece."""

    def __init__(self, scheduler: Scheduler, answer: Answer) -> None:
        super().__init__(scheduler, list(answer.jobs), room=1 << 62)  # what nobody reads yet is the answer itself
        self.whole = answer

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        while not self.whole.finished:
            events = await self.box.take()
            if self.box.closed:
                return
            for job, found in events:
                self.whole.take(job, _piece(found))
        await JSONResponse(self.whole.whole())(scope, receive, send)


class Stream(Running):
    """The answer as events; its status is known when the first one comes."""

    def __init__(self, scheduler: Scheduler, answer: Answer, *, room: int) -> None:
        super().__init__(scheduler, list(answer.jobs), room=room)
        self.chunks = answer

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        while not self.chunks.finished:
            events = await self.box.take()
            if self.box.closed:
                return
            parts = []
            try:
                for job, found in events:
                    parts.append(self.chunks.chunks(job, _piece(found)))
            except ApiError as error:
                if not started:
                    raise
                parts.append(event(error.body()))
                await send({"type": "http.response.body", "body": b"".join(parts)})
                return
            body = b"".join(parts)
            if not started:
                await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
                started = True
            if body:
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class Reading(Running):
    """A document that is read; `keep` makes the answer of it."""

    def __init__(self, scheduler: Scheduler, job: Job, keep: Callable[[Piece], dict[str, Any]]) -> None:
        super().__init__(scheduler, [job], room=16)
        self.keep = keep

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        events = await self.box.take()
        if events and not self.box.closed:
            body = self.keep(_piece(events[0][1]))
            await JSONResponse(body, status_code=201)(scope, receive, send)


def _piece(found: Event) -> Piece:
    if isinstance(found, BaseException):
        raise as_api_error(found) from found
    return found
