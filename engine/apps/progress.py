"""A progress bar with the time left, on a terminal's standard error and nowhere else."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TextIO

from ..results import Progress

STAGES = {
    "load": "loading",
    "download": "downloading",
    "tokenize": "counting",
    "prefill": "reading",
    "evaluate": "measuring",
    "compile": "compiling",
    "wait": "waiting for text",
    "import": "importing",
}
REDRAW_S = 0.1
# a stage that is over sooner than this never shows a bar
PATIENCE_S = 0.5
BAR_WIDTH = 24
CLEAR_LINE = "\r\x1b[K"


def duration(seconds: float) -> str:
    """`9s`, `1m 05s` or `2h 07m`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


class ProgressBar:
    """Draws how far a stage has come; `clear()` takes the bar away before anything else is written.

    `stream` None (not a terminal, or --quiet) draws nothing. The time left follows from this stage's mean rate.
    """

    def __init__(self, stream: TextIO | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._stage: str | None = None
        self._started = 0.0
        self._first_done = 0
        self._drawn_at = 0.0
        self._visible = False

    def __call__(self, progress: Progress) -> None:
        """Draws the engine's own progress."""
        detail = ""
        if progress.tokens is not None:
            detail = f"{progress.tokens:,} tok"
        elif progress.layer is not None and progress.num_layers:
            detail = f"layer {min(progress.layer + 1, progress.num_layers)}/{progress.num_layers}"
        self.update(progress.stage, progress.done, progress.total, detail, rate=progress.tokens is not None)

    def update(self, stage: str, done: int, total: int, detail: str = "", *, rate: bool = False) -> None:
        """Draws at most every tenth of a second; a finished stage removes the bar. A total of 0 is unknown.

        rate: `done` is in tokens, and how many came in a second is shown.
        """
        if self._stream is None:
            return
        now = self._clock()
        if stage != self._stage or done < self._first_done:
            self.clear()
            self._stage, self._started, self._first_done = stage, now, done
        if done >= total > 0:
            self.clear()
            self._stage = None
            return
        if now - self._started < PATIENCE_S or now - self._drawn_at < REDRAW_S:
            return
        self._drawn_at = now
        elapsed = now - self._started
        if rate and done > self._first_done:
            detail += f"  {(done - self._first_done) / elapsed:,.0f} tok/s"
        line, columns = self._line(stage, done, total, detail, elapsed), _columns(self._stream)
        if columns and len(line) >= columns:  # a line that wraps is not taken away again
            line = self._line(stage, done, total, detail, elapsed, bar=False)[: columns - 1]
        self._write(CLEAR_LINE + line)
        self._visible = self._stream is not None

    def clear(self) -> None:
        """Removes the bar from the terminal, if there is one."""
        if self._visible:
            self._write(CLEAR_LINE)
            self._visible = False

    def _line(self, stage: str, done: int, total: int, detail: str, elapsed: float, *, bar: bool = True) -> str:
        name = STAGES.get(stage, stage)
        if total <= 0:
            return "  ".join([name, *([detail] if detail else []), duration(elapsed)])
        filled = BAR_WIDTH * done // total
        drawn = f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}] " if bar else ""
        parts = [name, f"{drawn}{100 * done // total:3d}%"]
        if detail:
            parts.append(detail)
        worked = done - self._first_done
        if worked > 0:
            parts.append(f"{duration(elapsed * (total - done) / worked)} left")
        return "  ".join(parts)

    def _write(self, text: str) -> None:
        assert self._stream is not None
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            self._stream = None


def _columns(stream: TextIO) -> int:
    """How wide the terminal is, 0 where it does not say."""
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return 0
