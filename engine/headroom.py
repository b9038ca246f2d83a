"""Room behind a text that has been read: for the tokens of a reply, and up to which length a held row may grow."""

from __future__ import annotations

import numpy as np

from ..cache.arena import Arena
from ..cache.config import CacheConfig
from ..cache.holds.base import HoldRule
from .holding import start_rule
from .sequence import Sequence


def make_room(
    arena: Arena, sequence: Sequence, new_tokens: int, cache: CacheConfig, rule: HoldRule | None, *, carried: bool
) -> None:
    """Free slots for `new_tokens` behind each row, and with `hold` the length at which it gives up a slot per newcomer.

    carried: the slots' scores are of the rule's kind already. May be called again, for another number of tokens.
    """
    length = arena.length
    headroom = np.full_like(length, new_tokens)
    sequence.limit = None
    if cache.decode_policy == "hold" and (sequence.fixed or sequence.budget is not None):
        whole = sequence.budget is not None and sequence.total <= sequence.budget
        sequence.limit = np.full_like(length, sequence.budget) if whole else length.copy()
        headroom = np.minimum(sequence.limit - length + cache.spare, new_tokens + 1)
    arena.finish(headroom)
    if rule is not None and sequence.limit is not None:
        start_rule(arena, rule, goes_on=carried)
