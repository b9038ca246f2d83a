"""Attention backends: one interface, three of them, and the choice among them."""

from .choose import choose_attention
from .interface import Attention
from .sdpa import Sdpa, SlidingMask, decode_attention, log_sum_exp, prefill_attention

__all__ = [
    "Attention",
    "Sdpa",
    "SlidingMask",
    "choose_attention",
    "decode_attention",
    "log_sum_exp",
    "prefill_attention",
]
