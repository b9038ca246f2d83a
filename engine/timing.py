"""What one reply took."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Timing:
    """What one reply took, filled in while it runs."""

    prompt_tokens: int = 0
    pieces: int = 0  # in which they were read, 0 for a text that was read whole
    prefill_s: float = 0.0
    decode_s: float = 0.0
    decode_steps: int = 0
    lengths: tuple[tuple[int, ...], ...] = ()  # kept tokens per layer and KV head after the prefill
    total: int = 0  # true tokens after the prefill
    finished_by: int | None = None  # the end token that the reply ended with, if it did
