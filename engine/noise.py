"""Random numbers without a generator: a pure function of (seed, step, token).

A reply's text then does not depend on what else runs, on threads, on the runner or on the device; and the caller's
torch generators are neither read nor advanced.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK = 2**64 - 1


def gumbel_noise(seed: int, step: int | Tensor, ids: Tensor) -> Tensor:
    """Standard Gumbel noise for each token id, a pure function of (seed, step, id). int64 [n] -> float64 [n].

    The bits are SplitMix64 (Steele, Lea, Flood 2014): mix(mix(mix(seed + g) + (step + 1) g) + (id + 1) g) modulo 2**64
    with its finaliser `mix` and its golden gamma g. The top 52 bits give u in (0, 1), the noise is -log(-log u); the
    token with the largest logit + noise is a sample of the softmax (Gumbel-max). Integers alone decide the bits, so
    they are the same on every device. `step` may be a one-element tensor on the device of `ids`.
    """
    key = torch.full((1,), seed_key(seed), dtype=torch.int64, device=ids.device)
    key += (step + 1) * _signed(_GOLDEN) if isinstance(step, Tensor) else _signed((step + 1) * _GOLDEN)
    return _noise(_mix_(key), ids)


def gumbel_rows(keys: Tensor, steps: Tensor, ids: Tensor) -> Tensor:
    """`gumbel_noise` for n rows at once: keys (`seed_key` of each seed) and steps int64 `[n]`, all on one device.

    ids int64 `[V]`, or `[n, V]` where rows have their ids in orders of their own. Returns float64 `[n, V]`.
    """
    return _noise(_mix_(keys + (steps + 1) * _signed(_GOLDEN))[:, None], ids)


def seed_key(seed: int) -> int:
    """What a seed of 64 bits gives to the noise of its tokens, as an int64."""
    return _signed(_mix_int(seed + _GOLDEN))


def _noise(key: Tensor, ids: Tensor) -> Tensor:
    bits = _mix_(((ids + 1) * _signed(_GOLDEN)).add(key))
    uniform = (_shifted(bits, 12).double() + 0.5).mul_(2.0**-52)
    return uniform.log_().neg_().log_().neg_()


def _mix_(x: Tensor) -> Tensor:
    """SplitMix64's finaliser, in place; int64 products wrap, and their bits are those of the unsigned ones."""
    x.bitwise_xor_(_shifted(x, 30)).mul_(_signed(_MIX_1))
    x.bitwise_xor_(_shifted(x, 27)).mul_(_signed(_MIX_2))
    return x.bitwise_xor_(_shifted(x, 31))


def _mix_int(x: int) -> int:
    """The same of a Python integer."""
    x &= _MASK
    x = (x ^ (x >> 30)) * _MIX_1 & _MASK
    x = (x ^ (x >> 27)) * _MIX_2 & _MASK
    return x ^ (x >> 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right: int64 has a sign, which must not be drawn in."""
    return (x >> bits).bitwise_and_(2 ** (64 - bits) - 1)


def _signed(x: int) -> int:
    """The int64 with the same 64 bits."""
    x &= _MASK
    return x - 2**64 if x >= 2**63 else x
