"""The socket: listening, connections that do not hold up their end, and stopping."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from ...errors import CakeError
from .app import create_app
from .service import Service

SIGNALS = (signal.SIGINT, signal.SIGTERM)
BESIDES_GRACE_S = 3.0  # for what is still to be written when the replies have been cut


def listen(host: str, port: int) -> socket.socket:
    """A socket that has the address, before a model is loaded for it. Raises CakeError in one line."""
    address = host.strip("[]")
    try:
        family, kind, protocol, _, found = socket.getaddrinfo(
            address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise CakeError(f"host {host} is no address of this machine: {error.strerror or error}") from None
    sock = socket.socket(family, kind, protocol)
    try:
        if sys.platform != "win32":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(found)
        sock.listen(128)
    except OSError as error:
        sock.close()
        raise CakeError(_no_address(host, port, error)) from None
    return sock


def _no_address(host: str, port: int, error: OSError) -> str:
    if isinstance(error, PermissionError):
        return f"port {port} may not be used by this user: take one from 1024 on with the option port"
    if "in use" in str(error).lower():
        return f"port {port} of {host} is in use: stop what listens there, or take another one with the option port"
    return f"cannot listen on {host}, port {port}: {error.strerror or error}"


class Protocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """A connection that is closed if its client neither sends a request nor takes its answer for too long.

    What handles a request finds the transport in the scope's state, to end it if it must.
    """

    patience = 60.0
    app_state: dict[str, Any]

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.app_state = {**self.app_state, "transport": transport}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._arm("request")

    def connection_lost(self, exc: Exception | None) -> None:
        for name in list(self._timers):
            self._disarm(name)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._arm("request")
        else:
            self._disarm("request")

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


class Server(uvicorn.Server):
    """Ctrl-C and SIGTERM let running replies end, for as long as `grace` says; a second one does not wait."""

    def __init__(self, service: Service) -> None:
        options = service.options
        super().__init__(
            uvicorn.Config(
                create_app(service),
                http=type("Protocol", (Protocol,), {"patience": options.patience}),
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                limit_concurrency=options.connections,
                timeout_graceful_shutdown=int(options.grace + BESIDES_GRACE_S),
            )
        )
        self.service = service

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
        self.stop()

    def stop(self) -> None:
        """From any thread: take no more requests, and end when the running ones have."""
        self.service.scheduler.drain(self.service.options.grace)
        self.should_exit = True


def serve(server: Server, sock: socket.socket) -> None:
    """Answer until the server is stopped."""
    try:
        server.run(sockets=[sock])
    except OSError as error:
        host, port = sock.getsockname()[:2]
        raise CakeError(_no_address(host, port, error)) from None
    finally:
        with suppress(OSError):
            sock.close()
