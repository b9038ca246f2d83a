"""What a policy is: a layer's rows in, a score for each row and one weight for the layer out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ..tuned import Tuned

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from ..cascade import Cascade
    from ..merges.base import Merge
    from ..view import LayerView


@dataclass(frozen=True)
class PolicyModel:
    """What a policy may know of a model: enough to find it in a table of tuned constants."""

    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    tuned: tuple[Tuned, ...] = field(default=(), compare=False)  # found for this very model, whatever others share


@dataclass(frozen=True)
class LayerScore:
    """A layer's verdict: `indicator` fp32 `[kv_heads, n]` (higher stays) and `preference`, finite and at least 0.

    carried: fp32 `[kv_heads, n]` to be kept with each row and given back when it is scored again; None keeps the
    indicator. preference: one number for each KV head where rows are dealt to on their own. worth: fp32
    `[kv_heads, n]`, by which heads and layers are compared; None compares the indicator. curve: instead of a
    preference, the falling priorities of the layer's next so many seats.
    """

    indicator: Tensor
    preference: float | tuple[float, ...]
    carried: Tensor | None = None
    worth: Tensor | None = None
    curve: Callable[[int], np.ndarray] | None = None


class Indicator(Protocol):
    """Scores the tokens of one layer. Stateless between layers; what a row must remember is `carry`.

    A class may also have `describe(self) -> str`, its constants for the statistics line;
    `carry(self, view, indicator) -> Tensor`, fp32 `[kv_heads, n]`, what to keep with each row (default: the indicator);
    `worth(self, view, indicator) -> Tensor`, what heads and layers are compared by (default: the indicator).
    """

    @property
    def needs(self) -> frozenset[str]:
        """The inputs that `score` reads beyond keys and positions, names of `inputs.INPUTS`."""

    def score(self, view: LayerView) -> Tensor:
        """fp32 `[kv_heads, n]`, higher stays. Window columns are kept whatever they get; no column may get NaN, and
        columns beyond a head's own length are neither read nor looked at."""


class Allocation(Protocol):
    """A layer's weight in the sharing of the budget. A class may also have `describe` as an indicator, and
    `create(cls, model, budget, **options)` where its constants depend on the model.

    An allocation by scores has `scored = True` and, unless rows compete on their own, instead of `preference`
    `curve(view, indicator, limit) -> np.ndarray`, fp32 and falling: the priorities of the layer's seats. One that must
    have seen all layers has `settle(preferences) -> weights`: nothing is evicted before the last layer then.
    """

    @property
    def needs(self) -> frozenset[str]:
        """The inputs that `preference` reads beyond keys and positions."""

    def preference(self, view: LayerView, indicator: Tensor) -> float | tuple[float, ...]:
        """Finite and at least 0; a layer is dealt seats in proportion to it. `indicator` is what `score` gave, or what
        heads and layers are compared by where that is something else."""


class Policy(Protocol):
    """Indicator + allocation. Stateless between layers: the cascade, one for each piece, does the sharing."""

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
    def late(self) -> bool:
        """Whether nothing is evicted before all layers are read, so that a prefill holds the whole cache."""

    @property
    def merger(self) -> Merge | None:
        """What folds evicted values into kept ones, if anything does."""

    def cascade(self, num_layers: int, kv_heads: int, budget: int, window: int) -> Cascade:
        """How the rows of a piece share the budget."""

    def score(self, view: LayerView) -> LayerScore:
        """Score the rows of one layer."""

    def describe(self) -> str:
        """One line for the statistics: the name and the constants in use."""
