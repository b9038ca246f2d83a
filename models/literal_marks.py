"""Marks that keep what users write apart from what a chat template writes, through the rendering of the template."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .tokenizer import Span, Tokenizer

_PRIVATE_USE = range(0xF0000, 0xFFFFE)


@dataclass(frozen=True)
class LiteralMarks:
    """Four characters that occur in none of the texts, and the control tokens to look out for.

    A control token in a user's text is put between `begin` and `end`. `joint` stands where a user's text begins or ends
    with a part of a control token, which text beside it could complete. `other` is a stand-in for a whole message.
    """

    tokenizer: Tokenizer
    begin: str
    end: str
    joint: str
    other: str

    @staticmethod
    def unused_in(texts: Iterable[str], tokenizer: Tokenizer) -> LiteralMarks:
        used = set().union(*map(set, texts))
        free: Iterator[str] = (chr(code) for code in _PRIVATE_USE if chr(code) not in used)
        return LiteralMarks(tokenizer, next(free), next(free), next(free), next(free))

    def mark(self, text: str) -> str:
        """`text` with marks; the text itself where it has nothing to do with a control token."""
        marked = self.tokenizer.control_pattern.sub(lambda match: f"{self.begin}{match[0]}{self.end}", text)
        tokens = [token.content for token in self.tokenizer.control_tokens]
        longest = max(map(len, tokens), default=0)
        head, tail = text[:longest][::-1], text[len(text) - min(longest, len(text)) :]
        if any(_ends_with_beginning_of(tail, token) for token in tokens):
            marked += self.joint
        if any(_ends_with_beginning_of(head, token[::-1]) for token in tokens):
            marked = self.joint + marked
        return marked

    def unmark(self, rendered: str) -> tuple[str, list[Span]]:
        """The rendered text without marks, and where in it no control token may be seen.

        A mark that a template has torn from its partner still keeps what is before it apart from what comes after.
        """
        pattern = (
            f"{self.begin}({self.tokenizer.control_pattern.pattern}){self.end}|[{self.begin}{self.end}{self.joint}]"
        )
        parts: list[str] = []
        spans: list[Span] = []
        length = position = 0
        for match in re.finditer(pattern, rendered):
            parts += [rendered[position : match.start()], match[1] or ""]
            start = length + match.start() - position
            length = start + len(parts[-1])
            position = match.end()
            spans.append((start, length))
        return "".join([*parts, rendered[position:]]), spans


def _ends_with_beginning_of(text: str, token: str) -> bool:
    """Whether a proper part of `token`, from its beginning, is the end of `text` (white space aside)."""
    if text[-1:].isspace():
        return False
    return any(text.endswith(token[:length]) for length in range(min(len(text), len(token) - 1), 0, -1))
