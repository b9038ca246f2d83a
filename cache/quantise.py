"""Keys and values in 8, 4 or 2 bits (KIVI, Liu et al., ICML 2024): keys per channel, values per token, in groups.

Of keys, 32 consecutive slots of a row share a scale and a minimum for each channel; of a value, 32 channels of its slot
do. A number is `minimum + code * scale` with a code of 0 .. 2^bits - 1; scale and minimum are fp16, and codes are those
nearest under the rounded pair, so that the error is at most half a scale and what fp16 rounds off a minimum. Group by
group this is what the authors do; they keep 32 to 128 recent tokens in full precision, we the window and up to 32 more.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32  # slots that share a key's scale, and channels that share a value's
KV_BITS = (8, 4, 2)
_LARGEST = 65504.0  # of fp16


def code_bytes(head_dim: int, bits: int) -> int:
    """Bytes of one slot's codes."""
    return -(-head_dim * bits // 8)


def value_groups(head_dim: int) -> int:
    """Groups of a value's channels: all of them are one where they are no multiple of 32."""
    return head_dim // GROUP if head_dim % GROUP == 0 else 1


def whole_groups(slots: int) -> int:
    """The slots of as many groups as that many slots take."""
    return -(-slots // GROUP) * GROUP


def pack_keys(keys: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes uint8 `[slots, code_bytes]`, scale and minimum fp16 `[slots / 32, head_dim]` of `[n, head_dim]`.

    Any float dtype. `slots` is n in whole groups: the last one is made of what is there, and the codes behind it mean
    nothing. A group with a number that is none, or infinite, is not a number as a whole: nothing is hidden.
    """
    missing = -keys.shape[0] % GROUP
    if missing:  # the last slot again: it moves no minimum and no scale
        keys = torch.cat([keys, keys[-1:].expand(missing, -1)])
    groups = keys.float().view(-1, GROUP, keys.shape[1])
    codes, scale, minimum = _quantised(groups, 1, bits)
    return _joined(codes.flatten(0, 1), bits), scale, minimum


def pack_values(values: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes uint8 `[n, code_bytes]`, scale and minimum fp16 `[n, value_groups]` of `[n, head_dim]`."""
    n, dim = values.shape
    groups = values.float().view(n, value_groups(dim), -1)
    codes, scale, minimum = _quantised(groups, 2, bits)
    return _joined(codes.flatten(1), bits), scale, minimum


def widen_keys(out: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor, bits: int) -> None:
    """Write the first n slots of packed keys into `out` `[n, head_dim]`, in its dtype."""
    n, dim = out.shape
    whole = whole_groups(n)
    count = whole // GROUP
    numbers = _apart(codes[:whole], dim, bits).view(count, GROUP, dim)
    numbers.mul_(scale[:count, None].float()).add_(minimum[:count, None].float())
    out.copy_(numbers.view(whole, dim)[:n])


def widen_values(out: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor, bits: int) -> None:
    """Write the first n slots of packed values into `out` `[n, head_dim]`, in its dtype."""
    n, dim = out.shape
    groups = value_groups(dim)
    numbers = _apart(codes[:n], dim, bits).view(n, groups, dim // groups)
    out.copy_(numbers.mul_(scale[:n, :, None].float()).add_(minimum[:n, :, None].float()).view(n, dim))


def _quantised(groups: Tensor, axis: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes uint8 like `groups` fp32, scale and minimum fp16 without `axis`, along which a group lies."""
    levels = 2**bits - 1
    low, high = groups.aminmax(dim=axis)
    finite = low.isfinite() & high.isfinite()
    minimum = torch.where(finite, low, torch.nan).clamp(-_LARGEST, _LARGEST).half()
    # from the rounded minimum, so that the highest number is reached
    scale = ((high - minimum.float()) / levels).clamp(0.0, _LARGEST).half()
    step = scale.float()
    step = torch.where(step > 0, step, 1.0).unsqueeze(axis)  # a constant group is its minimum
    codes = (groups - minimum.float().unsqueeze(axis)).div_(step).round_().clamp_(0, levels)
    codes.masked_fill_((scale == 0).unsqueeze(axis), 0.0)
    return codes.nan_to_num_(0.0).to(torch.uint8), scale.nan_to_num_(0.0), minimum


def _joined(codes: Tensor, bits: int) -> Tensor:
    """Codes uint8 `[n, head_dim]` in bytes `[n, code_bytes]`: channel c in byte c * bits // 8, low bits first."""
    each = 8 // bits
    if each == 1:
        return codes
    n, dim = codes.shape
    if dim % each:
        codes = torch.nn.functional.pad(codes, (0, -dim % each))
    parts = codes.view(n, -1, each)
    joined = parts[..., 0].clone()
    for at in range(1, each):
        joined |= parts[..., at] << (at * bits)
    return joined


def _apart(joined: Tensor, head_dim: int, bits: int) -> Tensor:
    """fp32 codes `[n, head_dim]`, contiguous and the caller's own."""
    each = 8 // bits
    if each == 1:
        return joined.float()
    mask = 2**bits - 1
    codes = torch.empty(*joined.shape, each, dtype=torch.float32, device=joined.device)
    for at in range(each):
        codes[..., at] = (joined >> (at * bits)) & mask
    return codes.flatten(1)[:, :head_dim].contiguous()
