"""The cascade: how the rows of the layers seen so far share the budget while a prompt is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..errors import OptionError
from .budget import check_budget, deal_seats
from .shares import DEFAULT_HEAD_FLOOR, AdaptiveHeads, deal_curves

HEADS = ("equal", "adaptive", "own")

Rank = Callable[[int], "list[np.ndarray]"]
Settle = Callable[[Sequence[float]], Sequence[float]]


@dataclass(frozen=True)
class LayerClaim:
    """What a layer brings to the sharing.

    floor: tokens that every row keeps (the window). caps: how many each head may keep beyond them.
    weight: the layer's, or one for each head where heads are dealt to as rows of their own.
    curve: instead of a weight, the falling priorities of the layer's seats; `rank(limit)`: per head the scores of up to
    `limit` tokens beyond the window, best first, asked for only where they decide.
    """

    floor: int
    caps: tuple[int, ...]
    weight: float | tuple[float, ...] = 1.0
    curve: Callable[[int], np.ndarray] | None = None
    rank: Rank | None = None


class Cascade:
    """Shares `budget * num_layers * kv_heads` slots over rows as layers arrive.

    Every row keeps its window; the `(budget - window) * num_layers` further seats of `kv_heads` slots each are dealt
    over the layers seen so far, by weight (`deal_seats`) or, with `scored`, by their curves (`deal_curves`). A later
    layer can only shrink earlier ones, and the lengths after the last layer are those of dealing once with everything
    known (the theorem of CAKE, Qin et al., ICLR 2025, here to the slot).

    heads: "equal" gives every head of a layer the layer's share; "adaptive" deals the layer's slots over its heads
    (`AdaptiveHeads`, `head_floor` its alpha); "own" takes every row as a layer of its own with seats of one slot, by
    the weights of a table or, with `scored`, by the scores of all rows of all layers.
    late: nothing is dealt before the last layer has come; until then all rows stay whole, and what is left is the same.
    settle: weights are then `settle(weights)`, for allocations that compare all layers.
    """

    def __init__(
        self,
        num_layers: int,
        kv_heads: int,
        budget: int,
        window: int,
        *,
        scored: bool = False,
        heads: str = "equal",
        head_floor: float = DEFAULT_HEAD_FLOOR,
        settle: Settle | None = None,
        late: bool = False,
    ) -> None:
        if heads not in HEADS:
            raise OptionError(f"unknown sharing over heads {heads!r}: choose one of {', '.join(HEADS)}")
        self.num_layers, self.kv_heads, self.window = num_layers, kv_heads, window
        self.seats = (check_budget(budget, window) - window) * num_layers * (kv_heads if heads == "own" else 1)
        assert settle is None or not (scored or heads == "own"), "what waits for all layers deals by layer weights"
        self.scored, self.heads, self.head_floor, self.settle = scored, heads, head_floor, settle
        self.late = late or settle is not None
        self.claims: list[LayerClaim] = []
        self._curves: list[np.ndarray] = []
        self._adaptive: list[AdaptiveHeads] = []
        self._lengths: list[list[int]] = []

    def add(self, claim: LayerClaim) -> list[list[int]]:
        """Add the next layer; returns the row lengths of all layers seen so far, per KV head, this one last.

        Lengths never grow from one call to the next. Raises ValueError for weights or curves that cannot be compared;
        nothing is changed then.
        """
        assert len(self.claims) < self.num_layers, "more layers than the cascade was made for"
        assert len(claim.caps) == self.kv_heads, "a cap for each head"
        claims = [*self.claims, claim]
        curves = [*self._curves, *self._curves_of(claim)]
        if self.late and len(claims) < self.num_layers:
            self._curves = curves
            claims[-1] = self._resolved(claim)
            lengths = [[one.floor + cap for cap in one.caps] for one in claims]
        else:
            shares = self._deal(claims, curves)
            lengths = self._over_heads(claims, shares)
            self._curves = [curve[:share].copy() for curve, share in zip(curves, shares, strict=False)]
            claims[-1] = replace(claim, rank=None, curve=None)  # they hold on to a whole layer's scores
        for new, old in zip(lengths, self._lengths, strict=False):
            assert all(n <= o for n, o in zip(new, old, strict=True)), "a share grew"
        self.claims, self._lengths = claims, lengths
        return [list(row) for row in lengths]

    @property
    def lengths(self) -> list[list[int]]:
        """Row lengths of the layers seen so far, per KV head."""
        return [list(row) for row in self._lengths]

    # -- dealing ------------------------------------------------------------------------------------------------------

    def _resolved(self, claim: LayerClaim) -> LayerClaim:
        """A claim that waits for the last layer, with its scores where heads will share by them."""
        if self.heads != "adaptive":
            return replace(claim, rank=None, curve=None)
        assert claim.rank is not None, "adaptive heads need scores"
        ranked = claim.rank(max(claim.caps))
        return replace(claim, rank=lambda limit: [row[:limit] for row in ranked], curve=None)

    def _layer_cap(self, claim: LayerClaim) -> int:
        """Seats of `kv_heads` slots that a layer can use. Rounded up: a layer that stays whole loses nothing."""
        return -(-sum(claim.caps) // self.kv_heads)

    def _curves_of(self, claim: LayerClaim) -> list[np.ndarray]:
        """The curves of a layer's seats, cut to what could ever win; none where weights decide."""
        if not self.scored:
            return []
        if self.heads == "own":
            assert claim.rank is not None, "global sharing needs scores"
            limit = min(max(claim.caps), self.seats)
            return [row[:cap] for row, cap in zip(claim.rank(limit), claim.caps, strict=True)]
        assert claim.curve is not None, "this allocation brings curves"
        limit = min(self._layer_cap(claim), self.seats)
        curve = claim.curve(limit)[:limit]
        missing = np.full(limit - len(curve), -np.inf, dtype=curve.dtype)
        return [np.concatenate([curve, missing])]

    def _deal(self, claims: list[LayerClaim], curves: list[np.ndarray]) -> list[int]:
        """Seats of each layer, or of each row where rows are dealt to on their own."""
        if self.scored:
            return deal_curves(curves, self.seats)
        if self.heads == "own":
            weights = [w for one in claims for w in self._row_weights(one)]
            return deal_seats(weights, [cap for one in claims for cap in one.caps], self.seats)
        layers = [one.weight if isinstance(one.weight, (int, float)) else float(sum(one.weight)) for one in claims]
        settled = self.settle(layers) if self.settle is not None else layers
        return deal_seats(settled, [self._layer_cap(one) for one in claims], self.seats)

    def _row_weights(self, claim: LayerClaim) -> tuple[float, ...]:
        return (claim.weight,) * self.kv_heads if isinstance(claim.weight, (int, float)) else claim.weight

    def _over_heads(self, claims: list[LayerClaim], shares: list[int]) -> list[list[int]]:
        """Row lengths from the shares of layers or rows."""
        if self.heads == "own":
            rows = [shares[at : at + self.kv_heads] for at in range(0, len(shares), self.kv_heads)]
            return [[one.floor + n for n in row] for one, row in zip(claims, rows, strict=True)]
        if self.heads == "equal":
            return [
                [one.floor + min(share, cap) for cap in one.caps] for one, share in zip(claims, shares, strict=True)
            ]
        for index in range(len(self._adaptive), len(claims)):
            one = claims[index]
            assert one.rank is not None, "adaptive heads need scores"
            limit = min(max(one.caps), self.kv_heads * shares[index])
            ranked = [row[:cap] for row, cap in zip(one.rank(limit), one.caps, strict=True)]
            self._adaptive.append(AdaptiveHeads(ranked, one.caps, self.head_floor))
        return [
            [one.floor + n for n in heads.lengths(share)]
            for one, heads, share in zip(claims, self._adaptive, shares, strict=True)
        ]
