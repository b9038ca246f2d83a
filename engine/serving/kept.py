"""What is told of a document's tokens: their texts, and which rows have each of them."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from ...cache.saved_rows import TABLES, whole
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
    layers, heads = rows.length.shape
    table = np.zeros((layers, heads, len(texts)), dtype=np.uint8)
    _mark(table, rows.position.cpu().numpy(), rows.length, rows.length)
    if rows.packed is not None:
        position = rows.packed.tables[TABLES.index("position")].cpu().numpy()
        _mark(table, position, rows.packed.length, whole(rows.packed.length))
    packed = np.packbits(table, axis=2, bitorder="little")
    bits = [base64.b64encode(layer.tobytes()).decode() for layer in packed]
    return {"tokens": texts, "special": special, "bits": bits}


def _mark(table: np.ndarray, position: np.ndarray, length: np.ndarray, room: np.ndarray) -> None:
    """Set `table` `[layers, kv_heads, tokens]` where a row has a token; rows lie side by side, in `room` slots."""
    ends = np.cumsum(room).reshape(room.shape)
    for layer, head in np.ndindex(*length.shape):
        start = ends[layer, head] - room[layer, head]
        table[layer, head, position[start : start + length[layer, head]]] = 1
