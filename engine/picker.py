"""Choosing the tokens of one reply, one after another, and noticing where it ends."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .generation import GenerationConfig
from .results import TokenLogprobs
from .sampling import History, choose, log_probabilities


@dataclass(frozen=True)
class Token:
    """One generated token; `finish_reason` says why the reply ends with it, if it does (a stop token is not text)."""

    id: int
    logprobs: TokenLogprobs | None
    finish_reason: str | None


class Picker:
    """The choices of one reply: its options, its random numbers (seed, step), the tokens that its penalties count.

    generation: resolved. limit: the most tokens. vocab: rows of the head from `valid` on are padding, those in `unused`
    have no token either, and none of them is ever chosen.
    """

    def __init__(
        self,
        generation: GenerationConfig,
        limit: int,
        *,
        stop_ids: frozenset[int],
        prompt_ids: list[int],
        vocab_size: int,
        valid: int | None,
        unused: Tensor | None,
        device: torch.device,
    ) -> None:
        self.generation, self.limit, self.stop_ids = generation, limit, stop_ids
        self.picked = 0
        self._valid, self._unused = valid, unused
        self._history = History(vocab_size, prompt_ids, device) if generation.penalises else None

    def pick(self, logits: Tensor) -> Token:
        """The next token, from its logits fp32 `[vocab]`. Raises CakeError if they are not numbers."""
        generation = self.generation
        if self._unused is not None:
            logits = logits.index_fill(-1, self._unused, float("-inf"))
        token = choose(logits, generation, self._history, generation.seed or 0, self.picked, valid=self._valid)
        logprobs = None
        if generation.logprobs is not None:
            logprobs = log_probabilities(logits, token, generation.logprobs, valid=self._valid)
        self.picked += 1
        reason = "stop" if token in self.stop_ids else "length" if self.picked == self.limit else None
        if reason is None and self._history is not None:
            self._history.add(token)
        return Token(token, logprobs, reason)
