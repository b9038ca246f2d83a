"""Attention over keys that are stored once per KV head: the query heads that share one are grouped, nothing expanded.

Every function takes queries ``[heads, q_len, head_dim]`` and keys and values ``[kv_heads, kv_len, head_dim]`` (strided
views are fine) and lets query head h read KV head ``h // (heads // kv_heads)``. Masks are by *position*, never by
index: the order of keys has no meaning, since they carry their rotation.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from . import packed as plain_packed
from . import rows as plain

WIDTH = 64  # keys; see `_attend_before`


def prefill_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    past: int,
    sliding: SlidingMask | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """Causal attention of a chunk, aligned to the end of the keys. Returns `[heads, q_len, head_dim]`.

    The first `past` keys come before every query; the rest, ``kv_len - past == q_len`` of them, are the chunk's own.
    torch's `is_causal` is aligned to the top left corner, so the two parts are computed apart, each without a mask,
    and combined by their log-sum-exp: nothing above the diagonal blocks is computed. With `sliding` a key is visible
    if it lies within the window by position, and one masked call is made. `lse` fp32 `[heads, q_len]`, where given and
    nothing slides, gets the log-sum-exp of every query's logits.
    """
    heads, q_len, head_dim = queries.shape
    kv_heads = keys.shape[0]
    grouped = queries.view(kv_heads, heads // kv_heads, q_len, head_dim)
    if sliding is not None:
        mask = sliding.visible(q_len)  # [kv_heads or 1, 1, q_len, kv_len]
        shape = (kv_heads, heads // kv_heads, keys.shape[1], head_dim)
        keys, values = keys[:, None].expand(shape), values[:, None].expand(shape)
        if grouped.device.type == "cuda":
            return _attend_visible(grouped, keys, values, mask, scale).reshape(heads, q_len, head_dim)
        out = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
        return out.reshape(heads, q_len, head_dim)
    own, own_lse = _attend(grouped, keys[:, past:], values[:, past:], scale, causal=True)
    total = own_lse
    if past:
        before, before_lse = _attend_before(grouped, keys, values, scale, past)
        total = own_lse if lse is None else torch.logaddexp(own_lse, before_lse)
        # softmax over both parts: the share of each part is the sigmoid of the difference of their log-sum-exps
        torch.lerp(before, own, torch.sigmoid(own_lse - before_lse).unsqueeze(-1).to(own.dtype), out=own)
        del before  # so that no third array of this size is alive below
    if lse is not None:
        lse.copy_(total.reshape(heads, q_len))
    return own.reshape(heads, q_len, head_dim)


def _attend_visible(grouped: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Attention where `visible`, bool `[kv_heads or 1, 1, q_len, kv_len]`, on a GPU: all four-dimensional.

    By one kernel's name: which one torch takes for a mask depends on its release, and cuDNN's makes a plan for every
    shape anew, of which the chunks of a prefill have many.
    """
    q_len, kv_len = visible.shape[2:]
    room = -(-kv_len // 16) * 16  # the kernel wants rows of the mask to begin there
    mask = torch.zeros(visible.shape[0], 1, q_len, room, dtype=grouped.dtype, device=grouped.device)[..., :kv_len]
    mask.masked_fill_(~visible, float("-inf"))
    shape = (*grouped.shape[:3], kv_len)
    out: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        grouped, keys, values, mask.expand(shape), False, 0.0, False, scale=scale
    )[0]
    return out


def _attend_before(grouped: Tensor, keys: Tensor, values: Tensor, scale: float, past: int) -> tuple[Tensor, Tensor]:
    """`_attend` to the first `past` keys.

    In half precision on a CPU torch compiles a kernel for every width of the last block of keys, about a megabyte, and
    keeps it for good. Kept rows have any length, so that a long conversation would collect hundreds of them: here the
    width is a multiple of `WIDTH`, and a mask hides what is behind.
    """
    width = -(-past // WIDTH) * WIDTH
    if width == past or keys.device.type != "cpu" or keys.dtype not in (torch.bfloat16, torch.float16):
        return _attend(grouped, keys[:, :past], values[:, :past], scale, causal=False)
    kv_heads, group, q_len, head_dim = grouped.shape
    folded = grouped.reshape(kv_heads, 1, group * q_len, head_dim)
    if width <= keys.shape[1]:  # behind them are the chunk's own keys
        mask = torch.zeros(width, dtype=keys.dtype)
        mask[past:] = float("-inf")
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            folded,
            keys[:, None, :width],
            values[:, None, :width],
            0.0,
            False,
            attn_mask=mask.expand(1, 1, folded.shape[2], width),
            scale=scale,
        )
        return out.reshape(grouped.shape), lse.reshape(kv_heads, group, q_len)
    out, lse = torch.empty_like(folded), torch.empty(kv_heads, group * q_len)
    for head in range(kv_heads):  # a few queries
        logits = folded[head, 0].float() @ keys[head, :past].float().t() * scale
        lse[head] = torch.logsumexp(logits, dim=-1)
        out[head, 0] = (logits - lse[head, :, None]).exp_() @ values[head, :past].float()
    return out.reshape(grouped.shape), lse.reshape(kv_heads, group, q_len)


def _attend(grouped: Tensor, keys: Tensor, values: Tensor, scale: float, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention and log-sum-exp `[kv_heads, group, q_len]` of grouped queries `[kv_heads, group, q_len, head_dim]`.

    Where nothing is masked the query heads of a KV head are simply more rows: keys are packed once for all of them.
    """
    if not causal and grouped.shape[1] > 1:
        kv_heads, group, q_len, head_dim = grouped.shape
        folded = grouped.reshape(kv_heads, 1, group * q_len, head_dim)
        out, lse = _attend(folded, keys, values, scale, causal=False)
        return out.reshape(grouped.shape), lse.reshape(kv_heads, group, q_len)
    shape = (keys.shape[0], grouped.shape[1], keys.shape[1], keys.shape[2])
    keys, values = keys[:, None].expand(shape), values[:, None].expand(shape)  # stride 0: no copy
    if grouped.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            grouped, keys, values, 0.0, causal, scale=scale
        )
        return out, lse
    if _has_flash(grouped):
        # causal parts are square: how the kernel aligns others does not matter
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            grouped, keys, values, 0.0, causal, scale=scale
        )
        return out, lse
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        grouped, keys, values, None, True, 0.0, causal, scale=scale
    )
    return out, lse[..., : grouped.shape[2]]


def _has_flash(grouped: Tensor) -> bool:
    """Whether torch's flash attention has a form for these queries on their GPU."""
    head_dim = grouped.shape[-1]
    narrow = grouped.dtype in (torch.float16, torch.bfloat16)
    return (
        narrow and head_dim % 8 == 0 and head_dim <= 256 and torch.cuda.get_device_capability(grouped.device) >= (8, 0)
    )


def log_sum_exp(
    queries: Tensor, keys: Tensor, positions: Tensor, query_position: Tensor, sliding: int | None, tile: int = 1024
) -> Tensor:
    """Log-sum-exp `[group, q_len]` of one KV head's logits, in tiles of columns, by position.

    `queries` fp32, scaled, `[group, q_len, head_dim]`; `keys` `[n, head_dim]`; `positions` `[n]`; `query_position`
    `[q_len]`.
    """
    total = queries.new_full(queries.shape[:2], float("-inf"))
    for start in range(0, keys.shape[0], tile):
        at = positions[None, start : start + tile]
        hidden = at > query_position[:, None]
        if sliding is not None:
            hidden |= at <= query_position[:, None] - sliding
        logits = torch.matmul(queries, keys[start : start + tile].float().t()).masked_fill_(hidden, float("-inf"))
        total = torch.logaddexp(total, torch.logsumexp(logits, dim=-1))
    return total


class SlidingMask:
    """Visibility by position in a layer with a sliding window: key j for query i if i - window < j <= i."""

    def __init__(self, window: int, query_position: Tensor, key_position: Tensor) -> None:
        """`query_position` int `[q_len]`, `key_position` int `[kv_heads, kv_len]`."""
        self.window, self.query_position, self.key_position = window, query_position, key_position

    def visible(self, q_len: int) -> Tensor:
        """Boolean `[kv_heads, 1, q_len, kv_len]`."""
        query = self.query_position[-q_len:, None]
        key = self.key_position[:, None, None, :]
        return (key <= query) & (key > query - self.window)


def decode_attention(
    queries: Tensor, keys: Tensor, values: Tensor, *, scale: float, hidden: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One new token's attention over a row: output `[heads, head_dim]`, weights fp32 `[kv_heads, group, kv_len]`.

    `queries` `[heads, head_dim]`; `hidden` bool `[kv_heads, kv_len]` marks keys outside a sliding window. On a CPU half
    precision is worked in fp32, head by head: torch would compile a product for every length of a row and keep it.
    """
    heads, head_dim = queries.shape
    kv_heads = keys.shape[0]
    if queries.device.type == "cpu" and queries.dtype in (torch.bfloat16, torch.float16):
        parts = [
            decode_attention(
                part.float(),
                keys[head : head + 1],
                values[head : head + 1],
                scale=scale,
                hidden=None if hidden is None else hidden[head : head + 1],
            )
            for head, part in enumerate(queries.chunk(kv_heads))
        ]
        outputs, weights = zip(*parts, strict=True)
        return torch.cat(outputs).to(queries.dtype), torch.cat(weights)
    grouped = queries.view(kv_heads, heads // kv_heads, head_dim)
    logits = torch.matmul(grouped, keys.to(queries.dtype).transpose(1, 2)).float().mul_(scale)
    if hidden is not None:
        logits.masked_fill_(hidden[:, None], float("-inf"))
    probabilities = torch.softmax(logits, dim=-1)
    out = torch.matmul(probabilities.to(queries.dtype), values.to(queries.dtype))
    return out.reshape(heads, head_dim), probabilities


class Sdpa:
    """torch's own kernels: any device and dtype."""

    name: ClassVar[str] = "sdpa"
    ragged: ClassVar[bool] = False

    prefill = staticmethod(prefill_attention)

    def decode(
        self, queries: Tensor, keys: Tensor, values: Tensor, *, scale: float, sliding: SlidingMask | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """See `Attention.decode`."""
        hidden = None if sliding is None else ~sliding.visible(1)[:, 0, 0]
        return decode_attention(queries, keys, values, scale=scale, hidden=hidden)

    store_newcomers = staticmethod(plain.store_newcomers)
    attend_rows = staticmethod(plain.attend_rows)
    attend_packed = staticmethod(plain_packed.attend_packed)
    exchange_least_attended = staticmethod(plain.exchange_least_attended)
