"""How likely a text is, token by token, with nothing evicted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..cache.layout import ArenaSize
from ..errors import PromptError
from . import prefill
from .sequence import Sequence

if TYPE_CHECKING:
    from .runner import Runner


def score_tokens(runner: Runner, ids: list[int]) -> list[float]:
    """Log-likelihood of every token after the first, given those before; logits exist for one chunk at a time.

    Raises PromptError if the text is longer than the context or has ids that no text has.
    """
    if len(ids) > runner.context:
        raise PromptError(f"the text has {len(ids):,} tokens, but the model's context is {runner.context:,}")
    never = set(range(runner.valid_ids or runner.decoder.config.vocab_size, runner.decoder.config.vocab_size))
    never.update(runner.unused.tolist() if runner.unused is not None else ())
    if not never.isdisjoint(ids):
        raise PromptError(f"token id {min(never & {*ids})} is padding of the model's vocabulary: no text has it")
    with runner.access.alone(), torch.inference_mode():
        return _score(runner, ids)


def _score(runner: Runner, ids: list[int]) -> list[float]:
    sequence = Sequence(rotary=runner.rotary(len(ids)))
    runner.tenancy.activate(sequence)
    runner.tenancy.make(ArenaSize(0, len(ids) * runner.layout.num_kv_heads, 0))
    tokens = torch.tensor(ids, device=runner.decoder.device)
    hidden = prefill.read_all(
        runner.decoder, runner.tenancy.arena, sequence, tokens, chunk=runner.chunk, attention=runner.attention
    )
    result: list[float] = []
    rows = max(1, min(runner.chunk, 64))
    for start in range(0, len(ids) - 1, rows):
        end = min(start + rows, len(ids) - 1)
        logits = runner.without_unused(runner.decoder.logits(hidden[start:end])[:, : runner.valid_ids])
        chosen = logits.gather(1, tokens[start + 1 : end + 1, None])[:, 0]
        result += (chosen - torch.logsumexp(logits, dim=-1)).tolist()
    runner.tenancy.arena.clear()
    return result
