"""What an attention backend is."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from .packed import PackedPart
    from .rows import Rows
    from .sdpa import SlidingMask


class Attention(Protocol):
    """Attention of a prefill and of a decode step. Stateless; query head h reads KV head ``h // (heads // kv_heads)``.

    `ragged`: decode steps go through the functions over `Rows`, whose tables are on the device and which no
    launch depends on; else through `decode`, a strided view of one layer or row at a time.
    """

    name: ClassVar[str]
    ragged: ClassVar[bool]

    def prefill(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        scale: float,
        past: int,
        sliding: SlidingMask | None,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of a chunk, aligned to the end of the keys: `[heads, q_len, head_dim]`.

        queries `[heads, q_len, head_dim]`; keys and values `[kv_heads, kv_len, head_dim]`, strided as they may be. The
        first `past` keys come before every query, unless `sliding` says which are seen, by position. `lse` fp32
        `[heads, q_len]`, where given and nothing slides, gets the log-sum-exp of every query's logits.
        """

    def decode(
        self, queries: Tensor, keys: Tensor, values: Tensor, *, scale: float, sliding: SlidingMask | None
    ) -> tuple[Tensor, Tensor | None]:
        """One new token over a layer's row view: `[heads, head_dim]`, and its weights fp32 `[kv_heads, group, kv_len]`.

        No weights from a backend that has none to give: it is never chosen where a full row has to give up a slot.
        """

    def store_newcomers(self, rows: Rows, new_keys: Tensor, new_values: Tensor) -> None:
        """See `rows.store_newcomers`."""

    def attend_rows(
        self,
        queries: Tensor,
        rows: Rows,
        *,
        scale: float,
        sliding: int | None = None,
        newcomers: int = 1,
        weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """See `rows.attend_rows`."""

    def attend_packed(
        self,
        queries: Tensor,
        rows: Rows,
        packed: PackedPart,
        *,
        scale: float,
        sliding: int | None = None,
        newcomers: int = 1,
    ) -> Tensor:
        """See `packed.attend_packed`."""

    def exchange_least_attended(self, rows: Rows, weights: Tensor, limit: Tensor, *, window: int) -> None:
        """See `rows.exchange_least_attended`."""
