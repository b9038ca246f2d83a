"""How likely known continuations are behind a context that was read within its budget, as a prompt is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from ..cache.layout import ArenaSize
from ..errors import PromptError
from . import prefill
from .runner import Runner
from .sequence import Checkpoint
from .sequence import Sequence as TextSequence

LOGITS_AT_ONCE = 64  # rows as wide as the vocabulary that exist together


@dataclass(frozen=True)
class Scored:
    """Of a continuation: each token's natural log-likelihood, and whether all are the likeliest at their places."""

    logprobs: tuple[float, ...]
    greedy: bool


def score_continuations(runner: Runner, context: Sequence[int], continuations: Sequence[Sequence[int]]) -> list[Scored]:
    """Score each of several continuations of one context, all given as ids; the context is read once.

    Its rows are what the policy keeps of it before a reply. The continuations' tokens are treated as a reply's: with
    `grow` all are kept, so that they are fed in one piece; with `hold` they are fed one by one, each in a slot that
    another one gives up, and so they are with `kv_bits`, where they are packed as they leave the window. Raises
    PromptError where one is empty or does not fit the context, with both numbers.
    """
    if not all(map(len, continuations)):
        raise PromptError("a continuation is empty: there is no token to score")
    longest = max(map(len, continuations), default=1)
    total = len(context) + longest
    if total > runner.context:
        raise PromptError(
            f"context and continuation have {total:,} tokens, but the model's context is {runner.context:,}: "
            "shorten them, or stretch the context with the option rope_scaling (KIND:FACTOR)"
        )
    with runner.access.alone(), torch.inference_mode():
        sequence = TextSequence()
        tenancy = runner.tenancy
        fit = runner.fit(sequence, len(context), longest, limit=tenancy.allowed)
        stepwise = runner.hold or runner.layout.kv_bits is not None
        room = longest if stepwise else 1  # what is fed in one piece is staged, layer by layer, and never kept
        tenancy.set_aside()
        tenancy.make(tenancy.size_for(sequence, fit.budget, len(context), room))
        tenancy.activate(sequence)
        runner.accept(sequence, fit)
        with runner.access.whole(sequence):
            first = runner.feed(sequence, list(context), room)[None]  # [1, vocab]
        saved = tenancy.checkpoint(sequence)
        follow = _one_by_one if stepwise else _in_one_piece
        return [_scored(runner, first, follow(runner, sequence, saved, ids[:-1]), ids) for ids in continuations]


def _in_one_piece(runner: Runner, sequence: TextSequence, saved: Checkpoint, ids: Sequence[int]) -> Iterator[Tensor]:
    """Logits `[n, vocab]` after each of the ids, fed behind the saved rows, which are used up."""
    if not ids:
        return
    tenancy, rows = runner.tenancy, saved.rows
    assert rows is not None
    tenancy.restore(sequence, replace(saved, rows=rows.tight()))
    held, heads = rows.length, runner.layout.num_kv_heads
    tenancy.make(ArenaSize(int(held.sum()), heads * (int(held.max()) + len(ids)), 0))
    tenancy.activate(sequence)
    runner.torch_threads.all()
    tokens = torch.tensor(ids, device=runner.decoder.device)
    hidden = prefill.read_all(
        runner.decoder, tenancy.arena, sequence, tokens, chunk=runner.chunk, attention=runner.attention
    )
    for start in range(0, len(ids), LOGITS_AT_ONCE):
        yield runner.decoder.logits(hidden[start : start + LOGITS_AT_ONCE])


def _one_by_one(runner: Runner, sequence: TextSequence, saved: Checkpoint, ids: Sequence[int]) -> Iterator[Tensor]:
    """The same by decode steps, `[1, vocab]` each."""
    runner.tenancy.restore(sequence, saved)
    runner.tenancy.activate(sequence)
    arena, window = runner.tenancy.arena, runner.cache.window
    for token in ids:
        yield runner.step(arena, sequence, token, window=window)[None]


def _scored(runner: Runner, first: Tensor, further: Iterator[Tensor], ids: Sequence[int]) -> Scored:
    """`first` and `further` are the logits at the places of `ids`, in their order."""
    logprobs: list[float] = []
    greedy = True
    for logits in chain((first,), further):
        chosen = torch.tensor(ids[len(logprobs) : len(logprobs) + logits.shape[0]], device=logits.device)
        logits = runner.without_unused(logits[:, : runner.valid_ids])
        greedy = greedy and bool((logits.argmax(-1) == chosen).all())
        logprobs += (logits.gather(1, chosen[:, None])[:, 0] - torch.logsumexp(logits, dim=-1)).tolist()
    return Scored(tuple(logprobs), greedy)
