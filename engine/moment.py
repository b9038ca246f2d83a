"""A conversation as it was before a turn."""

from __future__ import annotations

from dataclasses import dataclass

from .sequence import Sequence
from .statistics import Statistics


@dataclass(frozen=True)
class Moment:
    """Everything that a turn changes. The sequence is a copy that nobody goes on with."""

    sequence: Sequence
    pending: list[int]
    finished_by: int | None
    messages: list[dict[str, str]]
    stats: Statistics | None
    undo: Moment | None = None
