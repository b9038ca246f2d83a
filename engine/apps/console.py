"""The two streams of a command: generated text as UTF-8 bytes on stdout, everything else on stderr."""

from __future__ import annotations

import logging
import os
import sys
from types import TracebackType
from typing import BinaryIO, TextIO

from ...errors import CakeError
from ..options import spell_flags
from .progress import ProgressBar

DIM, PLAIN = "\x1b[2m", "\x1b[0m"
LOGGER = "cake_infer"


def one_line(message: object) -> str:
    """The message without line breaks, so that an error is one line whatever it quotes, and with options as flags."""
    return spell_flags(" ".join(str(message).split()))


class Console:
    """Writes text, notices, warnings and progress; shows the package's log while it is entered.

    `quiet` leaves out progress, notices and statistics, never warnings; `verbose` adds the debug log. A failed write to
    stderr is forgotten (nobody is listening), one to stdout raises: BrokenPipeError, or CakeError with the reason.
    """

    def __init__(self, *, quiet: bool = False, verbose: bool = False) -> None:
        self.quiet, self.verbose = quiet, verbose
        self._err: TextIO | None = sys.stderr
        terminal = self._err is not None and self._err.isatty()
        able = terminal and os.environ.get("TERM") != "dumb"
        self._dim = (DIM, PLAIN) if able and "NO_COLOR" not in os.environ else ("", "")
        self.progress = ProgressBar(self._err if able and not quiet else None)
        self._at_line_start = True
        self._handler = _LogLines(self)

    def __enter__(self) -> Console:
        logger = logging.getLogger(LOGGER)
        self._level = logger.level
        logger.addHandler(self._handler)
        logger.setLevel(logging.DEBUG if self.verbose else logging.WARNING if self.quiet else logging.INFO)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.clear()
        logger = logging.getLogger(LOGGER)
        logger.removeHandler(self._handler)
        logger.setLevel(self._level)

    def text(self, text: str) -> None:
        """Generated text, flushed at once: UTF-8 whatever the locale says."""
        if not text:
            return
        self.progress.clear()
        out = _stdout()
        try:
            out.write(text.encode("utf-8"))
            out.flush()
        except BrokenPipeError:
            raise
        except (OSError, ValueError) as error:
            raise CakeError(f"cannot write to standard output: {error}") from error
        self._at_line_start = text.endswith("\n")

    def end_line(self) -> None:
        """Ends a line of text that was begun."""
        if not self._at_line_start:
            self.text("\n")

    def notice(self, message: str) -> None:
        """A line for people on stderr, dim on a terminal; nothing with --quiet."""
        if not self.quiet and message:
            self._line(f"{self._dim[0]}{message}{self._dim[1]}")

    def answer(self, message: str) -> None:
        """What somebody asked to see: a line on stderr, with --quiet too."""
        self._line(f"{self._dim[0]}{message}{self._dim[1]}")

    def warning(self, message: str) -> None:
        """A line that is shown with --quiet too."""
        self._line(f"warning: {one_line(message)}")

    def error(self, message: object) -> None:
        """The one line of a failure."""
        self._line(f"error: {one_line(message)}")

    def _line(self, text: str) -> None:
        if self._err is None:
            return
        self.progress.clear()
        try:
            print(text, file=self._err, flush=True)
        except (OSError, ValueError):
            self._err = None


class _LogLines(logging.Handler):
    """The package's log on a console: warnings as such, the rest as notices."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            self._console.warning(record.getMessage())
        else:
            self._console.notice(one_line(record.getMessage()))


def _stdout() -> BinaryIO:
    if sys.stdout is None:
        raise CakeError("standard output is closed: there is nowhere to write the text")
    return sys.stdout.buffer
