"""The matrix products of a decode step by the engine's own kernel, beside the library's: right, and how fast."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from setting import Check, free, sync
from torch import Tensor

CLOSE = {torch.float32: 3e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
CACHE = 200 << 20  # bytes of matrices between two uses of one: more than a GPU's cache holds


def products(check: Check) -> None:
    """Every matrix of a large model with 1, 4 and 8 tokens: bytes a second, and the library's time over ours."""
    dtype, ours, theirs = getattr(torch, check.scale.dtype), 0.0, 0.0
    for name, (rows, columns) in _matrices(check).items():
        with check.attempt(name):
            count = 1 if check.scale.dry else max(2, -(-CACHE // (rows * columns * dtype.itemsize)))
            spread = columns**-0.5
            weights = [torch.randn(rows, columns, device=check.device).to(dtype) * spread for _ in range(count)]
            for tokens in (1,) if check.scale.dry else (1, 4, 8):
                own, library = _both(check, f"{name}, {tokens} tokens", weights, tokens)
                if tokens == 1:
                    ours, theirs = ours + own, theirs + library
            del weights
        free()
    ratio = theirs / ours if ours else math.nan
    check.measured("all, 1 token: ours over the library's", ratio, "x", "at least 1", ratio >= 1)


def _matrices(check: Check) -> dict[str, tuple[int, int]]:
    shape: dict[str, Any] = check.scale.large
    width, mlp, dim = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    return {
        "qkv": ((heads + 2 * kv_heads) * dim, width),
        "o": (width, heads * dim),
        "gate, up": (2 * mlp, width),
        "down": (width, mlp),
        "head": (shape["vocab_size"], width),
    }


def _both(check: Check, name: str, weights: list[Tensor], tokens: int) -> tuple[float, float]:
    """Seconds of one product by our kernel and by the library."""
    from cake_infer.engine.few_products import product

    x = torch.randn(tokens, weights[0].shape[1], device=check.device).to(weights[0].dtype)
    wanted = x.double() @ weights[0].double().T
    error = float((product(x, weights[0]).double() - wanted).norm() / wanted.norm())
    bar = CLOSE[x.dtype]
    check.tell(f"{name}: error", error, "", f"at most {bar:g}", error <= bar)
    del wanted
    ours = _seconds(check, lambda weight: product(x, weight), weights)
    theirs = _seconds(check, lambda weight: F.linear(x, weight), weights)
    check.tell(f"{name}: ours", weights[0].nbytes / ours / 1e9, "GB/s")
    check.tell(f"{name}: ours over the library's", theirs / ours, "x")
    return ours, theirs


def _seconds(check: Check, work: Callable[[Tensor], Tensor], weights: list[Tensor]) -> float:
    """Of one call, as a graph launches them: one after another over all the matrices, several times."""
    with torch.inference_mode():
        work(weights[0])
        replay = _captured(work, weights) if check.device.type == "cuda" else lambda: [work(one) for one in weights]
        times, best = 1 if check.scale.dry else 20, math.inf
        for _ in range(1 if check.scale.dry else 3):
            sync()
            started = time.perf_counter()
            for _ in range(times):
                replay()
            sync()
            best = min(best, (time.perf_counter() - started) / times / len(weights))
    return best


def _captured(work: Callable[[Tensor], Tensor], weights: list[Tensor]) -> Callable[[], None]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for weight in weights:
            work(weight)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            work(weight)
    replay: Callable[[], None] = graph.replay
    return replay
