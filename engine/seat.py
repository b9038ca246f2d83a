"""A reply that decodes ahead, and what it gets from a step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..cache.arena import Arena
from .device_sampling import Kind
from .picker import Picker
from .sequence import Sequence


@dataclass(eq=False)
class Seat:
    """A reply that decodes ahead. arena: where its rows are, set before every `advance`. token: chosen, not fed."""

    sequence: Sequence
    picker: Picker
    token: int
    arena: Arena | None = None
    row: int | None = None  # in the device's tables
    ahead: bool = False  # whether the device has fed `token` already

    @property
    def kind(self) -> Kind:
        return Kind.of(self.picker.generation)


@dataclass(frozen=True)
class Chosen:
    """A seat's next token (NOT_FINITE: its logits are no numbers), and its logits where log-probabilities need them.

    The logits are good until the next step.
    """

    seat: Seat
    token: int
    logits: Tensor | None
