"""Who has the engine at the moment: one caller at a time, and none while a text is read by another one's callback."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..errors import CakeError
from .sequence import Sequence


class Access:
    """The queue of concurrent callers, each with a sequence of its own.

    flyer: who decodes ahead at the moment, if anybody does; `end_flight` undoes what has run ahead (of None, as
    anybody's; of the flyer itself, at the end of its reply).
    """

    def __init__(self, end_flight: Callable[[object], None]) -> None:
        self._end_flight = end_flight
        self._lock = threading.RLock()
        self._busy = False
        self.flyer: object = None

    @contextmanager
    def whole(self, sequence: Sequence) -> Iterator[None]:
        """Mark the sequence as spoilt if what runs inside does not come to its end."""
        assert not sequence.spoilt, "a spoilt sequence was continued"
        sequence.spoilt = True
        with self.busy():
            yield
        sequence.spoilt = False

    @contextmanager
    def busy(self) -> Iterator[None]:
        """What runs inside may call back to a caller, who cannot have the engine meanwhile."""
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    @contextmanager
    def alone(self, flyer: object = None) -> Iterator[None]:
        """Wait until no other thread has the arena. A callback of a piece that is being read cannot have it either.

        What decodes ahead is landed first, so that rows and tables agree, unless it is the `flyer` itself who asks.
        """
        with self._lock:
            if self._busy:
                raise CakeError("the engine is reading a text: call it again when on_progress has returned")
            if self.flyer is not None and self.flyer is not flyer:
                self.land()
            yield

    def land(self) -> None:
        """Undo what has been decoded ahead, if anything was."""
        if self.flyer is not None:
            self._end_flight(None)
        self.flyer = None

    @contextmanager
    def landing(self, flyer: object) -> Iterator[None]:
        """A flyer's reply: at its end what has run ahead of it is undone, if nobody else has done so."""
        try:
            yield
        finally:
            with self._lock:
                if self.flyer is flyer:
                    self.flyer = None
                    self._end_flight(flyer)
