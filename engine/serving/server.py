"""The socket: listening, and stopping."""

from __future__ import annotations

import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import uvicorn

from ...errors import CakeError
from .app import create_app
from .protocol import Protocol
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


class Server(uvicorn.Server):
    """Ctrl-C and SIGTERM let running replies end, for as long as `grace` says; a second one does not wait."""

    def __init__(self, service: Service) -> None:
        options = service.options
        bounds = {"patience": options.patience, "most_connections": options.connections}
        super().__init__(
            uvicorn.Config(
                create_app(service),
                http=type("Protocol", (Protocol,), bounds),
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
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
