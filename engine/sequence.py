"""One text that the engine is reading or writing: its ids, its budget, and what decoding needs beside its rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ..cache.policies.base import Policy
from ..cache.saved_rows import SavedRows
from ..models.rope import Rotary


class QueryRing:
    """The last `window` rotated queries of every layer, by true position modulo the window: `[layers, window, H, D]`.

    They are the votes of a piece of text: prefill and decode both write here, so that a short turn after a long reply
    is judged with the reply's last queries as well.
    """

    def __init__(
        self, num_layers: int, window: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ):
        self.window, self.heads = window, heads
        self._ring = torch.zeros(num_layers, window, heads, head_dim, dtype=dtype, device=device)

    def write(self, layer: int, first_position: int, queries: Tensor) -> None:
        """Remember queries `[heads, n, head_dim]` at positions first_position, first_position + 1, ..."""
        count = min(self.window, queries.shape[1])
        start = first_position + queries.shape[1] - count
        slots = torch.arange(start, start + count, device=queries.device) % self.window
        self._ring[layer, slots] = queries[:, -count:].transpose(0, 1).to(self._ring.dtype)

    def read(self, layer: int, total: int) -> tuple[Tensor, Tensor]:
        """The queries of the last `min(window, total)` positions, `[heads, r, head_dim]`, and those positions `[r]`."""
        position = torch.arange(max(0, total - self.window), total, device=self._ring.device)
        return self._ring[layer, position % self.window].transpose(0, 1), position

    def recent(self, total: int, modulus: int) -> tuple[Tensor, Tensor]:
        """The queries of the last `min(window, total)` positions, `[layers, r, H, D]`, and those positions modulo
        `modulus`: where they stand in a ring of another size."""
        position = torch.arange(max(0, total - self.window), total, device=self._ring.device)
        return position % modulus, self._ring[:, position % self.window]

    def take_recent(self, other: Tensor, total: int) -> None:
        """Copy the queries of those positions from a ring of another size, `[layers, size, H, D]`."""
        position = torch.arange(max(0, total - self.window), total, device=self._ring.device)
        self._ring.index_copy_(1, position % self.window, other[:, position % other.shape[1]])

    def as_numpy(self) -> np.ndarray:
        """The ring itself, fp32 on a CPU, for a kernel that writes `[layer, position % window]`."""
        return self._ring.numpy()

    def copy(self) -> Tensor:
        return self._ring.clone()

    def restore(self, saved: Tensor) -> None:
        self._ring.copy_(saved)


@dataclass
class Checkpoint:
    """Everything that brings a sequence back to an earlier moment."""

    fed: int
    rows: SavedRows | None
    ring: Tensor | None
    limit: np.ndarray | None
    rotary: Rotary | None
    budget: int | None
    read: int = 0


@dataclass
class Sequence:
    """The state of one text. Its rows are in the arena while it is active, else in `parked`.

    ids: every id that was fed, in order; the next token's true position is their number.
    budget: C in tokens per layer and KV head, fixed by the first piece (None: nothing is ever evicted).
    limit: int64 `[layers, kv_heads]` for decoding with `hold`: a row that is this long gives up a slot per newcomer.
    """

    ids: list[int] = field(default_factory=list)
    budget: int | None = None
    ring: QueryRing | None = None
    rotary: Rotary | None = None
    limit: np.ndarray | None = None
    parked: SavedRows | None = None
    read: int = 0  # tokens whose rows have what the policy left with them: those of the last prefill and before
    kept_by: str | None = None  # a document's policy: nothing more is evicted, whatever is fed
    policy: Policy | None = None  # in place of the engine's own
    spoilt: bool = False  # a piece or a step was broken off in the middle: the rows mean nothing any more

    @property
    def total(self) -> int:
        return len(self.ids)

    @property
    def fixed(self) -> bool:
        """Whether the rows that there are stay, so that a held row keeps its length and a growing one all newcomers."""
        return self.kept_by is not None
