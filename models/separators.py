"""Where clauses and lines end, in tokens."""

from __future__ import annotations

from .tokenizer import Tokenizer

MARKS = b".,;:!?\n"
WIDE_MARKS = tuple(mark.encode() for mark in "\u3002\uff0c\uff1b\uff1a\uff01\uff1f\u3001")  # Chinese and Japanese ones


def separator_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids of the tokens whose text ends with punctuation or a line break, spaces behind it not counted."""
    found = set()
    for index in range(tokenizer.vocab_size):
        text = tokenizer.token_bytes(index).rstrip(b" \t\r")
        if text and (text[-1] in MARKS or text.endswith(WIDE_MARKS)):
            found.add(index)
    return frozenset(found)
