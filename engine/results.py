"""What comes out of the engine: pieces of a stream, whole results, log-probabilities, progress."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ..errors import CakeError
from .statistics import Statistics

FinishReason = Literal["stop", "length", "interrupted"]


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural log-probabilities at one step, of the model's own distribution: before penalties, temperature, filters.

    `id` is the chosen token, `logprob` its value; `top` are the best (id, logprob) pairs, best first, with the chosen
    token behind them if it is not one of them. A probability that is 0 in fp32 stands as None: JSON has no infinity.
    """

    id: int
    logprob: float | None
    top: tuple[tuple[int, float | None], ...] = ()


@dataclass(frozen=True)
class Piece:
    """One step of a stream: the text that has become certain (may be empty) and the token that was chosen.

    The last piece carries `finish_reason` and `stats`; its `id` is None if it only brings the end of the text.
    """

    text: str
    id: int | None = None
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float | None], ...] | None = None
    finish_reason: FinishReason | None = None
    stats: Statistics | None = None


@dataclass(frozen=True)
class Result:
    """A whole reply: its text, token ids, why it ended, log-probabilities if they were asked for, and figures."""

    text: str
    ids: tuple[int, ...]
    finish_reason: FinishReason
    stats: Statistics
    prompt_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True)
class Progress:
    """How far a stage has come: `done` of `total` (bytes of load and download, characters of tokenize, token-layers of
    prefill). A total of 0 is unknown: "compile" is reported about ten times a second until it is over, and so is "wait"
    while text is waited for. tokens: with "prefill" of a text that is read in pieces, how many of its tokens have been
    read; `done` and `total` are tokens then, the total as far as it is known.
    """

    stage: Literal["load", "download", "tokenize", "prefill", "compile", "wait"]
    done: int
    total: int
    layer: int | None = None
    num_layers: int | None = None
    tokens: int | None = None

    @property
    def share(self) -> float:
        """Between 0 and 1; 1 where there is nothing to do."""
        return min(1.0, self.done / self.total) if self.total > 0 else 1.0


def collect(pieces: Iterator[Piece], prompt_ids: list[int]) -> Result:
    """The whole of a stream."""
    texts, ids, logprobs = [], [], []
    for piece in pieces:
        texts.append(piece.text)
        if piece.id is not None:
            ids.append(piece.id)
            if piece.top_logprobs is not None:
                logprobs.append(TokenLogprobs(piece.id, piece.logprob, piece.top_logprobs))
        if piece.finish_reason is not None and piece.stats is not None:
            found = tuple(logprobs) if logprobs else None
            return Result("".join(texts), tuple(ids), piece.finish_reason, piece.stats, tuple(prompt_ids), found)
    raise CakeError("the reply ended without a reason")
