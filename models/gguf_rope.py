"""Rope scaling of a GGUF (metadata and the rope_freqs tensor) as a Hugging Face `rope_scaling` entry."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..errors import UnsupportedModel
from .gguf_file import GgufFile

_TOLERANCE = 1e-5  # of a factor; the tensor is fp32


def rope_scaling(file: GgufFile, head_dim: int) -> dict[str, Any] | None:
    """`rope_scaling` for config.json, or None. Raises UnsupportedModel for a scaling that cannot be expressed."""
    architecture = file.architecture
    kind = file.get("{arch}.rope.scaling.type", "none")
    factor = float(file.get("{arch}.rope.scaling.factor", file.get("{arch}.rope.scale_linear", 0.0)) or 0.0)
    if kind == "none" and "{arch}.rope.scaling.type".replace("{arch}", architecture) not in file.metadata and factor:
        kind = "linear"  # files from before the type was written
    for name in ("rope_factors_long.weight", "rope_factors_short.weight"):
        if name in file.tensors:
            raise UnsupportedModel(f"{file.path}: tensor {name} (longrope scaling) is not supported by the import")
    if "rope_freqs.weight" in file.tensors:
        if kind != "none":
            raise UnsupportedModel(f"{file.path}: {architecture}.rope.scaling.type = {kind!r} together with rope_freqs")
        return _from_factors(file, head_dim)
    if kind == "none" or factor in (0.0, 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return _yarn(file, factor)
    raise UnsupportedModel(f"{file.path}: {architecture}.rope.scaling.type = {kind!r} is not supported")


def _yarn(file: GgufFile, factor: float) -> dict[str, Any]:
    if file.get("{arch}.rope.scaling.yarn_log_multiplier", 0.0):
        raise UnsupportedModel(f"{file.path}: {file.architecture}.rope.scaling.yarn_log_multiplier is not supported")
    if file.get("{arch}.rope.scaling.yarn_ext_factor", 1.0) not in (1.0, -1.0):
        raise UnsupportedModel(f"{file.path}: {file.architecture}.rope.scaling.yarn_ext_factor is not supported")
    context = int(file.get("{arch}.context_length"))
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": int(
            file.get("{arch}.rope.scaling.original_context_length", round(context / factor))
        ),
    }
    attention = float(
        file.get("{arch}.rope.scaling.yarn_attn_factor", file.get("{arch}.rope.scaling.attn_factor", 1.0))
    )
    if attention != 1.0:  # llama.cpp multiplies its own 0.1 ln(factor) + 1 by this
        scaling["attention_factor"] = attention * (0.1 * math.log(factor) + 1.0)
    for name in ("beta_fast", "beta_slow"):
        value = file.get(f"{{arch}}.rope.scaling.yarn_{name}")
        if value is not None:
            scaling[name] = float(value)
    return scaling


def _from_factors(file: GgufFile, head_dim: int) -> dict[str, Any] | None:
    """The llama3 (or linear) scaling whose frequency divisors are the tensor `rope_freqs.weight`."""
    factors = file.tensors["rope_freqs.weight"].dequantised().astype(np.float64).reshape(-1)  # [head_dim / 2]
    if len(factors) == head_dim // 2 and np.isfinite(factors).all() and (factors >= 1 - _TOLERANCE).all():
        factor = _clean(float(factors.max()))
        if np.allclose(factors, factor, rtol=_TOLERANCE):
            return None if factor == 1.0 else {"rope_type": "linear", "factor": factor}
        theta = float(file.get("{arch}.rope.freq_base", 10000.0))
        per_token = theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)  # turns per token
        original = file.get("{arch}.rope.scaling.original_context_length")
        for candidate in _llama3_candidates(factors, factor, per_token, original):
            if np.allclose(_llama3_factors(candidate, per_token), factors, rtol=_TOLERANCE):
                return candidate
    raise UnsupportedModel(f"{file.path}: tensor rope_freqs.weight is no llama3 scaling, and no other is supported")


def _llama3_candidates(
    factors: np.ndarray[Any, Any], factor: float, per_token: np.ndarray[Any, Any], original: int | None
) -> list[dict[str, Any]]:
    """Parameters to try: those of the released Llamas first, then what a straight line through the middle says.

    Between the two borders 1/f is linear in the turns over the original context, so that original/low and
    original/high follow from two points; only these ratios matter, and low is taken as 1.
    """
    triples = [(1.0, 4.0, float(original or 8192))]
    middle = (factors > 1 + _TOLERANCE) & (factors < factor * (1 - _TOLERANCE))
    if middle.sum() >= 2:
        smooth = (1 / factors[middle] - 1 / factor) / (1 - 1 / factor)
        slope, intercept = np.polyfit(per_token[middle], smooth, 1)
        if slope > 0 and intercept < 0:
            high, context = 1 - 1 / intercept, -slope / intercept
            triples.append((1.0, _clean(float(high)), float(round(context))))
    return [
        {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": int(context),
        }
        for low, high, context in triples
    ]


def _llama3_factors(scaling: dict[str, Any], per_token: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """What llama.cpp's converter writes into rope_freqs for these parameters: the divisor of each frequency."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = per_token * scaling["original_max_position_embeddings"]
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return np.asarray(1 / ((1 - smooth) / factor + smooth))


def _clean(value: float) -> float:
    """The nearest whole number if `value` is one up to rounding."""
    return float(round(value)) if abs(value - round(value)) <= _TOLERANCE * abs(value) else value
