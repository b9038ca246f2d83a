"""Room behind a text that has been read: for the tokens of a reply, and up to which length a held row may grow."""

from __future__ import annotations

import numpy as np

from ..cache.arena import Arena
from ..cache.config import CacheConfig
from ..cache.holds.base import HoldRule
from ..cache.packed_arena import PackedArena
from .holding import start_rule
from .sequence import Sequence


def make_room(
    arena: Arena, sequence: Sequence, new_tokens: int, cache: CacheConfig, rule: HoldRule | None, *, carried: bool
) -> None:
    """Free slots for `new_tokens` behind each row, and with `hold` the length at which it gives up a slot per newcomer.

    Packed rows give up 32 tokens at a time, and have room for as many more. carried: the slots' scores are of the
    rule's kind already. May be called again, for another number of tokens.
    """
    held = arena.held
    headroom = np.full_like(held, new_tokens)
    sequence.limit = None
    if cache.decode_policy == "hold" and (sequence.fixed or sequence.budget is not None):
        whole = sequence.budget is not None and sequence.total <= sequence.budget
        sequence.limit = np.full_like(held, sequence.budget) if whole else held.copy()
        if isinstance(arena, PackedArena):
            sequence.limit = arena.finish_held(headroom, sequence.limit)
            return
        headroom = np.minimum(sequence.limit - held + cache.spare, new_tokens + 1)
    arena.finish(headroom)
    if rule is not None and sequence.limit is not None:
        start_rule(arena, rule, goes_on=carried)
