"""KeyDiff (Park et al., NeurIPS 2025, arXiv 2504.15364): keys that point elsewhere than the others are distinctive.

`s[n] = -cos(k_n, anchor)`, the anchor being the mean of the normalised keys that the head holds. The paper reads in
blocks of 128 tokens under a hard limit and evicts after each; here a layer is read whole and cut once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch.nn.functional import normalize

from ..attention import empty_scores

if TYPE_CHECKING:
    from torch import Tensor

    from ..view import LayerView


@dataclass(frozen=True)
class KeyDiffIndicator:
    """Keys alone, each against their mean direction."""

    needs: ClassVar[frozenset[str]] = frozenset()

    def score(self, view: LayerView) -> Tensor:
        """fp32 `[kv_heads, n]`, from -1 to 1."""
        scores = empty_scores(view)
        for head, length in enumerate(view.columns):
            keys = normalize(view.keys[head, :length].float(), dim=-1)
            scores[head, :length] = -(keys @ normalize(keys.mean(0), dim=0))
        return scores
