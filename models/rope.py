"""Rotary position embeddings: frequencies of every kind, angles computed for any position, rotation in place."""

from __future__ import annotations

import math
from collections.abc import Hashable

import torch
from torch import Tensor

from .rope_config import RopeConfig

__all__ = ["RopeConfig", "Rotary", "apply_rotary_", "inverse_frequencies", "rotate_into"]


def inverse_frequencies(rope: RopeConfig, seq_len: int) -> tuple[Tensor, float]:
    """Inverse frequencies, fp32 [head_dim / 2], and the factor that cos and sin are multiplied by.

    `seq_len` is the longest true length of the run in tokens (prompt and new tokens): the dynamic and longrope kinds
    depend on it, so it is chosen once for a prompt and keys of one cache are never rotated with two bases.
    Sources: RoFormer (arXiv 2104.09864); linear and dynamic NTK as in transformers; YaRN (arXiv 2309.00071) eq. 17
    and 22; LongRoPE (arXiv 2402.13753); llama3 as published with Llama 3.1.
    """
    theta, head_dim = rope.theta, rope.head_dim
    if rope.kind == "dynamic":
        length = max(seq_len, rope.max_position_embeddings)
        growth = rope.factor * length / rope.max_position_embeddings - (rope.factor - 1)
        theta = theta * growth ** (head_dim / (head_dim - 2))
    wavelengths = theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)  # in 2 pi tokens
    if rope.kind == "linear":
        return 1.0 / wavelengths / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, 1.0 / wavelengths), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, wavelengths), _yarn_attention_factor(rope)
    if rope.kind == "longrope":
        return _longrope(rope, wavelengths, seq_len), _longrope_attention_factor(rope)
    return 1.0 / wavelengths, 1.0


def _original(rope: RopeConfig) -> int:
    assert rope.original_max_position_embeddings is not None  # checked by RopeConfig for the kinds that need it
    return rope.original_max_position_embeddings


def _llama3(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """Long wavelengths are divided by the factor, short ones kept, those between blended linearly."""
    original = _original(rope)
    turns = original * frequencies / (2 * math.pi)  # rotations within the original context
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies


def _yarn(rope: RopeConfig, wavelengths: Tensor) -> Tensor:
    """Dimensions that turn often keep their frequency, those that turn rarely are interpolated, a ramp between."""
    original = _original(rope)

    def dimension(rotations: float) -> float:
        return rope.head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.head_dim - 1)
    if low == high:
        high += 0.001  # a ramp of no width
    interpolated = ((torch.arange(rope.head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return 1.0 / (rope.factor * wavelengths) * interpolated + 1.0 / wavelengths * (1 - interpolated)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    """Attention temperature: the config's own, else from mscale / mscale_all_dim if both say something, else 22."""

    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return temperature(rope.mscale) / temperature(rope.mscale_all_dim)
    return temperature(1.0)


def _longrope(rope: RopeConfig, wavelengths: Tensor, seq_len: int) -> Tensor:
    factors = rope.long_factor if seq_len > _original(rope) else rope.short_factor
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * wavelengths)


def _longrope_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    return math.sqrt(1 + math.log(rope.factor) / math.log(_original(rope))) if rope.factor > 1 else 1.0


class Rotary:
    """The rotary embedding of one run of at most `seq_len` true positions. Holds no table, so no position is past
    its end.

    `key` is equal for two runs exactly if they use the same frequencies: only then may they share cached keys.
    """

    def __init__(self, rope: RopeConfig, seq_len: int, device: torch.device | str = "cpu") -> None:
        self.seq_len = seq_len
        frequencies, self.attention_factor = inverse_frequencies(rope, seq_len)
        self.key: Hashable = (tuple(frequencies.tolist()), self.attention_factor)
        self.inverse_frequencies = frequencies.to(device)  # [head_dim / 2]

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Scaled cosines and sines, each fp32 [n, head_dim / 2], of integer positions [n]."""
        angles = positions.to(torch.float32)[:, None] * self.inverse_frequencies
        cos, sin = angles.cos(), angles.sin_()
        if self.attention_factor != 1.0:
            cos.mul_(self.attention_factor)
            sin.mul_(self.attention_factor)
        return cos, sin


def rotate_into(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Write the rotation of `x` [heads, n, head_dim] into `out`, of the same shape and apart from `x`.

    Dimension i turns with dimension i + head_dim / 2 (the half-split layout of Hugging Face checkpoints) by the angles
    of `cos` and `sin`, fp32 [n, head_dim / 2]. Worked in fp32 and rounded once. Both may be strided views.
    """
    half = x.shape[-1] // 2
    x = x.float()  # a view of nothing else: no copy where x is fp32
    wide = out if out.dtype == torch.float32 else torch.empty_like(x)
    first, second = x[..., :half], x[..., half:]
    torch.mul(first, cos, out=wide[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=wide[..., half:]).addcmul_(first, sin)
    if wide is not out:
        out.copy_(wide)


def apply_rotary_(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` [heads, n, head_dim] in place as `rotate_into` does, and return it."""
    rotated = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rotate_into(rotated, x, cos, sin)
    return x.copy_(rotated)
