"""What is told of a document's tokens: their texts, and which rows have each of them."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from ...models.tokenizer import Tokenizer
from ..document import Document
from ..evaluation.inspection import token_texts


def kept_tokens(document: Document, tokenizer: Tokenizer) -> dict[str, Any]:
    """The picture of a document.

    tokens: the text that each adds, special: the numbers of control tokens. bits: per layer, base64 of its heads one
    behind the other, a bit for each token that is kept there, lowest first, each head from a byte of its own.
    """
    texts, special = token_texts(tokenizer, document.snapshot.ids)
    rows = document.snapshot.rows
    position, start, bits = rows.position.cpu().numpy(), 0, []
    for lengths in rows.length.tolist():
        table = np.zeros((len(lengths), len(texts)), dtype=np.uint8)
        for head, length in enumerate(lengths):
            table[head, position[start : start + length]] = 1
            start += length
        bits.append(base64.b64encode(np.packbits(table, axis=1, bitorder="little").tobytes()).decode())
    return {"tokens": texts, "special": special, "bits": bits}
