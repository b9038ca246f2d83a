"""Compiled steps under a hold rule that works at intervals: rows grow, and between two steps what is due is cut.

Nothing has to be known of the steps between two cuts but the queries, which every step leaves in the ring. A rule that
adds up at every step (`h2o`) has no such form, nor has one that gives up a slot for each token.
"""

from __future__ import annotations

from torch import Tensor

from ..cache.arena import Arena
from ..cache.holds.base import AtIntervals, HoldRule
from ..cache.packed_arena import PackedArena
from ..models.decoder import Decoder
from .compiled import CompiledStep
from .holding import cut_grown
from .packed_holding import cut_packed
from .sequence import Sequence
from .stepper import OnWait


def is_cut_between(rule: HoldRule) -> bool:
    """Whether a rule asks for nothing but at its cuts."""
    return rule.every > 1 and (isinstance(rule, AtIntervals) or not rule.keeps_scores)


class IntervalStep:
    """A compiled step for rows that only grow, and the rule's cuts in plain torch."""

    def __init__(self, step: CompiledStep, decoder: Decoder, rule: HoldRule) -> None:
        assert is_cut_between(rule), "this rule looks at every step"
        self._step, self._decoder, self._rule = step, decoder, rule

    @property
    def at_hand(self) -> bool:
        """As the compiled step's."""
        return self._step.at_hand

    def __call__(self, arena: Arena, sequence: Sequence, token: int, *, window: int) -> Tensor:
        """Feed one token. Returns the next token's logits fp32 `[vocab]`."""
        return self.batch([arena], [sequence], [token], window=window)[0]

    def batch(self, arenas: list[Arena], sequences: list[Sequence], tokens: list[int], *, window: int) -> Tensor:
        """See `step_under_rules`."""
        rules: list[HoldRule | None] = [self._rule] * len(arenas)
        return step_under_rules(self._step, self._decoder, arenas, sequences, tokens, rules, window=window)

    def prepare(self, arena: Arena, sequence: Sequence, *, window: int, on_wait: OnWait | None = None) -> None:
        """See `CompiledStep.prepare`."""
        self._step.prepare(arena, sequence, window=window, on_wait=on_wait)


def step_under_rules(
    step: CompiledStep,
    decoder: Decoder,
    arenas: list[Arena],
    sequences: list[Sequence],
    tokens: list[int],
    rules: list[HoldRule | None],
    *,
    window: int,
) -> Tensor:
    """`CompiledStep.batch`, each sequence under a rule that is cut between steps, or under none: what the step does.

    The limits that rows may grow beyond are hidden from it, and no row reaches more than its capacity, which has room
    for the interval.
    """
    limits = [sequence.limit for sequence in sequences]
    for sequence, rule in zip(sequences, rules, strict=True):
        if rule is not None:
            sequence.limit = None
    try:
        logits = step.batch(arenas, sequences, tokens, window=window)
    finally:
        for sequence, limit in zip(sequences, limits, strict=True):
            sequence.limit = limit
    for arena, sequence, rule in zip(arenas, sequences, rules, strict=True):
        if rule is None or sequence.limit is None:
            continue
        if isinstance(arena, PackedArena):
            cut_packed(decoder, arena, sequence, window, rule)
        else:
            cut_grown(decoder, arena, sequence, window, rule)
    return logits
