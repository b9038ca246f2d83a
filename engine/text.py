"""Text that comes in as bytes, and text that goes out token by token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ..errors import OptionError, PromptError
from ..ranges import shown

if TYPE_CHECKING:
    from ..models.tokenizer import Tokenizer

_BYTE_ORDER_MARKS = {
    b"\xff\xfe\x00\x00": "UTF-32",
    b"\x00\x00\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}


class TextStream:
    """The text of a reply while its ids arrive; it ends before the first stop string.

    `push` returns only text that is certain: whole characters, and nothing that may be the beginning of a stop string.
    All that is returned, joined, is decode(prompt + reply) minus decode(prompt), cut at the stop string that is
    complete first (of two that end together, the longer). Where tokens begin and end makes no difference. A stop
    string that names a special token stops at that token. After the stop nothing more comes.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), stop: Iterable[str] = ()) -> None:
        self._stop = tuple(stop)
        if any(not text for text in self._stop):
            raise OptionError("a stop string is empty: every text would end before it began")
        self._stop_ids = {index for text in self._stop if (index := tokenizer.token_id(text)) is not None}
        self._stop_ids &= tokenizer.special_ids
        self._detokenizer = tokenizer.detokenizer(prompt_ids)
        self._held = ""  # decoded, and possibly the beginning of a stop string
        self._emitted: list[str] = []
        self.stopped = False

    def push(self, index: int) -> str:
        """Take the next id and return the text that is now certain, often ''."""
        if self.stopped:
            return ""
        if index in self._stop_ids:
            text = self.finish()
            self.stopped = True
            return text
        return self._emit(self._detokenizer.push(index), final=False)

    def finish(self) -> str:
        """The rest: what was held back, and U+FFFD for an incomplete character. Nothing after a stop string."""
        return "" if self.stopped else self._emit(self._detokenizer.finish(), final=True)

    @property
    def text(self) -> str:
        """Everything returned so far."""
        if len(self._emitted) > 1:
            self._emitted = ["".join(self._emitted)]
        return self._emitted[0] if self._emitted else ""

    def _emit(self, new: str, *, final: bool) -> str:
        if not new and not final:
            return ""
        text = self._held + new
        end = self._first_stop(text)
        if end is not None:
            self.stopped = True
            text, self._held = text[:end], ""
        else:
            keep = 0 if final else self._possible_beginning(text)
            text, self._held = text[: len(text) - keep], text[len(text) - keep :]
        if text:
            self._emitted.append(text)
        return text

    def _first_stop(self, text: str) -> int | None:
        """Where the stop string begins that is complete first."""
        found = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        return min(found)[1] if found else None

    def _possible_beginning(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        longest = max(map(len, self._stop), default=0)
        for length in range(min(longest - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stop):
                return length
        return 0


def decode_input(data: bytes, name: str) -> str:
    """The text of a UTF-8 file: a byte order mark is dropped, CRLF line ends become LF, everything else is kept.

    PromptError in one line, with `name` and the byte offset, for UTF-16, UTF-32, binary data and invalid UTF-8.
    """
    reader = TextReader(name)
    return reader.push(data) + reader.finish()


class TextReader:
    """The text of a UTF-8 file whose bytes come bit by bit: all that is returned, joined, is that of `decode_input`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._held = b""  # the beginning of a character, of a line end, or of the file
        self._at = 0  # bytes in front of them

    def push(self, data: bytes) -> str:
        """The text that is certain. Raises PromptError, with the byte offset in the whole, as `decode_input`."""
        return self._decode(data, final=False)

    def finish(self) -> str:
        """The rest; PromptError where a character is cut off."""
        return self._decode(b"", final=True)

    def _decode(self, data: bytes, *, final: bool) -> str:
        data, name = self._held + data, self._name
        if self._at == 0:
            if len(data) < 4 and not final:
                self._held = data
                return ""
            for mark, encoding in _BYTE_ORDER_MARKS.items():
                if data.startswith(mark):
                    raise PromptError(f"{name}: is {encoding} (byte order mark at byte 0): convert it to UTF-8 first")
        nul = data.find(b"\0")
        if nul >= 0:
            at = self._at + nul
            if _looks_like_utf16(data):
                raise PromptError(f"{name}: looks like UTF-16 (NUL at byte {at}): convert it to UTF-8 first")
            raise PromptError(f"{name}: is a binary file and not text, it has a NUL (at byte {at})")
        end = len(data)
        if not final and data.endswith(b"\r"):
            end -= 1
        try:
            text = data[:end].decode("utf-8")
        except UnicodeDecodeError as error:
            if final or error.reason != "unexpected end of data":
                raise PromptError(
                    f"{name}: is not UTF-8 text (0x{data[error.start]:02x} at byte {self._at + error.start}): convert "
                    "it to UTF-8 first"
                ) from error
            end = error.start
            text = data[:end].decode("utf-8")
        if self._at == 0:
            text = text.removeprefix("\ufeff")
        self._held, self._at = data[end:], self._at + end
        return text.replace("\r\n", "\n")


def check_text(text: str, name: str) -> str:
    """`text` itself. PromptError, with `name`, where it is no text, or with the byte offset of a lone surrogate in it.

    Python puts one in the place of a byte that it could not decode (surrogateescape), JSON may spell one out.
    """
    if not isinstance(text, str):
        raise PromptError(f"{name} must be a text, not {shown(text)}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        offset = len(text[: error.start].encode("utf-8"))
        what = (
            f"the invalid byte 0x{code - 0xDC00:02x}"
            if 0xDC80 <= code <= 0xDCFF
            else f"the lone surrogate U+{code:04X}"
        )
        raise PromptError(f"{name}: is not valid UTF-8 text ({what} at byte {offset})") from error
    return text


def _looks_like_utf16(data: bytes) -> bool:
    """Nearly all characters of Latin text have a zero high byte in UTF-16, always on the same side.

    UTF-8 with a NUL here and there, as between names in a list, is none of it.
    """
    sample = data[:4096]
    zeros = sorted(sample[side::2].count(0) for side in (0, 1))
    return len(data) % 2 == 0 and zeros[1] * 4 >= len(sample) // 2 * 3 and zeros[0] * 20 <= zeros[1]
