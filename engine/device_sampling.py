"""Choosing the next tokens of a batch on the device: `sampling.sample`, for rows that each have options of their own.

What a row asks for stands in tables on the device, so that one captured launch serves every temperature, seed and
filter. What costs much (noise for every token, sorting the vocabulary) is left out where no row asks for it: that, not
the values, is what a `Kind` says, and what a graph is captured for.
"""

from __future__ import annotations

import enum
import math

import torch
from torch import Tensor

from ..cache.transfer import to_device
from .generation import GenerationConfig
from .noise import gumbel_rows, seed_key
from .picker import Picker
from .sampling import NOT_FINITE


class Kind(enum.Flag):
    """What the choice of a batch's tokens needs; of several rows the union."""

    GREEDY = 0
    NOISE = enum.auto()  # some row samples
    FILTERS = enum.auto()  # some row has top_k, top_p or min_p
    PENALTIES = enum.auto()
    LOGITS = enum.auto()  # the logits are wanted too, for log-probabilities

    @classmethod
    def of(cls, generation: GenerationConfig) -> Kind:
        """What one reply needs; `generation` is resolved."""
        kind = cls.GREEDY
        if not generation.greedy:
            kind |= cls.NOISE
            if generation.top_k or (generation.top_p or 1.0) < 1.0 or generation.min_p:
                kind |= cls.FILTERS
        if generation.penalises:
            kind |= cls.PENALTIES
        return kind if generation.logprobs is None else kind | cls.LOGITS


class DeviceSampler:
    """What n rows ask of their tokens: options, random state, and the tokens that penalties count.

    valid, unused: rows of the head that no token has, see `Picker`. Tables of penalties are there once a row has any.
    """

    def __init__(self, rows: int, vocab_size: int, valid: int | None, unused: Tensor | None, device: torch.device):
        self._device, self._vocab_size, self._unused = device, vocab_size, unused
        self._valid = vocab_size if valid is None else valid
        # temperature, log(min_p), repetition, presence, frequency
        self._numbers = torch.ones(5, rows, dtype=torch.float32, device=device)
        self._top_p = torch.full((rows,), math.inf, dtype=torch.float64, device=device)
        # key of the seed, tokens chosen so far, top_k, greedy
        self._integers = torch.zeros(4, rows, dtype=torch.int64, device=device)
        self._in_prompt: Tensor | None = None  # bool [rows, V]
        self._counts: Tensor | None = None  # int32 [rows, V]

    @property
    def steps(self) -> Tensor:
        """How many tokens each row's reply has, int64 `[rows]`."""
        return self._integers[1]

    def put(self, row: int, picker: Picker) -> None:
        """Let a row choose as a reply's picker would go on. Waits for nothing."""
        generation, history = picker.generation, picker.history
        min_p, top_k = generation.min_p or 0.0, generation.top_k or 0
        numbers = [
            1.0 if generation.greedy or generation.temperature is None else generation.temperature,
            math.log(min_p) if min_p > 0.0 else -math.inf,
            _or(generation.repetition_penalty, 1.0),
            _or(generation.presence_penalty, 0.0),
            _or(generation.frequency_penalty, 0.0),
        ]
        top_p = _or(generation.top_p, 1.0)
        packed = torch.tensor([*numbers, top_p if top_p < 1.0 else math.inf], dtype=torch.float64)
        if self._device.type == "cuda":
            packed = packed.pin_memory()
        on_device = packed.to(self._device, non_blocking=True)
        self._numbers[:, row] = on_device[:5].float()
        self._top_p[row] = on_device[5]
        integers = [
            seed_key(generation.seed or 0),
            picker.picked,
            top_k if 0 < top_k < self._valid else self._valid,
            int(generation.greedy),
        ]
        self._integers[:, row] = to_device(integers, self._device, torch.int64)
        if history is not None:
            in_prompt, counts = self.histories()
            in_prompt[row], counts[row] = history.in_prompt, history.reply_counts
        elif self._in_prompt is not None and self._counts is not None:
            self._in_prompt[row], self._counts[row] = False, 0

    def histories(self) -> tuple[Tensor, Tensor]:
        """Which tokens each row's prompt holds, and how often each is in the reply, `[rows, vocab_size]`."""
        if self._in_prompt is None or self._counts is None:
            shape = (self.steps.shape[0], self._vocab_size)
            self._in_prompt = torch.zeros(shape, dtype=torch.bool, device=self._device)
            self._counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
        return self._in_prompt, self._counts

    def choose(self, logits: Tensor, active: Tensor, kind: Kind) -> Tensor:
        """The next tokens int64 `[rows]` from logits fp32 `[rows, vocab_size]`; NOT_FINITE as `sampling.sample` gives.

        The random state goes on in `active` rows, bool `[rows]`. Nothing waits for the device.
        """
        if self._unused is not None:
            logits = logits.index_fill(-1, self._unused, -math.inf)
        model_rows = logits[:, : self._valid]
        rows = self._penalised(model_rows) if Kind.PENALTIES in kind else model_rows
        tokens = rows.argmax(-1)
        if Kind.NOISE in kind:
            tokens = torch.where(self._integers[3] > 0, tokens, self._sampled(rows, kind))
        if Kind.PENALTIES in kind:
            self.histories()[1].scatter_add_(1, tokens[:, None], active[:, None].int())
        self.steps.add_(active)
        chosen: Tensor = torch.where(model_rows.amax(-1).isfinite(), tokens, NOT_FINITE)
        return chosen

    def _penalised(self, rows: Tensor) -> Tensor:
        """`sampling.apply_penalties`."""
        in_prompt, counts = (table[:, : self._valid] for table in self.histories())
        repetition, presence, frequency = self._numbers[2:, :, None]
        there = counts > 0
        punished = torch.where(rows > 0, rows / repetition, rows * repetition)
        rows = torch.where(in_prompt | there, punished, rows)
        penalised: Tensor = rows - presence * there - frequency * counts
        return penalised

    def _sampled(self, rows: Tensor, kind: Kind) -> Tensor:
        """One token of each row by its temperature, filters and noise. [rows, valid] -> [rows].

        One stable sort serves all filters: of equals the lower id is first, as in `sampling`.
        """
        temperature, log_min_p = self._numbers[:2, :, None]
        rows = torch.where(temperature == 1.0, rows, (rows - rows.amax(-1, keepdim=True)) / temperature)
        ids = rank = torch.arange(self._valid, device=rows.device)
        if Kind.FILTERS in kind:
            rows, ids = torch.sort(rows, dim=-1, descending=True, stable=True)
            rows = rows.masked_fill(rank >= self._integers[2][:, None], -math.inf)
            probabilities = torch.softmax(rows, -1, dtype=torch.float64)
            before = torch.cumsum(probabilities, -1) - probabilities
            rows = rows.masked_fill((before >= self._top_p[:, None]) & (rank > 0), -math.inf)
            rows = rows.masked_fill(rows < rows[:, :1] + log_min_p, -math.inf)
        best = torch.argmax(rows + gumbel_rows(self._integers[0], self.steps, ids), -1, keepdim=True)
        chosen: Tensor = best if ids.ndim == 1 else ids.gather(1, best)
        return chosen[:, 0]


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
