"""Reading a piece for a runner: with what its policy asks for, by whom, and with room for a reply behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..cache.arena import Arena
from . import prefill
from .inputs import BETWEEN
from .sequence import Sequence
from .stepper import OnWait

if TYPE_CHECKING:
    from .runner import Runner


def reading_of(
    runner: Runner,
    arena: Arena,
    sequence: Sequence,
    ids: list[int],
    new_tokens: int,
    observer: prefill.Observer | None,
) -> prefill.Reading[Tensor]:
    """See `Runner.reading`."""
    needs = runner.policy_of(sequence).needs
    if observer is not None:
        needs |= observer.needs
    short = runner.short
    if short is not None and short.at_hand:
        short.prepare()  # what is not compiled yet is compiled behind the reply's first token
    taken = short is not None and short.takes(len(ids), runner.chunk) and needs.isdisjoint(BETWEEN)
    if short is not None and not taken:
        short.release()

    def steps() -> prefill.Reading[Tensor]:
        hidden = yield from prefill.reading(
            runner.decoder,
            arena,
            sequence,
            torch.tensor(ids, device=runner.decoder.device),
            policy=runner.policy_of(sequence),
            window=runner.cache.window,
            chunk=runner.chunk,
            attention=runner.attention,
            separators=runner.separators if "separators" in needs else None,
            window_pass=runner.window_pass,
            observer=observer,
            short=short if taken else None,
        )
        runner.make_room(arena, sequence, new_tokens)
        head = short if short is not None and short.ready else runner.decoder
        return head.logits(hidden)[0]

    return runner.torch_threads.one_between(steps()) if taken else steps()


def prepare_reply(runner: Runner, arena: Arena, sequence: Sequence, on_wait: OnWait | None = None) -> None:
    """Compile what a reply's steps need, see `Step.prepare`, and what reads the next short piece."""
    runner.step.prepare(arena, sequence, window=runner.cache.window, on_wait=on_wait)
    if runner.short is not None:
        runner.short.prepare(on_wait)
