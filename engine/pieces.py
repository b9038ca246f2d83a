"""A text as ids that come piece by piece: cut from a list, or encoded while the text itself is still coming."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from ..errors import OptionError, PromptError
from ..models.stream_encoder import StreamEncoder
from ..ranges import POSITIVE
from .encoding import prompt_ids
from .options import DEFAULT_PIECE
from .text import check_text

if TYPE_CHECKING:
    from ..models.chat_template import ChatTemplate
    from ..models.tokenizer import Span, Tokenizer
    from .engine import Engine, Message

Part = tuple[str, "Sequence[Span]"]  # of a text, and where in it no control token may be seen


class Pieces:
    """Ids `[<= size]` of a text, in order; all but the last have `size`. To be gone through once.

    tokens: of the whole text, None where nobody knows yet. share: what part of the text has been handed out, 0 to 1,
    None where nobody knows.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.tokens: int | None = None

    def __iter__(self) -> Iterator[list[int]]:
        raise NotImplementedError

    @property
    def share(self) -> float | None:
        return None


class ListedPieces(Pieces):
    """Pieces of ids that are all there."""

    def __init__(self, ids: list[int], size: int) -> None:
        super().__init__(size)
        self._ids, self._given, self.tokens = ids, 0, len(ids)

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(0, len(self._ids), self.size):
            piece = self._ids[start : start + self.size]
            self._given += len(piece)
            yield piece

    @property
    def share(self) -> float | None:
        return self._given / max(len(self._ids), 1)


class TextPieces(Pieces):
    """Pieces of a text that comes in parts: no more of it is asked for than the next piece takes.

    source: where the parts come from; it may know what `share` of the text it has given. What it raises comes out at
    the piece that asked for it.
    """

    def __init__(self, tokenizer: Tokenizer, parts: Iterable[Part], size: int, source: object = None) -> None:
        super().__init__(size)
        self._tokenizer, self._parts, self._source = tokenizer, parts, source
        self._encoded = self._given = 0

    def __iter__(self) -> Iterator[list[int]]:
        encoder, pending = StreamEncoder(self._tokenizer), list[int]()
        for text, literals in self._parts:
            new = encoder.push(text, literals)
            self._encoded += len(new)
            pending += new
            while len(pending) >= self.size:
                yield self._take(pending)
        new = encoder.finish()
        self._encoded += len(new)
        pending += new
        self.tokens = self._encoded
        while pending:
            yield self._take(pending)

    def _take(self, pending: list[int]) -> list[int]:
        piece = pending[: self.size]
        del pending[: self.size]
        self._given += len(piece)
        return piece

    @property
    def share(self) -> float | None:
        given = getattr(self._source, "share", None)
        if self.tokens is not None or given is None or not self._encoded:
            return None if self.tokens is None else self._given / max(self.tokens, 1)
        return float(given) * self._given / self._encoded


def piece_size(given: object) -> int | None:
    """The tokens of a piece that an option stands for: True is the default, False and None read a text whole."""
    if given is None or given is False:
        return None
    if given is True:
        return DEFAULT_PIECE
    POSITIVE.check("the option stream_prefill", given)
    return cast("int", given)


def prompt_pieces(
    engine: Engine,
    prompt: object,
    messages: Sequence[Message] | None,
    ids: Sequence[int] | None,
    cache: object,
    size: int,
) -> Pieces:
    """A prompt in pieces: ids, texts and messages are encoded whole, iterators of texts as they come.

    Raises PromptError and OptionError, as far as it can be told before the text comes.
    """
    if cache is not None:
        raise OptionError("a question to a document is read whole: leave the option stream_prefill out")
    if prompt is not None and messages is None and ids is None and _comes(prompt):
        texts = cast("Iterator[str]", prompt)
        return TextPieces(engine.text_tokenizer(), _checked(texts, "the prompt"), size, texts)
    if prompt is None and ids is None and messages and isinstance(messages[-1], dict):
        texts = cast("Iterator[str]", messages[-1].get("content"))
        if _comes(texts):
            parts = message_parts(engine.chat_template(), messages, texts)
            return TextPieces(engine.text_tokenizer(), parts, size, texts)
    return ListedPieces(prompt_ids(engine, cast("str | None", prompt), cast("list[Message]", messages), ids), size)


def _comes(prompt: object) -> bool:
    """Whether a text is an iterator of texts, such as an open file."""
    return hasattr(prompt, "__next__")


def _checked(texts: Iterable[str], name: str) -> Iterator[Part]:
    """A text as it stands. Raises PromptError where it is none."""
    return ((check_text(text, name), ()) for text in texts)


def message_parts(template: ChatTemplate, messages: Sequence[Message], texts: Iterable[str]) -> Iterator[Part]:
    """What the template makes of messages, the content of the last one being `texts`. Raises PromptError."""
    around = template.around(messages)
    return _around(around.before, around.literals_before, _content(texts, around), around.after, around.literals_after)


def _around(
    before: str, literals: Sequence[Span], content: Iterator[str], after: str, literals_after: Sequence[Span]
) -> Iterator[Part]:
    yield before, literals
    for text in content:
        yield text, ((0, len(text)),)
    yield after, literals_after


def _content(texts: Iterable[str], around: Any) -> Iterator[str]:
    """A message's text without the white space that its template strips. Raises PromptError if there is none."""
    begun, held = False, ""  # white space that may be the text's end
    for text in texts:
        text = held + check_text(text, "the message")
        held = ""
        if not begun and around.strips_start:
            text = text.lstrip()
        if around.strips_end:
            held = text[len(text.rstrip()) :]
            text = text[: len(text) - len(held)]
        if text:
            begun = True
            yield text
    if not begun:
        raise PromptError("the prompt is empty: there is no text to read")
