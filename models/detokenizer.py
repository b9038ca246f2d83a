"""Decoding one token at a time, with the same text in the end as decoding everything at once."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

_EACH_BYTE = "cake_infer.each_byte"
_WINDOW = 8  # ids of context with which a decoder that looks at neighbours is asked


class Detokenizer(Protocol):
    """`push` gives the text that an id makes certain (never a part of a character), `finish` the rest."""

    def push(self, index: int) -> str: ...

    def finish(self) -> str: ...


class ByteDetokenizer:
    """For tokenizers whose tokens are strings of bytes: O(1) per token.

    `token_bytes` gives the bytes of an id (b'' for one that is not shown). Incomplete characters at the end of the
    prompt are completed by the first tokens; what has been shown as U+FFFD there is not shown again.
    """

    def __init__(
        self, token_bytes: Callable[[int], bytes], prompt_ids: Sequence[int], *, strip_left: bool, each_byte: bool
    ) -> None:
        self._token_bytes = token_bytes
        self._decoder = utf8_decoder(each_byte=each_byte)
        tail = b""
        for index in reversed(prompt_ids):
            tail = token_bytes(index) + tail
            if len(tail) >= 4:  # the longest character; what is before it cannot be incomplete any more
                break
        self._strip = strip_left and not tail
        self._decoder.decode(tail)
        pending = self._decoder.getstate()[0]
        self._shown = decode_bytes(pending, each_byte=each_byte)  # how the prompt's own text ends

    def push(self, index: int) -> str:
        return self._continue(self._token_bytes(index), final=False)

    def finish(self) -> str:
        return self._continue(b"", final=True)

    def _continue(self, data: bytes, *, final: bool) -> str:
        if self._strip and data:
            data = data.removeprefix(b" ")
            self._strip = False
        text = self._decoder.decode(data, final)
        if text and self._shown:
            text = text.removeprefix(self._shown)
            self._shown = ""
        return text


class WindowDetokenizer:
    """For decoders that look at neighbouring tokens: decodes the last few ids with and without the new one."""

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt_ids: Sequence[int]) -> None:
        self._decode = decode
        self._context = list(prompt_ids[-_WINDOW:])
        self._new: list[int] = []

    def push(self, index: int) -> str:
        self._new.append(index)
        return self._take(final=False)

    def finish(self) -> str:
        return self._take(final=True)

    def _take(self, *, final: bool) -> str:
        before = self._decode(self._context)
        text = self._decode([*self._context, *self._new])
        text = text[len(before) :] if text.startswith(before) else ""
        if not text or (text.endswith("\ufffd") and len(self._new) < 4 and not final):
            return ""
        self._context = [*self._context, *self._new][-_WINDOW:]
        self._new.clear()
        return text


def decode_bytes(data: bytes, *, each_byte: bool) -> str:
    """UTF-8 with U+FFFD for every invalid byte, or for every maximal part of a character as WHATWG has it."""
    return utf8_decoder(each_byte=each_byte).decode(data, True)


def utf8_decoder(*, each_byte: bool) -> codecs.IncrementalDecoder:
    """An incremental UTF-8 decoder that replaces what is invalid."""
    if not each_byte:
        return codecs.getincrementaldecoder("utf-8")("replace")
    codecs.register_error(_EACH_BYTE, _replace_each_byte)
    return codecs.getincrementaldecoder("utf-8")(_EACH_BYTE)


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end
