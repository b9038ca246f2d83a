"""What a merge works on: the kept tokens of one row, and those that leave it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Tokens:
    """Some tokens of one KV head, in any order: keys and values `[n, head_dim]`, any float dtype; int positions and
    fp32 scores `[n]` (the indicator's, or what it carries; infinite for what is kept in any case).

    columns: int64, which of the n are meant, None for all. They are gathered where a part is asked for.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    scores: Tensor
    columns: Tensor | None = None

    def __len__(self) -> int:
        return len(self.positions if self.columns is None else self.columns)

    def __getitem__(self, span: slice) -> Tokens:
        """Some of them: views, or copies where there are `columns`."""
        chosen = span if self.columns is None else self.columns[span]
        return Tokens(self.keys[chosen], self.values[chosen], self.positions[chosen], self.scores[chosen])

    def tiles(self, size: int) -> Iterator[tuple[slice, Tokens]]:
        """All of them, `size` at a time, and where each part lies."""
        for at in range(0, len(self), size):
            span = slice(at, min(at + size, len(self)))
            yield span, self[span]


class Merge(Protocol):
    """Folds evicted values into kept ones. Called once for each row and cut, so a value may be folded on repeatedly."""

    def fold(self, kept: Tokens, gone: Tokens) -> None:
        """Change `kept.values` in place; nothing else is written to, and nothing of `gone` is used afterwards."""
