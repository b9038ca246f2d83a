"""The cascade: how the rows of the layers seen so far share the budget while a prompt is read."""

from __future__ import annotations

from ..errors import OptionError
from .budget import check_budget, deal_seats

ALLOCATIONS = ("preference", "uniform")


class Cascade:
    """Shares `budget * num_layers` rows (per KV head) over layers as they arrive.

    Every layer keeps its last `min(window, tokens)` rows; `(budget - window) * num_layers` further seats are dealt
    over the layers seen so far (`deal_seats`). A later layer can only shrink earlier ones, and the lengths after the
    last layer are those of dealing once with everything known (the theorem of CAKE, Qin et al., ICLR 2025, here
    to the row). `allocation="uniform"` ignores the preferences and deals to all layers alike.
    """

    def __init__(self, num_layers: int, budget: int, window: int, allocation: str = "preference") -> None:
        if allocation not in ALLOCATIONS:
            raise OptionError(f"unknown allocation {allocation!r}: choose one of {', '.join(ALLOCATIONS)}")
        self.num_layers = num_layers
        self.window = window
        self.seats = (check_budget(budget, window) - window) * num_layers
        self.allocation = allocation
        self.preferences: list[float] = []
        self._caps: list[int] = []
        self._floors: list[int] = []
        self._lengths: list[int] = []

    def add(self, preference: float, cap: int, tokens: int) -> list[int]:
        """Add the next layer; returns the row lengths of all layers seen so far, this one last.

        `tokens` is how many rows the layer has now, `cap` how many it may keep beyond the window (`tokens - window`,
        less for a sliding window; a negative cap counts as 0). Lengths never grow from one call to the next.
        """
        assert len(self._caps) < self.num_layers, "more layers than the cascade was made for"
        floor = min(self.window, tokens)
        preferences = [*self.preferences, preference if self.allocation == "preference" else 1.0]
        caps = [*self._caps, max(0, min(cap, tokens - floor))]
        floors = [*self._floors, floor]
        dealt = deal_seats(preferences, caps, self.seats)
        lengths = [floor + seats for floor, seats in zip(floors, dealt, strict=True)]
        assert all(new <= old for new, old in zip(lengths, self._lengths, strict=False)), "a share grew"
        self.preferences, self._caps, self._floors, self._lengths = preferences, caps, floors, lengths
        return list(lengths)

    @property
    def lengths(self) -> list[int]:
        """Row lengths of the layers seen so far."""
        return list(self._lengths)
