"""H2O (Zhang et al., NeurIPS 2023, arXiv 2306.14048): heavy hitters by the attention that all queries so far paid.

`s[n] = sum over every query of A[q, n]`, mean over the query heads of a KV head; what a row has gathered goes on being
added to in later turns. The paper keeps half of the budget for the last tokens; here the window is that part, so set
`--window` for more. The authors' code evicts token by token from the start of the prompt on and works per query head;
here the prompt is read whole and cut once. Early tokens are seen by more queries and so score higher: that is H2O.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from torch import Tensor

    from ..view import LayerView


@dataclass(frozen=True)
class H2OIndicator:
    """Accumulated attention."""

    needs: ClassVar[frozenset[str]] = frozenset({"column_sums", "carried"})

    def score(self, view: LayerView) -> Tensor:
        """fp32 `[kv_heads, n]`, in queries: a token that every query attends to fully has the number of queries."""
        assert view.column_sums is not None
        assert view.carried is not None
        kv_heads, n = view.keys.shape[:2]
        return view.column_sums.view(kv_heads, view.group, n).mean(1) + view.carried
