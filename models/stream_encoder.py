"""Token ids of a text that comes in parts: those of the whole text, though no more than a part of it is ever there."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence

from .tokenizer import Span, Tokenizer

AHEAD = 64  # characters that must follow a cut: what comes later is not to change the tokens before it
CONTEXT = 128  # characters on both sides of a cut on which it is tried
LEAST = 4096  # characters that are gathered before a cut is looked for
MOST = 1 << 16  # characters after which a text that cannot be cut without a trace is cut nevertheless
TRIES = 24  # places of each kind that are tried
# where tokenizers split anyway, the likeliest kind first: before the space of a word, behind a line, behind punctuation
_PLACES = (re.compile(r"(?<=\S)(?= \w)"), re.compile(r"(?<=\n)(?=\S)"), re.compile(r"(?<=[^\w\s])(?=\w)"))
_JOINERS = {"\u200d", "\ufe0e", "\ufe0f"}  # a character after one, or one of these itself, belongs to what is before it


class StreamEncoder:
    """Takes a text part by part and gives the ids of what is certain; `finish` gives the rest.

    A text is cut only where both sides, encoded alone, have the tokens that they have together, which is tried on the
    characters around the place. So all ids, joined, are those of `Tokenizer.encode_with_literals` for the whole text,
    behind one BOS if the tokenizer adds one. Where no such place is found in `MOST` characters (a text of one endless
    word) it is cut anyhow, and tokens at that place may differ.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._text = ""
        self._literals: list[Span] = []
        self._begun = False

    def push(self, text: str, literals: Sequence[Span] = ()) -> list[int]:
        """Take the next part; no control token begins or ends inside one of its spans `literals`."""
        at = len(self._text)
        for start, end in literals:
            start += at
            if start == at and self._literals and self._literals[-1][1] == at:  # it goes on
                start = self._literals.pop()[0]
            self._literals.append((start, at + end))
        self._text += text
        if len(self._text) < LEAST + AHEAD:
            return []
        cut = self._cut()
        return [] if cut is None else self._take(cut)

    def finish(self) -> list[int]:
        """The ids of what is left; nothing may be pushed afterwards."""
        return self._take(len(self._text))

    def _take(self, end: int) -> list[int]:
        spans = [(start, min(stop, end)) for start, stop in self._literals if start < end]
        ids = self._tokenizer.encode_with_literals(self._text[:end], spans, continues=self._begun)
        self._literals = [(max(start - end, 0), stop - end) for start, stop in self._literals if stop > end]
        self._text = self._text[end:]
        if not self._begun:
            ids = self._tokenizer.with_one_bos(ids)
        self._begun = True
        return ids

    def _cut(self) -> int | None:
        """The last place at which the text can be cut; None where more of it should come first."""
        for cut in self._places():
            if self._leaves_no_trace(cut):
                return cut
        return len(self._text) - AHEAD if len(self._text) >= MOST else None

    def _places(self) -> Iterator[int]:
        last = len(self._text) - AHEAD
        first = max(last - 16 * CONTEXT, 1)
        for pattern in _PLACES:
            found = [match.start() for match in pattern.finditer(self._text, first, last)]
            yield from reversed(found[-TRIES:])
        tried = 0
        for cut in range(last, first, -1):
            before, after = self._text[cut - 1], self._text[cut]
            joined = unicodedata.combining(after) or after in _JOINERS or before in _JOINERS
            if not joined and before != after and not (before.isspace() and after.isspace()):
                yield cut
                tried += 1
            if tried == TRIES:
                return

    def _leaves_no_trace(self, cut: int) -> bool:
        """Whether the tokens around a cut are the same with and without it."""
        start, end = max(cut - CONTEXT, 0), cut + CONTEXT
        spans = [(max(a, start), min(b, end)) for a, b in self._literals if a < end and b > start]

        def ids(first: int, last: int) -> list[int]:
            own = [(max(a, first) - first, min(b, last) - first) for a, b in spans if a < last and b > first]
            return self._tokenizer.encode_with_literals(self._text[first:last], own, continues=True)

        end = min(end, len(self._text))
        return ids(start, cut) + ids(cut, end) == ids(start, end)
