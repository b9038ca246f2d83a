"""What a tokenizer file can do, whichever library reads it, and the prefix that it puts before text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from .token_bytes import SPACE, TokenBytes
from .token_files import AddedToken


@dataclass(frozen=True)
class Prefix:
    """The dummy prefix (a space) before a text: 'always' also after each control token, 'first' only at the start."""

    scheme: str = "never"
    text: str = SPACE
    unless_space: bool = False

    def before(self, chunk: str, *, at_start: bool) -> str:
        if self.scheme == "never" or (self.scheme == "first" and not at_start):
            return ""
        return "" if self.unless_space and chunk.startswith((" ", self.text)) else self.text


class TokenSource(Protocol):
    """A loaded tokenizer file.

    `added` are the tokens found in text first, `size` is the highest id + 1, `leading` the text of the token that the
    file itself wants in front of every text (BOS), `end` its EOS where it names one. `bytes_of` is None where only
    `decode` knows.
    """

    added: tuple[AddedToken, ...]
    size: int
    prefix: Prefix
    leading: str | None
    end: str | None
    bytes_of: TokenBytes | None

    def encode(self, text: str) -> list[int] | None:
        """Ids of a text with its control tokens and the prefix, no BOS added; None where the library cannot do that."""

    def encode_bare(self, text: str) -> list[int]:
        """Ids of a text without looking for control tokens and without a prefix."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids by the library's own decoder, special tokens included."""

    def token(self, index: int) -> str | None:
        """The token's own text, None for an id without one."""

    def id(self, token: str) -> int | None:
        """The id of exactly this token."""
