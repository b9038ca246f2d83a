"""L2 norm of keys (Devoto et al., EMNLP 2024, arXiv 2406.11430): keys with a low norm draw attention.

`s[n] = -||k_n||_2`. The authors leave layers 0 and 1 uncompressed; here every layer shares the budget, so that bytes
compare (a table of budgets can give these layers more).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from ..attention import empty_scores

if TYPE_CHECKING:
    from torch import Tensor

    from ..view import LayerView


@dataclass(frozen=True)
class KnormIndicator:
    """Keys alone: rotation does not change a norm."""

    needs: ClassVar[frozenset[str]] = frozenset()

    def score(self, view: LayerView) -> Tensor:
        """fp32 `[kv_heads, n]`, at most 0."""
        scores = empty_scores(view)
        for head, length in enumerate(view.columns):
            scores[head, :length] = -torch.linalg.vector_norm(view.keys[head, :length].float(), dim=-1)
        return scores
