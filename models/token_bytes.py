"""The bytes a token stands for: what makes decoding one token at a time exact."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SPACE = "\u2581"  # SentencePiece's visible space


@dataclass(frozen=True)
class TokenBytes:
    """How a tokenizer's decoder turns the text of a token into bytes, where it does so token by token.

    `byte_level`: every character stands for a byte (GPT-2's alphabet). Otherwise `replace` is applied, then pieces like
    '<0x0A>' are bytes if `byte_fallback`. `strip_left`: one space at the very start of a text is dropped.
    """

    byte_level: bool = False
    replace: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    strip_left: bool = False

    def __call__(self, token: str) -> bytes:
        if self.byte_level:
            alphabet = byte_alphabet()
            if all(character in alphabet for character in token):
                return bytes(alphabet[character] for character in token)
            return token.encode("utf-8")
        for old, new in self.replace:
            token = token.replace(old, new)
        match = _BYTE_PIECE.fullmatch(token) if self.byte_fallback else None
        return bytes([int(match[1], 16)]) if match else token.encode("utf-8")

    @staticmethod
    def of_decoder(decoder: dict[str, Any] | None) -> TokenBytes | None:
        """Read the `decoder` of a tokenizer.json; None where it is of a kind that looks at more than one token."""
        steps = (decoder or {}).get("decoders", [decoder]) if decoder else []
        kinds = [step["type"] for step in steps]
        if kinds == ["ByteLevel"]:
            return TokenBytes(byte_level=True)
        if not kinds or not set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
            return None
        order = [kind for kind in kinds if kind != "Replace"]
        replaced_first = "Replace" not in kinds[kinds.count("Replace") :]
        if not replaced_first or order not in (["ByteFallback", "Fuse"], ["ByteFallback", "Fuse", "Strip"], ["Fuse"]):
            return None
        strip = steps[-1] if kinds[-1] == "Strip" else None
        if strip is not None and (strip["content"], strip["start"], strip["stop"]) != (" ", 1, 0):
            return None
        replaces = [step for step in steps if step["type"] == "Replace"]
        if any("String" not in step["pattern"] for step in replaces):
            return None
        replace = tuple((step["pattern"]["String"], step["content"]) for step in replaces)
        return TokenBytes(False, replace, "ByteFallback" in order, strip is not None)


@cache
def byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters stand for themselves, the other bytes for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}
