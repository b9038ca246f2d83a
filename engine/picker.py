"""Choosing the tokens of one reply, one after another, and noticing where it ends."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import CakeError
from .generation import GenerationConfig
from .results import TokenLogprobs
from .sampling import NOT_FINITE, History, choose, log_probabilities, not_finite_message


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
        self._uncounted: list[int] = []  # tokens of the reply that the history does not know of yet

    def pick(self, logits: Tensor) -> Token:
        """The next token, from its logits fp32 `[vocab]`. Raises CakeError if they are not numbers."""
        logits, generation = self._possible(logits), self.generation
        token = choose(logits, generation, self.history, generation.seed or 0, self.picked, valid=self._valid)
        return self._accept(token, logits)

    def accept(self, token: int, logits: Tensor | None) -> Token:
        """The next token, chosen elsewhere as `sampling.sample` does. Raises as `pick` does.

        logits: what it was chosen from, for log-probabilities, where they are wanted.
        """
        if token == NOT_FINITE:
            raise CakeError(not_finite_message(self.picked))
        return self._accept(token, None if logits is None else self._possible(logits))

    @property
    def history(self) -> History | None:
        """The tokens so far, where the reply has penalties."""
        if self._history is not None and self._uncounted:
            self._history.add(self._uncounted)
            self._uncounted = []
        return self._history

    @property
    def last(self) -> bool:
        """Whether the next token will be the reply's last one, whatever it is."""
        return self.picked + 1 >= self.limit

    def _possible(self, logits: Tensor) -> Tensor:
        return logits if self._unused is None else logits.index_fill(-1, self._unused, float("-inf"))

    def _accept(self, token: int, logits: Tensor | None) -> Token:
        logprobs = None
        if self.generation.logprobs is not None:
            assert logits is not None, "log-probabilities need the logits"
            logprobs = log_probabilities(logits, token, self.generation.logprobs, valid=self._valid)
        self.picked += 1
        reason = "stop" if token in self.stop_ids else "length" if self.picked == self.limit else None
        if reason is None and self._history is not None:
            self._uncounted.append(token)
        return Token(token, logprobs, reason)
