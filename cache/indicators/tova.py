"""TOVA (Oren et al., 2024, arXiv 2401.06104): what the newest query attends to, all heads of a layer together.

`s[n] = mean over all query heads of the last row of A`; every KV head keeps the same tokens. The authors protect no
window; here the last `--window` tokens stay (1 is the paper's).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from ..attention import window_attention
from ..joined import SharedPositions

if TYPE_CHECKING:
    from torch import Tensor

    from ..view import LayerView


@dataclass(frozen=True)
class TovaIndicator:
    """One set of tokens for a layer, by its last query."""

    needs: ClassVar[frozenset[str]] = frozenset({"window_queries"})

    def score(self, view: LayerView) -> Tensor:
        """fp32 `[kv_heads, n]`, alike in every head that holds the token."""
        last = replace(view, queries=view.queries[:, -1:], query_positions=view.query_positions[-1:])
        votes = [attention.sum((0, 1)) / view.queries.shape[0] for _, attention in window_attention(last)]
        shared = SharedPositions.of(view)
        return shared.spread(view, shared.total(votes))
