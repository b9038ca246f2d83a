"""What a method sees of a layer: its rows, and the further inputs that it asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .worst import WorstCase


class WindowPass(Protocol):
    """What works the window's attention, and what else scores take long for, of a view that it has a form for."""

    def fits(self, view: LayerView) -> bool:
        """Whether it has one."""

    def __call__(self, view: LayerView, gamma: float) -> tuple[Tensor, float, float]:
        """See `scores.window_moments`."""

    def worst(self, view: LayerView, reach: int) -> WorstCase | None:
        """See `worst.by_torch`, with dispersion and shift besides; None where it has no form for it."""

    def lengths(self, view: LayerView) -> Tensor | None:
        """See `projection.projected_lengths`, of all heads; None where it has no form for them."""


@dataclass(frozen=True)
class LayerView:
    """One layer's rows and the queries that vote on them. Columns may be in any order of position.

    keys: `[kv_heads, n, head_dim]`, any float dtype, rotated. positions: int `[kv_heads, n]`, unique within a head.
    queries: `[heads, r, head_dim]`, rotated, of the last `r <= window` tokens. query_positions: int `[r]`, theirs.
    scale: what `q . k` is multiplied by. sliding_window: a query at `p` sees positions above `p - sliding_window`.
    total: true number of tokens so far; window columns are those with `position >= total - window`.
    lengths: how many of the `n` columns of each head are valid (the first ones); None for all. The rest is never read.
    first: position of the first new token; what is held from before has smaller ones.

    The rest is there if the policy asked for it (`inputs.INPUTS`) and None otherwise:
    values: `[kv_heads, n, head_dim]`. carried: fp32 `[kv_heads, n]`, what `Indicator.carry` left with the held rows, 0
    for new ones. output_projection: `[hidden, heads * head_dim]`, any float dtype. column_sums: fp32 `[heads, n]`, the
    attention of all new queries to a column. column_squares: fp32 `[kv_heads, n]`, the squares of that attention, its
    mean over the query heads taken before, summed. query_mean fp32 `[heads, head_dim]` and query_covariance `[heads,
    head_dim, head_dim]`: of the new tokens' queries before rotation, without the text's first 4. rotation: cosines and
    sines `[m, head_dim / 2]` of positions `[m]`. hidden_states: `[new, hidden]`, normed. hidden_similarity: mean cosine
    of the hidden states before and after attention. token_ids: int64 `[total]`. separators: ids that end a clause.
    memo: what indicator and allocation of one policy share. ordered: whether the columns of every head are known to be
    positions 0, 1, .., n - 1, which a GPU would have to be asked. window_pass: a faster twin of
    `scores.window_moments`.
    """

    layer: int
    keys: Tensor
    positions: Tensor
    queries: Tensor
    query_positions: Tensor
    window: int
    scale: float
    sliding_window: int | None
    total: int
    lengths: tuple[int, ...] | None = None
    first: int = 0
    values: Tensor | None = None
    carried: Tensor | None = None
    output_projection: Tensor | None = None
    column_sums: Tensor | None = None
    column_squares: Tensor | None = None
    query_mean: Tensor | None = None
    query_covariance: Tensor | None = None
    rotation: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
    hidden_states: Tensor | None = None
    hidden_similarity: float | None = None
    token_ids: Tensor | None = None
    separators: frozenset[int] | None = None
    window_pass: WindowPass | None = None
    ordered: bool = False
    memo: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.queries.shape[0] // self.keys.shape[0]

    @property
    def window_start(self) -> int:
        """The first position of the window."""
        return max(0, self.total - self.window)

    @property
    def columns(self) -> tuple[int, ...]:
        """Valid columns of each KV head."""
        return (self.keys.shape[1],) * self.keys.shape[0] if self.lengths is None else self.lengths


def is_in_order(view: LayerView) -> bool:
    """Whether the columns of every head are positions 0, 1, .., n - 1: the prefill of a whole prompt."""
    n = view.keys.shape[1]
    if view.ordered:
        return True
    if n != view.total or any(length != n for length in view.columns):
        return False
    return bool((view.positions == torch.arange(n, device=view.positions.device)).all())
