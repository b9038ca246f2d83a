"""One reply as it arrives: shown, counted, and summed up at its end."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import Any

from ..results import Piece, Progress
from ..statistics import Statistics
from .console import Console
from .interrupt import Interrupt

INTERRUPTED = 130

OnProgress = Callable[[Progress], None]


class Reply:
    """The pieces of a stream so far. `show` False keeps the text for `document`."""

    def __init__(self, console: Console, *, show: bool = True) -> None:
        self._console = console
        self._show = show
        self.pieces: list[Piece] = []

    def take(self, stream: Callable[[OnProgress], Generator[Piece, None, None]]) -> None:
        """Shows the pieces of `stream(on_progress)` until the last one or the first Ctrl-C."""
        with Interrupt() as interrupt:
            try:
                with closing(stream(interrupt.watch(self._console.progress))) as pieces:
                    self._read(pieces, interrupt)
            finally:
                self._console.progress.clear()

    def _read(self, pieces: Iterator[Piece], interrupt: Interrupt) -> None:
        """The first Ctrl-C may strike in the prefill as well."""
        try:
            for piece in pieces:
                self.pieces.append(piece)
                if self._show:
                    self._console.text(piece.text)
                if interrupt.asked and piece.finish_reason is None:
                    break
        except KeyboardInterrupt:
            interrupt.asked = True
        if self._show:
            self._console.end_line()

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def finish_reason(self) -> str:
        """Why it ended; `interrupted` where the last piece never came."""
        last = self.pieces[-1].finish_reason if self.pieces else None
        return last or "interrupted"

    @property
    def stats(self) -> Statistics | None:
        """The figures of the last piece; None for a reply that was interrupted."""
        return self.pieces[-1].stats if self.pieces else None

    def report(self, also: str = "") -> None:
        """The statistics line, `also` at its end, and with --verbose the layers."""
        if self.stats is None:
            return
        if self._console.verbose:
            self._console.notice(self.stats.layers_text())
        cut = " | cut at the length limit" if self.finish_reason == "length" else ""
        self._console.notice(" | ".join(filter(None, (self.stats.line() + cut, also))))

    def document(self) -> dict[str, Any]:
        """What --json says of it."""
        tokens = [piece for piece in self.pieces if piece.id is not None]
        document: dict[str, Any] = {
            "text": self.text,
            "finish_reason": self.finish_reason,
            "new_tokens": len(tokens),
            "ids": [piece.id for piece in tokens],
        }
        if any(piece.top_logprobs is not None for piece in tokens):
            document["logprobs"] = [
                {
                    "id": piece.id,
                    "logprob": piece.logprob,
                    "top": [{"id": token, "logprob": value} for token, value in piece.top_logprobs or ()],
                }
                for piece in tokens
            ]
        document["stats"] = None if self.stats is None else self.stats.as_dict()
        return document
