"""One connection: how much a client may send beside its bodies, how long it may take, and when it has gone."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from http import HTTPStatus
from typing import Any, cast

from httptools import HttpRequestParser
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from .errors import ApiError

MOST_HEAD = 1 << 16  # bytes of a request that are not its body
BEGINNING = b"HTTP/1.1 "  # of every answer
LOOK_S = 0.1  # between two looks at a connection on which nothing more will come
FRAME = 8  # bytes of a chunked body's framing that a byte of it may bring along
MOST_PIPELINED = 16  # requests behind the one that is answered; with more of them nothing more is read


class Protocol(HttpToolsProtocol):
    """A connection that is closed if its client neither sends a request nor takes its answer for too long.

    What handles a request finds two things in the scope's state: the `transport`, to end it if it must, and `crowded`,
    whether there are more connections than may be. Answers to what is no HTTP have OpenAI's form too.
    """

    patience = 60.0
    most_connections = 256
    app_state: dict[str, Any]

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        crowded = len(self.connections) > self.most_connections
        self.app_state = {**self.app_state, "transport": transport, "crowded": crowded}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._cycles: list[RequestResponseCycle] = []  # whose answers are not complete, the first of them is running
        self._beside = 0  # bytes of the request that is coming, without its body
        self._arm("request")

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client will send no more. Whether the connection stays open: while there is something to answer.

        It may have closed one direction alone and read on (`shutdown`, as `nc -N` and some proxies do), or have gone:
        the network tells the two apart only by what it answers to bytes that are sent. So the beginning of the answer
        is sent at once, which is the same for all of them. A client that has gone resets the connection then.
        """
        waiting = [cycle for cycle in self._cycles if not cycle.response_complete]
        if not waiting or waiting[-1].more_body or self.transport.is_closing():
            return False
        waiting[-1].keep_alive = False
        if not waiting[0].response_started and not isinstance(waiting[0].transport, _Begun):
            self.transport.write(BEGINNING)
            waiting[0].transport = cast("asyncio.Transport", _Begun(self.transport))
        self._look()
        return True

    def _look(self) -> None:
        """Ends a connection that its client has reset: nothing reads from it any more, and so nobody would be told."""
        peer = self.transport.get_extra_info("socket")
        if peer is not None and peer.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        elif not self.transport.is_closing():
            self._timers["looking"] = self.loop.call_later(LOOK_S, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        for name in list(self._timers):
            self._disarm(name)
        self.pipeline.clear()
        for cycle in self._cycles:  # uvicorn tells the latest request alone
            cycle.disconnected = not cycle.response_complete
            cycle.message_event.set()
        super().connection_lost(exc)

    # -- what comes ---------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._beside += len(data)
        parser = self.parser
        super().data_received(data)
        if self.parser is not parser and self._body_at < len(data):
            super().data_received(data[self._body_at :])
        if self._beside > MOST_HEAD and not self.transport.is_closing():
            self._refuse(431, f"the request has more than {MOST_HEAD:,} bytes beside its body, as many as may be")
        if self.cycle is None or self.cycle.response_complete:
            self._arm("request")
        else:
            self._disarm("request")

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete]
        if self.cycle is not None and self.cycle not in self._cycles:
            self._cycles.append(self.cycle)
        if 0 < len(self.pipeline) <= MOST_PIPELINED:
            self.flow.resume_reading()  # whoever does not read does not see that the client goes away

    def on_body(self, body: bytes) -> None:
        self._beside = max(0, self._beside - (1 + FRAME) * len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._beside = 0
        super().on_message_complete()

    def _unsupported_upgrade_warning(self) -> None:
        """A client would rather speak another protocol: it gets its answer in this one.

        The parser takes such a request to end with its head. Java's client offers h2c with its first request, whatever
        that is: a body that the head announces is read by another parser, and the connection ends with the answer.
        """
        framing = [(name, value) for name, value in self.headers if name in (b"content-length", b"transfer-encoding")]
        if not framing or self.cycle is None:
            return
        error = sys.exc_info()[1]  # says where in the data the head ends
        self._body_at = error.args[0] if error is not None else 0
        self.cycle.more_body, self.cycle.keep_alive = True, False
        self.parser = HttpRequestParser(_Body(self))
        self.parser.feed_data(b"POST / HTTP/1.1\r\n" + b"".join(b"%s: %s\r\n" % pair for pair in framing) + b"\r\n")

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, f"this is no request: {msg[0].lower()}{msg[1:]}")

    def _refuse(self, status: int, message: str) -> None:
        """Answer and close. While another request is answered, or this one already is, there is no place for that."""
        for cycle in self._cycles:
            own = cycle is self.cycle and cycle.more_body and not cycle.response_started
            if not own and not cycle.response_complete:
                self.transport.abort()
                return
        body = json.dumps(ApiError(status, message).body()).encode()
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
        self.transport.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        self.transport.close()

    # -- what goes ----------------------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._arm("reading")

    def resume_writing(self) -> None:
        self._disarm("reading")
        super().resume_writing()

    def _arm(self, name: str) -> None:
        if name not in self._timers:
            self._timers[name] = self.loop.call_later(self.patience, self.transport.abort)

    def _disarm(self, name: str) -> None:
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()


class _Begun:
    """A transport to which the beginning of an answer has been written already."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport, self._left = transport, BEGINNING

    def write(self, data: bytes) -> None:
        begun, self._left = self._left, b""
        self._transport.write(data.removeprefix(begun))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _Body:
    """What a parser tells that reads the body of a request whose head another one has read."""

    def __init__(self, protocol: Protocol) -> None:
        self.on_body, self.on_message_complete = protocol.on_body, protocol.on_message_complete
