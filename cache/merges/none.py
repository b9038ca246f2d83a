"""No merging: what is evicted is lost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .base import Tokens


@dataclass(frozen=True)
class NoMerge:
    """Never called by the cascade; for those who ask anyway."""

    needs: ClassVar[frozenset[str]] = frozenset()

    def fold(self, kept: Tokens, gone: Tokens) -> None:
        """Nothing."""
