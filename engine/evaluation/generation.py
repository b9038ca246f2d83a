"""What a reply's text loses while it is written: caches that decode by their own rules against the full one.

Teacher-forced: all are fed the same tokens, those of the text itself, so that they can be compared at every step,
however long it goes on, and none is judged by what another one wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...cache.budget import size_text
from ...cache.config import CacheConfig
from ...cache.layout import shared_size
from ...cache.policies.full import FullPolicy
from ..runner import Runner
from .fidelity import allowed, divergence
from .lockstep import Lockstep, follower_size
from .memory import FP32, check_plan, prompt_plan
from .own_prefill import bytes_of_own
from .study import Cell

if TYPE_CHECKING:
    from ..engine import Engine

QUARTERS = 4
LOGITS = 4  # arrays of all followers' logits that exist together
FULL = Cell(FullPolicy(), None, config=CacheConfig(policy="full"))

OnShare = Callable[[float], None]  # how much of a text is over, 0 to 1


@torch.inference_mode()
def drift(
    runner: Runner,
    prompt: Sequence[int],
    text: Sequence[int],
    cells: Sequence[Cell],
    *,
    on_share: OnShare | None = None,
) -> list[dict[str, Any]]:
    """Read the prompt for every cell, feed all of the text but its last token one by one, and compare each step.

    For each cell: `kl` the mean of KL(full || cell) of the next-token distributions, in nats, `top1` the share of
    tokens at which both have the same likeliest one, `loss` by how many nats per token the text is less likely;
    `kl_1` to `kl_4` and `loss_1` to `loss_4` the same for each quarter of the text. tokens: how many were fed. slots:
    all rows' at the end, most_slots: at any step; kept: those over what the full cache has at the end; bytes: what
    most_slots take, bookkeeping included. The runner's policy must be the full cache. The tokens fed are at least 4.
    """
    fed, targets = list(text[:-1]), list(text[1:])
    followers = len(cells) + 1
    whole = followers * (len(prompt) + len(fed))

    def tell(reads: int) -> None:
        if on_share is not None:
            on_share(reads * len(prompt) / whole)

    lockstep = Lockstep(runner, list(prompt), [FULL, *cells], len(fed), tell=tell)
    kl, loss = (torch.zeros(len(cells), len(fed), dtype=torch.float64) for _ in range(2))
    same = torch.zeros(len(cells), len(fed), dtype=torch.bool)
    most = [one.slots for one in lockstep.followers]
    for step, (token, target) in enumerate(zip(fed, targets, strict=True)):
        found = allowed(runner, lockstep.feed(token))
        kl[:, step], same[:, step], loss[:, step] = _compared(found, target)
        most = [max(slots, one.slots) for slots, one in zip(most, lockstep.followers, strict=True)]
        if on_share is not None:
            on_share(followers * (len(prompt) + step + 1) / whole)
    slots = [one.slots for one in lockstep.followers]
    return [
        {
            "kl": float(kl[i].mean()),
            "top1": float(same[i].double().mean()),
            "loss": float(loss[i].mean()),
            **_quarters("kl", kl[i]),
            **_quarters("loss", loss[i]),
            "tokens": len(fed),
            "slots": slots[i + 1],
            "most_slots": most[i + 1],
            "kept": most[i + 1] / slots[0],
            "bytes": most[i + 1] * runner.layout.kept_slot_bytes,
        }
        for i in range(len(cells))
    ]


def _compared(logits: Tensor, target: int) -> tuple[Tensor, Tensor, Tensor]:
    """KL, whether the likeliest token is the same, and the loss on the target, `[n - 1]` each, against the first of
    logits `[n, vocab]`."""
    logprobs = torch.log_softmax(logits, dim=-1)
    best, chosen = logprobs.argmax(-1), logprobs[:, target].double()
    return divergence(logprobs[:1], logprobs[1:]).cpu(), (best[1:] == best[0]).cpu(), (chosen[0] - chosen[1:]).cpu()


def _quarters(name: str, values: Tensor) -> dict[str, float]:
    parts = values.tensor_split(QUARTERS)
    return {f"{name}_{number}": float(part.mean()) for number, part in enumerate(parts, start=1)}


def check_drift(engine: Engine, prompt: int, tokens: int, cells: Sequence[Cell]) -> str:
    """A line that says what `drift` takes with a prompt of so many tokens and `tokens` fed behind it. Raises
    MemoryLimit if that does not fit."""
    runner, layout, followers = engine.runner, engine.runner.layout, [FULL, *cells]
    caches = shared_size(layout, [follower_size(layout, cell, prompt, tokens) for cell in followers]).nbytes(layout)
    policies = [(one.policy, one.budget if one.policy.evicts else None, one.piece) for one in followers]
    reading = bytes_of_own(runner, policies, prompt)
    logits = LOGITS * len(followers) * engine.config.vocab_size * FP32
    plan = prompt_plan(engine, prompt, 0)
    plan = replace(plan, arena=caches + reading, chunk=plan.chunk + logits)
    return check_plan(
        engine,
        plan,
        f"with {len(followers)} caches side by side a text of {prompt:,} and {tokens:,} tokens needs",
        f"the caches {size_text(caches)}, what they are read in {size_text(reading)}, the rest "
        f"{size_text(plan.total - plan.weights - plan.arena)}",
    )
