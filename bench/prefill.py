"""Prefill against the time its arithmetic takes at the machine's own rates, and what CAKE and the default add to it.

    python bench/prefill.py

The ceiling adds the matrix products of every layer at the fp32 rate of their shapes to the causal attention at the rate
of torch's own kernel (ceilings.py). The last layer needs keys and values of all tokens and the rest of one.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from cake_infer import Engine
from cake_infer.engine.sequence import Sequence
from ceilings import attention_rate, matrix_rate, show
from report import report

POLICIES = ("cake", "auto")


def read_once(engine: Engine, ids: list[int]) -> float:
    """Seconds of one prefill, with room for a reply of 512 tokens, as the command makes it."""
    runner, sequence = engine.runner, Sequence()
    limit = runner.prepare(sequence, len(ids), 512)
    start = time.perf_counter()
    runner.feed(sequence, ids, limit)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2000, 7800])
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    evicting = {name: Engine.load(args.model, policy=name, budget=args.budget, chunk=args.chunk) for name in POLICIES}
    full = Engine.load(args.model, policy="full", chunk=args.chunk)
    config = full.config
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes = [(queries + 2 * keys, config.hidden_size), (config.hidden_size, queries)]
    shapes += [(2 * config.intermediate_size, config.hidden_size), (config.hidden_size, config.intermediate_size)]
    for tokens in args.tokens:
        ids = torch.randint(0, config.vocab_size, (tokens,), generator=torch.Generator().manual_seed(0)).tolist()
        times: dict[str, list[float]] = {name: [] for name in POLICIES}
        before: dict[str, list[float]] = {name: [] for name in POLICIES}  # with everything kept, right before each
        products, attention = [], []
        read_once(full, ids[:600])
        for engine in evicting.values():
            read_once(engine, ids[:1200])  # long enough for everything that is loaded once
        for _ in range(args.rounds):
            products.append(show("products", matrix_rate(shapes, args.chunk), "GFLOP/s"))
            attention.append(
                show(
                    "attention",
                    attention_rate(config.num_heads, config.num_kv_heads, config.head_dim, tokens),
                    "GFLOP/s",
                )
            )
            for _ in range(2):
                for name, engine in evicting.items():
                    before[name].append(read_once(full, ids))
                    times[name].append(read_once(engine, ids))
        layers = config.num_layers - 1
        flops = layers * sum(2 * a * b for a, b in shapes) * tokens + 2 * 2 * keys * config.hidden_size * tokens
        spread = layers * 2 * queries * tokens * tokens
        ceiling = flops / max(products) / 1e9 + spread / max(attention) / 1e9
        whole = float(np.median([seconds for found in before.values() for seconds in found]))
        report(
            "prefill",
            f"{tokens:,} tokens, full cache",
            tokens / whole,
            "tok/s",
            tokens / ceiling,
            products_gflop_s=max(products),
            attention_gflop_s=max(attention),
        )
        for name in POLICIES:
            report(
                "prefill",
                f"{tokens:,} tokens, time with {name} {args.budget} over time with everything kept",
                float(np.median([a / b for a, b in zip(times[name], before[name], strict=True)])),
                "x",
                1.0,
                evicting_s=float(np.median(times[name])),
                full_s=float(np.median(before[name])),
            )


if __name__ == "__main__":
    main()
