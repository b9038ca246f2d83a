"""Ctrl-C during a reply: the first one is a request that the loop honours between two tokens, the second raises."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import TypeVar

Event = TypeVar("Event")


class Interrupt:
    """While entered, SIGINT sets `.asked`; a second SIGINT raises KeyboardInterrupt at once.

    A KeyboardInterrupt that strikes anywhere could leave a half-written row in the cache; a flag that is looked at
    between pieces and in the progress callback cannot. Outside the main thread, where Python has no signals, `.asked`
    stays False.
    """

    def __init__(self) -> None:
        self.asked = False
        self._previous: object = None

    def __enter__(self) -> Interrupt:
        # a job in the background ignores Ctrl-C from its start, and goes on ignoring it
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)  # type: ignore[arg-type]

    def watch(self, callback: Callable[[Event], None]) -> Callable[[Event], None]:
        """`callback`, but KeyboardInterrupt once asked for: progress is reported where a run can be unwound."""

        def checked(event: Event) -> None:
            if self.asked:
                raise KeyboardInterrupt
            callback(event)

        return checked

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
