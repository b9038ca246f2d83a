"""The flash-attn package as an attention backend (Dao, 2023): fp16 and bf16 on CUDA devices.

It has no masks: a sliding window is by index there. That is the same as by position where nothing was evicted and the
rows are in the order of the text, and `choose` refuses the rest.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from . import packed
from . import rows as plain
from .rows import Rows
from .sdpa import SlidingMask

NO_WINDOW = (-1, -1)


class FlashAttention:
    """Keys are read in place, through strided views; its causal mask is aligned to the end of the keys (since 2.1)."""

    name: ClassVar[str] = "flash_attn"
    ragged: ClassVar[bool] = False

    def __init__(self) -> None:
        import flash_attn  # not needed to import this file: the package may be missing

        self._flash = flash_attn

    def prefill(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        scale: float,
        past: int,
        sliding: SlidingMask | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        """See `Attention.prefill`."""
        out, total, _ = self._flash.flash_attn_func(
            queries.transpose(0, 1)[None],  # [1, q_len, heads, head_dim]
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            softmax_scale=scale,
            causal=True,
            window_size=_window(sliding),
            return_attn_probs=True,  # the log-sum-exps with it, [1, heads, q_len]; the probabilities are not made
        )
        if lse is not None:
            lse.copy_(total[0])
        attended: Tensor = out[0].transpose(0, 1)
        return attended

    def decode(
        self, queries: Tensor, keys: Tensor, values: Tensor, *, scale: float, sliding: SlidingMask | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """See `Attention.decode`; gives no weights."""
        out: Tensor = self._flash.flash_attn_with_kvcache(
            queries[None, None],  # [1, 1, heads, head_dim]
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            cache_seqlens=keys.shape[1],
            softmax_scale=scale,
            causal=True,
            window_size=_window(sliding),
        )
        return out[0, 0], None

    store_newcomers = staticmethod(plain.store_newcomers)
    exchange_least_attended = staticmethod(plain.exchange_least_attended)  # never reached, as there are no weights
    attend_packed = staticmethod(packed.attend_packed)  # never reached: it is not chosen for packed rows

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
        """See `rows.attend_rows`: row by row, each a sequence of one KV head."""
        assert not weights, "flash-attn gives no weights"
        out = queries.new_zeros(queries.shape)
        group = queries.shape[1] // rows.kv_heads
        for sequence, head, start, span in rows.spans(newcomers):
            if span.stop > start:
                mine = slice(head * group, (head + 1) * group)
                out[sequence, mine] = self._flash.flash_attn_with_kvcache(
                    queries[sequence, mine][None, None],
                    rows.keys[span][None, :, None],
                    rows.values[span][None, :, None],
                    cache_seqlens=span.stop - start,
                    softmax_scale=scale,
                    causal=True,
                    window_size=NO_WINDOW if sliding is None else (sliding - 1, 0),
                )[0, 0]
        return out, None


def _window(sliding: SlidingMask | None) -> tuple[int, int]:
    """The window as flash-attn counts it: how many keys before a query's own and after it are seen, by index."""
    return NO_WINDOW if sliding is None else (sliding.window - 1, 0)
