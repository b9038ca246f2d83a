"""Choosing the next token from one row of logits: penalties, temperature, filters, noise.

Every function takes one fp32 row [V] and returns a row; none changes its argument. The order is that of transformers
and vLLM: penalties, temperature, top-k, top-p, min-p, then the choice. Log-probabilities are those of the model itself,
before all of that. Nothing waits for a device until `choose` and `log_probabilities` read their answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..cache.transfer import to_device
from ..errors import CakeError
from .generation import GenerationConfig, fresh_seed, resolve_generation
from .noise import gumbel_noise
from .results import TokenLogprobs

__all__ = [
    "GenerationConfig",
    "History",
    "TokenLogprobs",
    "apply_penalties",
    "apply_temperature",
    "choose",
    "filter_min_p",
    "filter_top_k",
    "filter_top_p",
    "fresh_seed",
    "gumbel_noise",
    "log_distribution",
    "log_probabilities",
    "resolve_generation",
    "sample",
]

NOT_FINITE = -1  # what `sample` gives instead of a token if the logits hold NaN or infinity


class History:
    """The tokens so far, as the penalties see them: which ids the prompt holds, and how often the reply holds each.

    What counts is the ids that were fed and chosen, not what the cache has kept of them.
    """

    def __init__(self, vocab_size: int, prompt_ids: Sequence[int] = (), device: torch.device | str = "cpu") -> None:
        self.in_prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)  # [V]
        self.reply_counts = torch.zeros(vocab_size, dtype=torch.int32, device=device)  # [V]
        if prompt_ids:
            self.in_prompt[torch.tensor(sorted(set(prompt_ids)), device=device)] = True

    def add(self, tokens: int | Sequence[int] | Tensor) -> None:
        """Count tokens of the reply: an int, a list, or a one-element int64 tensor on the history's device."""
        device = self.reply_counts.device
        if isinstance(tokens, Tensor):
            index = tokens.reshape(1)
        else:
            index = to_device([tokens] if isinstance(tokens, int) else tokens, device, torch.int64)
        ones = torch.ones(index.shape[0], dtype=torch.int32, device=device)
        self.reply_counts.index_add_(0, index, ones)


def apply_penalties(
    logits: Tensor, history: History | None, repetition: float = 1.0, presence: float = 0.0, frequency: float = 0.0
) -> Tensor:
    """Make tokens that were there before less likely. [V] -> [V], the same tensor if every penalty is off.

    repetition divides a positive and multiplies a negative logit, once per token that stands in prompt or reply (CTRL,
    Keskar et al. 2019, equation 2, with the sign as in transformers). Then, of tokens in the reply, `presence` is
    subtracted, and `frequency` once for each time (OpenAI's definition).
    """
    if history is None:
        return logits
    counts = history.reply_counts[: logits.shape[0]]
    if repetition != 1.0:
        seen = history.in_prompt[: logits.shape[0]] | (counts > 0)
        punished = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(seen, punished, logits)
    if presence != 0.0:
        logits = logits - presence * (counts > 0)
    if frequency != 0.0:
        logits = logits - frequency * counts
    return logits


def apply_temperature(logits: Tensor, temperature: float) -> Tensor:
    """Divide by the temperature (above 0) after moving the best logit to 0, so that nothing overflows. [V] -> [V]."""
    if temperature == 1.0:
        return logits
    return (logits - logits.amax()) / temperature


def filter_top_k(logits: Tensor, k: int) -> Tensor:
    """Keep exactly the k best logits, among equals those of lower id; the others become -inf. 0 is off. [V] -> [V]."""
    if k <= 0 or k >= logits.shape[0]:
        return logits
    least = torch.topk(logits, k, sorted=True).values[-1]
    better = logits > least
    equal = logits == least
    kept = better | (equal & (torch.cumsum(equal, 0) <= k - better.sum()))
    return logits.masked_fill(~kept, -math.inf)


def filter_top_p(logits: Tensor, p: float) -> Tensor:
    """Keep the fewest best tokens whose probabilities add up to at least p, never none. 1 is off. [V] -> [V].

    A token stays if those before it (by probability, then by id) have less than p together, so that the one which
    crosses p is kept, as in Holtzman et al. 2020 and in transformers.
    """
    if p >= 1.0:
        return logits
    probabilities = torch.softmax(logits, dim=0, dtype=torch.float64)
    ids = None
    if logits.device.type == "cpu":
        # A kept token is at least as likely as each of those behind it, which have 1 - p together. So the few tokens
        # above (1 - p) / V are all that need sorting (half of it: room for rounding).
        ids = torch.nonzero(probabilities > (1.0 - p) / (2 * logits.shape[0])).squeeze(1)
        probabilities = probabilities[ids]
    ordered, order = torch.sort(probabilities, descending=True, stable=True)
    kept = torch.cumsum(ordered, 0) - ordered < p
    kept[:1] = True
    if ids is not None:
        order = ids[order]
    return logits.masked_fill(~torch.zeros_like(logits, dtype=torch.bool).scatter_(0, order, kept), -math.inf)


def filter_min_p(logits: Tensor, min_p: float) -> Tensor:
    """Keep tokens with at least min_p times the best one's probability. 0 is off. [V] -> [V]."""
    if min_p <= 0.0:
        return logits
    return logits.masked_fill(logits < logits.amax() + math.log(min_p), -math.inf)


def sample(
    logits: Tensor,
    config: GenerationConfig,
    history: History | None,
    seed: int,
    step: int | Tensor,
    *,
    valid: int | None = None,
) -> Tensor:
    """The next token as an int64 scalar on the logits' device, without waiting for it.

    `config` is resolved. Rows of the head from `valid` on are padding and are never chosen. Greedy takes the lowest id
    among equals. If the logits hold NaN or +inf, or nothing but -inf, the answer is NOT_FINITE.
    """
    model_row = logits[:valid]
    row = apply_penalties(
        model_row,
        history,
        _number(config.repetition_penalty, 1.0),
        _number(config.presence_penalty, 0.0),
        _number(config.frequency_penalty, 0.0),
    )
    if config.greedy:
        token = torch.argmax(row)
    else:
        row = apply_temperature(row, _number(config.temperature, 1.0))
        row = filter_top_k(row, config.top_k or 0)
        row, ids = _candidates(row)
        row = filter_top_p(row, _number(config.top_p, 1.0))
        row = filter_min_p(row, _number(config.min_p, 0.0))
        best = torch.argmax(row + gumbel_noise(seed, step, ids), keepdim=True)
        token = ids.index_select(0, best).squeeze(0)  # ids[best] would wait for the device
    return torch.where(torch.isfinite(model_row.amax()), token, NOT_FINITE)


def choose(
    logits: Tensor,
    config: GenerationConfig,
    history: History | None,
    seed: int,
    step: int,
    *,
    valid: int | None = None,
) -> int:
    """`sample`, waited for. Raises CakeError if the model's logits are not numbers."""
    if config.greedy and not config.penalises and logits.device.type == "cpu":
        # numpy, in this thread: torch would wake its own threads, which then spin beside those of the next step
        row = logits.numpy()[:valid]
        token = int(row.argmax())  # the first NaN, if there is one
        if not math.isfinite(row[token]):
            raise CakeError(not_finite_message(step))
        return token
    token = int(sample(logits, config, history, seed, step, valid=valid))
    if token == NOT_FINITE:
        raise CakeError(not_finite_message(step))
    return token


def not_finite_message(step: int) -> str:
    """What a reader of `sample` says where it finds NOT_FINITE."""
    return (
        f"the model produced NaN or infinite logits at new token {step + 1}: its weights may be damaged, "
        "or its dtype too narrow (try float32 for the option dtype)"
    )


def log_distribution(logits: Tensor, valid: int | None = None) -> Tensor:
    """Log-probabilities of the model's own distribution over the `valid` first tokens. [V] -> [valid], fp32."""
    return torch.log_softmax(logits[:valid].float(), dim=0)


def log_probabilities(logits: Tensor, chosen: int, top: int, *, valid: int | None = None) -> TokenLogprobs:
    """The chosen token's log-probability and the `top` best ones', from the model's row before any change. [V]."""
    distribution = log_distribution(logits, valid)
    logprob = _finite(float(distribution[chosen]))
    values, ids = torch.topk(distribution, min(top, distribution.shape[0]))
    best = sorted(zip(ids.tolist(), values.tolist(), strict=True), key=lambda pair: (-pair[1], pair[0]))
    pairs = [(token, _finite(value)) for token, value in best]
    if top > 0 and all(token != chosen for token, _ in pairs):
        pairs.append((chosen, logprob))
    return TokenLogprobs(chosen, logprob, tuple(pairs))


def _candidates(row: Tensor) -> tuple[Tensor, Tensor]:
    """What the filters have left, and its ids. Counting waits for the device, so only a CPU leaves anything out."""
    if row.device.type == "cpu":
        ids = torch.nonzero(row > -math.inf).squeeze(1)
        if 0 < ids.shape[0] < row.shape[0]:
            return row[ids], ids
    return row, torch.arange(row.shape[0], device=row.device)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _number(value: float | None, default: float) -> float:
    return default if value is None else value
