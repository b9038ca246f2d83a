"""StreamingLLM (Xiao et al., ICLR 2024, arXiv 2309.17453): the first tokens, which draw attention, and the last ones.

Default: 4 sinks. The authors' code stores keys before rotation and turns them by their place in the cache; here keys
keep their true positions, so that the text may not go on past the model's context.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from torch import Tensor

    from ..view import LayerView


@dataclass(frozen=True)
class StreamingIndicator:
    """A later token is worth more, but for the sinks, which are worth most."""

    sinks: int = 4

    needs: ClassVar[frozenset[str]] = frozenset()

    def score(self, view: LayerView) -> Tensor:
        """The position; above every position for the sinks. Exact up to 2**24 tokens."""
        position = view.positions.float()
        return position.masked_fill(view.positions < self.sinks, float("inf"))

    def describe(self) -> str:
        return f"sinks {self.sinks}"
