"""How far a compressed cache is from the full one: on the full cache's own continuation, and on a reference answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...cache.layout import kept_bytes
from ..prefill import OnChunk
from ..runner import Runner
from .kept import Kept
from .replay import Branches, replay
from .study import Cell, Reading, read


@dataclass(frozen=True)
class Example:
    """A prompt in the two parts of a protocol, and what a reply might say.

    prefix: the ids that are read and compressed. suffix: those that come after compression, nothing where the question
    is in the prefix. answer: the reference answer's ids, or none.
    """

    prefix: tuple[int, ...]
    suffix: tuple[int, ...] = ()
    answer: tuple[int, ...] = ()


@dataclass(frozen=True)
class Fidelity:
    """One cell's figures.

    kl: mean over the measured tokens of KL(full || compressed) of the next-token distributions, in nats. top1: the
    share of them in which both have the same likeliest token. Both None where nothing was to be compared: a
    continuation whose only token comes out of the prefill, which no policy changes. answer_loss: nats per token by
    which the reference answer became less likely, None without an answer. kept: slots over slots of the full cache.
    bytes: of the arena's rows, bookkeeping included.
    """

    kl: float | None
    top1: float | None
    tokens: int
    answer_loss: float | None
    answer_nll: float | None
    answer_tokens: int
    kept: float
    bytes: int = 0


@torch.inference_mode()
def fidelity(
    runner: Runner,
    example: Example,
    cells: Sequence[Cell],
    *,
    tokens: int,
    stop_ids: frozenset[int] = frozenset(),
    on_chunk: OnChunk | None = None,
) -> list[Fidelity]:
    """Read the prompt once, let the full cache continue greedily for up to `tokens`, and compare every cell with it.

    The continuation is fed to every cell as one piece, teacher forced, and so is the answer. Raises PromptError if the
    prompt does not fit the context.
    """
    longest = len(example.suffix) + max(tokens, len(example.answer))
    reading = read(runner, list(example.prefix), cells, new_tokens=longest, on_chunk=on_chunk)
    reading.logits = allowed(runner, reading.logits)
    continuation = greedy(runner, reading, list(example.suffix), tokens, stop_ids)
    answer = list(example.answer)[: reading.room - len(example.suffix)]
    tree = Branches.make(reading.tokens, example.suffix, continuation[:-1], answer[:-1])
    rows = _Rows(len(example.suffix), len(continuation), len(answer))
    judge: _Judge | None = None
    found = []
    kept: list[Kept | None] = [None, *reading.kept]
    assert reading.sequence.rotary is not None
    states = replay(runner.decoder, runner.tenancy.arena, reading.tokens, reading.sequence.rotary, tree, kept)
    for one, hidden in zip(kept, states, strict=True):
        logits = allowed(runner, runner.decoder.logits(hidden[rows.wanted]))
        continued, answered = logits[: len(rows.continued)], logits[len(rows.continued) :]
        nll = answer_nll(reading.logits, answered, answer)
        if judge is None:
            judge = _Judge(continued, nll)
            continue
        found.append(judge.compare(continued, nll, len(answer), *_size(runner, one, reading.tokens)))
    return found


def greedy(runner: Runner, reading: Reading, suffix: list[int], tokens: int, stop_ids: frozenset[int]) -> list[int]:
    """The full cache's likeliest continuation behind `suffix`, at most `tokens`, the last one a stop token or not.

    The tokens are written behind the rows in the arena.
    """
    arena, sequence, window = runner.tenancy.arena, reading.sequence, runner.cache.window
    tokens = min(tokens, reading.room - len(suffix))
    if tokens > 1 or suffix:
        runner.step.prepare(arena, sequence, window=window)
    logits = reading.logits
    for token in suffix:
        logits = runner.step(arena, sequence, token, window=window)
    found: list[int] = []
    while len(found) < tokens:
        found.append(int(allowed(runner, logits).argmax()))
        if found[-1] in stop_ids or len(found) == tokens:
            break
        logits = runner.step(arena, sequence, found[-1], window=window)
    return found


def divergence(reference: Tensor, logits: Tensor) -> Tensor:
    """KL(reference || other) in nats, float64 `[n]`; `reference` `[n, v]` are log-probabilities."""
    other = torch.log_softmax(logits, dim=-1)
    terms = reference.exp() * (reference - other)
    return terms.masked_fill_(reference == float("-inf"), 0.0).sum(-1, dtype=torch.float64)


class _Rows:
    """Which of the branches' tokens predict what: the shared suffix, the continuation but its last, the answer so."""

    def __init__(self, suffix: int, continuation: int, answer: int) -> None:
        before = [suffix - 1] if suffix else []
        second = suffix + max(continuation - 1, 0)
        self.continued = before * (continuation > 0) + list(range(suffix, second))
        self.answered = before * (answer > 0) + list(range(second, second + max(answer - 1, 0)))
        self.wanted = self.continued + self.answered


class _Judge:
    """What the full cache says."""

    def __init__(self, logits: Tensor, answer_nll: float | None) -> None:
        self.reference = torch.log_softmax(logits, dim=-1)
        self.best = logits.argmax(-1)
        self.answer_nll = answer_nll

    def compare(
        self, logits: Tensor, answer_nll: float | None, answer_tokens: int, kept: float, nbytes: int
    ) -> Fidelity:
        tokens = logits.shape[0]
        loss = None
        if answer_nll is not None and self.answer_nll is not None:
            loss = answer_nll - self.answer_nll
        return Fidelity(
            kl=float(divergence(self.reference, logits).mean()) if tokens else None,
            top1=float((logits.argmax(-1) == self.best).double().mean()) if tokens else None,
            tokens=tokens,
            answer_loss=loss,
            answer_nll=answer_nll,
            answer_tokens=answer_tokens,
            kept=kept,
            bytes=nbytes,
        )


def answer_nll(first: Tensor, logits: Tensor, answer: Sequence[int]) -> float | None:
    """Mean negative log-likelihood of the answer's tokens in nats; None without any.

    `logits` `[n, vocab]` predict all of them, or all but the first, which `first` `[vocab]` then does: it comes out of
    the prefill.
    """
    if not answer:
        return None
    if len(logits) < len(answer):
        logits = torch.cat([first[None], logits])
    chosen = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(answer, device=logits.device)[:, None])
    return -float(chosen.double().mean())


def allowed(runner: Runner, logits: Tensor) -> Tensor:
    """Logits `[..., vocab]` without the ids that no text has; changed in place."""
    logits = logits[..., : runner.valid_ids]
    return logits if runner.unused is None else logits.index_fill_(-1, runner.unused, float("-inf"))


def _size(runner: Runner, kept: Kept | None, tokens: int) -> tuple[float, int]:
    """The share of a full cache's slots, and bytes."""
    layout = runner.layout
    rows = layout.num_layers * layout.num_kv_heads
    if kept is None:
        return 1.0, rows * kept_bytes(layout, tokens, marks=True)
    layout = replace(layout, kv_bits=kept.bits, window=kept.window)
    nbytes = sum(kept_bytes(layout, length, marks=True) for row in kept.lengths for length in row)
    return kept.slots / (tokens * rows), nbytes
