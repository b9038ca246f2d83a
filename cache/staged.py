"""The incoming tokens of one layer, while it is read."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class Staged:
    """One layer's incoming tokens behind its kept rows: views into staging, valid until the next layer is staged."""

    keys: Tensor  # [kv_heads, columns, head_dim], compute dtype
    values: Tensor  # [kv_heads, columns, head_dim]
    position: Tensor  # int32 [kv_heads, columns]
    score: Tensor  # fp32 [kv_heads, columns]: what was stored with the held tokens, 0 for new ones
    held: tuple[int, ...]  # kept tokens in front of the new ones, per KV head
    tokens: int

    @property
    def agree(self) -> bool:
        """Whether all heads hold equally many tokens, so that the new ones start in one column."""
        return len(set(self.held)) == 1

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(held + self.tokens for held in self.held)
