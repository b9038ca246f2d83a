"""What a policy is: a layer's rows in, a score for each row and one weight for the layer out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from ..scores import LayerView


@dataclass(frozen=True)
class PolicyModel:
    """What a policy may know of a model: enough to find it in a table of tuned constants."""

    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int


@dataclass(frozen=True)
class LayerScore:
    """A layer's verdict: `indicator` fp32 `[kv_heads, n]` (higher stays) and `preference`, finite and at least 0."""

    indicator: Tensor
    preference: float


class Policy(Protocol):
    """Indicator + allocation. Stateless between layers: the cascade does the sharing."""

    @property
    def name(self) -> str:
        """The word the user types."""

    @property
    def evicts(self) -> bool:
        """Whether rows are ever dropped after a prefill; if not, `score` is not asked."""

    @property
    def needs(self) -> frozenset[str]:
        """The inputs of `score` beyond keys and positions, by name: "window_queries"."""

    @property
    def allocation(self) -> str:
        """How layers share the budget, see `cascade.ALLOCATIONS`."""

    def score(self, view: LayerView) -> LayerScore:
        """Score the rows of one layer."""

    def describe(self) -> str:
        """One line for the statistics: the name and the constants in use."""
