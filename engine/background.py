"""Work that must not keep an interrupt waiting: it runs in a thread of its own, and the caller waits in short steps."""

from __future__ import annotations

import threading
from collections.abc import Callable

POLL_S = 0.1


class Background:
    """`work()` in a daemon thread, begun at once. Whoever waits for it can be interrupted; the work then goes on."""

    def __init__(self, work: Callable[[], object], *, name: str) -> None:
        self._work = work
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, on_wait: Callable[[], None] | None = None) -> None:
        """Return when the work is done, or raise what it raised. `on_wait` is called between the steps of waiting."""
        while True:
            self._thread.join(POLL_S)
            if self.done:
                break
            if on_wait is not None:
                on_wait()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # raised again where it is waited for
            self._error = error
