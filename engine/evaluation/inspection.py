"""What `inspect` shows of one prompt: its tokens, and what each policy kept of them, row by row."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...models.tokenizer import Tokenizer
from .kept import Kept


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[list[str], list[int]]:
    """The text that each id adds, and which of them are control tokens, shown as they are written.

    A character that several ids make up comes with the last of them.
    """
    texts, control = [], []
    stream = tokenizer.detokenizer()
    for number, index in enumerate(ids):
        if index in tokenizer.special_ids:
            texts.append(stream.finish() + tokenizer.token(index))
            control.append(number)
            stream = tokenizer.detokenizer()
        else:
            texts.append(stream.push(index))
    if texts:
        texts[-1] += stream.finish()
    return texts, control


def shown_cell(
    policy: str, budget: str, kept: Kept | None, tokens: int, layers: int, kv_heads: int, window: int
) -> dict[str, Any]:
    """One policy and budget. bits: per layer, its heads one behind the other, a bit for each token, lowest first."""
    bits, lengths, preferences = [], [], []
    for layer in range(layers):
        table = np.zeros((kv_heads, tokens), dtype=np.uint8)
        for head in range(kv_heads):
            table[head, slice(None) if kept is None else kept.columns(layer, head).cpu().numpy()] = 1
        lengths.append(table.sum(1).tolist())
        bits.append(base64.b64encode(np.packbits(table, axis=1, bitorder="little").tobytes()).decode())
        preferences.append(_weight(kept, layer))
    return {
        "policy": policy,
        "budget": budget,
        "window": window,
        "bits": bits,
        "lengths": lengths,
        "preferences": preferences,
        "share": float(np.sum(lengths)) / (tokens * layers * kv_heads),
    }


def _weight(kept: Kept | None, layer: int) -> float:
    if kept is None:
        return 1.0
    given = kept.preferences[layer]
    return float(given) if isinstance(given, (int, float)) else float(sum(given))
