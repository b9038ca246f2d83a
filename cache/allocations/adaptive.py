"""Ada-KV's rule over heads (Feng et al., NeurIPS 2025, arXiv 2407.11550): a layer's slots go to its best scores.

Of `m` tokens a head on average every head keeps its best `floor * m`, and the rest of the layer's slots go to the best
scores of whichever head. Default: floor 0.2, as in the authors' runs. Their code mixes the floor with a free count and
rounds; forced ranks are the form in which evicting layer by layer keeps what one choice would (`cache/shares.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..shares import DEFAULT_HEAD_FLOOR


@dataclass(frozen=True)
class AdaptiveHeads:
    """Rows of one layer get lengths of their own, and are stored and read at these."""

    floor: float = DEFAULT_HEAD_FLOOR

    needs: ClassVar[frozenset[str]] = frozenset()
    mode: ClassVar[str] = "adaptive"

    def describe(self) -> str:
        return f"heads adaptive {self.floor:g}"
