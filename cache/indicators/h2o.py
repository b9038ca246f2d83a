"""H2O (Zhang et al., NeurIPS 2023, arXiv 2306.14048): heavy hitters by the attention that all queries so far paid.

`s[n] = sum over every query of A[q, n]`, mean over the query heads of a KV head; what a row has gathered goes on being
added to in later turns. As in the paper `recent` of the budget (0.5) goes to the last tokens, the window among them,
whatever a layer's own share is; layers and heads are compared by the sums alone. The authors' code evicts token by
token from the start of the prompt on and works per query head; here the prompt is read whole and cut once. Early tokens
are seen by more queries and so score higher: that is H2O.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..policies.base import PolicyModel

if TYPE_CHECKING:
    from torch import Tensor

    from ..view import LayerView


@dataclass(frozen=True)
class H2OIndicator:
    """Accumulated attention. `budget` is in tokens: the recent part is a share of it."""

    budget: int
    recent: float = 0.5

    needs: ClassVar[frozenset[str]] = frozenset({"column_sums", "carried"})

    @classmethod
    def create(cls, model: PolicyModel, budget: int, *, recent: float) -> H2OIndicator:
        return cls(budget, recent)

    def score(self, view: LayerView) -> Tensor:
        """fp32 `[kv_heads, n]`, in queries: a token that every query attends to fully has the number of queries. The
        recent ones have more than that, the newest most."""
        latest = view.positions >= view.total - int(self.recent * self.budget)
        return self._sums(view).where(~latest, view.positions.float() + view.total)

    def worth(self, view: LayerView, indicator: Tensor) -> Tensor:
        """The sums."""
        return self._sums(view)

    def carry(self, view: LayerView, indicator: Tensor) -> Tensor:
        """The sums."""
        return self._sums(view)

    def _sums(self, view: LayerView) -> Tensor:
        assert view.column_sums is not None
        assert view.carried is not None
        kv_heads, n = view.keys.shape[:2]
        return view.column_sums.view(kv_heads, view.group, n).mean(1) + view.carried

    def describe(self) -> str:
        return f"recent {self.recent:g}"
