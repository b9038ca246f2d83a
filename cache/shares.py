"""Dealing seats by scores: over layers or rows that each bring a falling curve, and over the heads of one layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

DEFAULT_HEAD_FLOOR = 0.2


def deal_curves(curves: Sequence[np.ndarray], seats: int) -> list[int]:
    """Give `seats` to the best entries of all `curves`, each of them falling; returns how many of each curve win.

    Seat j of a curve has the priority `curve[j - 1]`; ties go to the lower curve. The result sums to
    `min(seats, entries)`. A further curve only adds candidates, so nobody else's share can grow. Infinite priorities
    are allowed. Raises ValueError for negative seats and for curves with NaN.
    """
    if seats < 0:
        raise ValueError("seats must not be negative")
    sizes = [len(curve) for curve in curves]
    values = np.concatenate([*curves, np.zeros(0, np.float32)])
    if np.isnan(values).any():
        raise ValueError("a priority is not a number")
    if seats >= len(values):
        return sizes
    if not seats:
        return [0] * len(curves)
    last = np.partition(values, len(values) - seats)[len(values) - seats]  # of the seats that win
    better = [int(np.searchsorted(-curve, -last, side="left")) for curve in curves]
    left = seats - sum(better)
    shares = []
    for curve, sure in zip(curves, better, strict=True):
        tied = min(int(np.searchsorted(-curve, -last, side="right")) - sure, left)
        left -= tied
        shares.append(sure + tied)
    return shares


class AdaptiveHeads:
    """How one layer's seats are dealt over its KV heads: a floor for each, the best of the rest whoever has them.

    Ada-KV (Feng et al., NeurIPS 2025, arXiv 2407.11550), with the floor as forced ranks: of `m` seats per head on
    average every head gets its best `floor(alpha * m)`, and what is left of the `heads * m` goes to the best scores
    among all others. Written so, the kept set for fewer seats is a part of that for more: when the floor falls by one,
    the tokens that lose their guarantee compete as the best of those that are left, and no head's length grows. The
    authors' code rounds `(1 - alpha) * count + alpha * m` of an unforced count instead, for which that does not hold.

    Ties go to the lower head. Heads with fewer tokens than their floor leave the difference to the rest.
    """

    def __init__(self, ranked: Sequence[np.ndarray], caps: Sequence[int], alpha: float) -> None:
        """`ranked[head]`: scores, best first, of as many tokens as the head can ever get; `caps`: tokens there are."""
        self.caps, self.alpha = list(caps), alpha
        order = np.argsort(-np.concatenate(list(ranked)), kind="stable")
        heads = np.repeat(np.arange(len(ranked), dtype=np.int32), [len(row) for row in ranked])[order]
        # of each head: its tokens' places among the tokens of all heads, the best of all at 0
        self._places = [np.flatnonzero(heads == head).astype(np.int32) for head in range(len(ranked))]
        self._seats: int | None = None
        self._lengths: list[int] = []

    def lengths(self, seats: int) -> list[int]:
        """Tokens of each head for `seats` per head on average; from one call to the next `seats` must not grow."""
        if seats == self._seats:
            return self._lengths
        assert self._seats is None or seats < self._seats, "a share grew"
        floors = [min(int(self.alpha * seats), cap) for cap in self.caps]
        total = min(len(floors) * seats, sum(self.caps))
        # The best tokens up to some place, and of a head that has fewer than its floor among them that many instead: it
        # takes them from the others, whose place moves to the front, and may leave further heads below their floors.
        place, free = total, list(range(len(floors)))
        lengths = floors
        while free:
            lengths = list(floors)
            for head in free:
                lengths[head] = int(self._places[head].searchsorted(place))
            enough = [head for head in free if lengths[head] >= floors[head]]
            if len(enough) == len(free):
                break
            free = enough
            wanted = total - sum(floor for head, floor in enumerate(floors) if head not in free)
            place = self._place_of(wanted, free)
        self._places = [places[:length].copy() for places, length in zip(self._places, lengths, strict=True)]
        self._seats, self._lengths = seats, lengths
        return lengths

    def _place_of(self, count: int, heads: Sequence[int]) -> int:
        """Where `count` tokens of these heads alone lie in front."""
        if not (count and heads):
            return 0
        return int(np.partition(np.concatenate([self._places[head] for head in heads]), count - 1)[count - 1]) + 1
