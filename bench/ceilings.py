"""What this machine can do at best: bytes read a second, fp32 multiplications and causal attention a second.

Each ceiling is the largest of three honest ways to measure it, with all threads and at the model's own shapes.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from torch.nn.functional import linear, scaled_dot_product_attention


def best_rate(run: Callable[[], object], amount: float, repeats: int = 5) -> float:
    """`amount` over the median time of a call, after one that is not counted."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return amount / float(np.median(times))


def read_bandwidth(nbytes: int) -> dict[str, float]:
    """GB/s at which `nbytes` of memory are read: torch's sum, a compiled sum, and the same asking for lines ahead."""
    from cake_infer.engine.kernels.arithmetic import prefetch
    from numba import njit, prange

    data = torch.ones(nbytes // 4, dtype=torch.float32)
    words = data.numpy().view(np.int64)
    threads = torch.get_num_threads()

    @njit(parallel=True)
    def plain(words: np.ndarray, parts: int) -> int:
        total = 0
        for part in prange(parts):
            own = np.int64(0)
            for i in range(len(words) * part // parts, len(words) * (part + 1) // parts):
                own += words[i]
            total += own
        return total

    @njit(parallel=True)
    def ahead(words: np.ndarray, address: int, parts: int) -> int:
        total = 0
        for part in prange(parts):
            own = np.int64(0)
            for block in range(len(words) * part // parts // 64, len(words) * (part + 1) // parts // 64):
                for line in range(8):
                    prefetch(address + block * 512 + 4096 + line * 64)
                for i in range(block * 64, block * 64 + 64):
                    own += words[i]
            total += own
        return total

    return {
        "torch sum": best_rate(lambda: data.sum(), nbytes / 1e9),
        "compiled sum": best_rate(lambda: plain(words, threads), nbytes / 1e9),
        "compiled sum, prefetched": best_rate(lambda: ahead(words, words.ctypes.data, threads), nbytes / 1e9),
    }


def matrix_rate(shapes: list[tuple[int, int]], rows: int) -> dict[str, float]:
    """fp32 GFLOP/s over weight shapes `[out, in]`: linear, matrix product with the result in place, and one fused."""
    weights = [torch.randn(shape) for shape in shapes]
    inputs = [torch.randn(rows, shape[1]) for shape in shapes]
    outputs = [torch.empty(rows, shape[0]) for shape in shapes]
    flops = sum(2.0 * rows * a * b for a, b in shapes) / 1e9
    columns = max(shape[1] for shape in shapes)
    wide = torch.randn(sum(a * b for a, b in shapes) // columns, columns)
    wide_input = torch.randn(rows, columns)

    def in_place() -> None:
        for x, weight, out in zip(inputs, weights, outputs, strict=True):
            torch.mm(x, weight.t(), out=out)

    return {
        "linear": best_rate(lambda: [linear(x, weight) for x, weight in zip(inputs, weights, strict=True)], flops),
        "mm into place": best_rate(in_place, flops),
        "one product of that size": best_rate(lambda: linear(wide_input, wide), 2.0 * rows * wide.numel() / 1e9),
    }


def attention_rate(heads: int, kv_heads: int, head_dim: int, tokens: int) -> dict[str, float]:
    """GFLOP/s of fp32 causal attention over a whole prompt, counting the lower triangle alone."""
    queries = torch.randn(1, heads, tokens, head_dim)
    keys, values = (torch.randn(1, kv_heads, tokens, head_dim) for _ in range(2))
    wide = [t.repeat_interleave(heads // kv_heads, dim=1) for t in (keys, values)]
    expanded = [
        t[:, :, None].expand(1, kv_heads, heads // kv_heads, tokens, head_dim).reshape(queries.shape)
        for t in (keys, values)
    ]
    flops = 2.0 * heads * tokens * tokens * head_dim / 1e9

    def grouped() -> object:
        return scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)

    return {
        "sdpa, repeated keys": best_rate(
            lambda: scaled_dot_product_attention(queries, *wide, is_causal=True), flops, 3
        ),
        "sdpa, expanded keys": best_rate(
            lambda: scaled_dot_product_attention(queries, *expanded, is_causal=True), flops, 3
        ),
        "sdpa, grouped": best_rate(grouped, flops, 3),
    }


def show(name: str, rates: dict[str, float], unit: str) -> float:
    """Print the ways and return the best."""
    print(f"{name}: " + ", ".join(f"{way} {rate:.1f}" for way, rate in rates.items()) + f" {unit}")
    return max(rates.values())
