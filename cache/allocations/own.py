"""Rows on their own: a head competes with every head of every layer, by scores (global) or by a table's weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class OwnHeads:
    """For the allocations that speak of rows; what a layer gets is the sum of what its heads win."""

    needs: ClassVar[frozenset[str]] = frozenset()
    mode: ClassVar[str] = "own"

    def describe(self) -> str:
        return "heads own"
