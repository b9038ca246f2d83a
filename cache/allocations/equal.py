"""Equal heads: the KV heads of a layer keep equally many tokens, each its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class EqualHeads:
    """What every method does that names no rule over heads; the layer stays one strided view."""

    needs: ClassVar[frozenset[str]] = frozenset()
    mode: ClassVar[str] = "equal"
