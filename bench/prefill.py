"""Prefill against the time its arithmetic takes at the machine's own rates, and what CAKE adds to it.

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
    cake = Engine.load(args.model, budget=args.budget, chunk=args.chunk)
    full = Engine.load(args.model, policy="full", chunk=args.chunk)
    config = cake.config
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes = [(queries + 2 * keys, config.hidden_size), (config.hidden_size, queries)]
    shapes += [(2 * config.intermediate_size, config.hidden_size), (config.hidden_size, config.intermediate_size)]
    for tokens in args.tokens:
        ids = torch.randint(0, config.vocab_size, (tokens,), generator=torch.Generator().manual_seed(0)).tolist()
        times: dict[str, list[float]] = {"cake": [], "full": []}
        products, attention = [], []
        read_once(full, ids[:600])
        read_once(cake, ids[:1200])  # long enough for everything that is loaded once
        for _ in range(args.rounds):
            products.append(show("products", matrix_rate(shapes, args.chunk), "GFLOP/s"))
            attention.append(
                show(
                    "attention",
                    attention_rate(config.num_heads, config.num_kv_heads, config.head_dim, tokens),
                    "GFLOP/s",
                )
            )
            for name, engine in (("full", full), ("cake", cake), ("full", full), ("cake", cake)):
                times[name].append(read_once(engine, ids))
        layers = config.num_layers - 1
        flops = layers * sum(2 * a * b for a, b in shapes) * tokens + 2 * 2 * keys * config.hidden_size * tokens
        spread = layers * 2 * queries * tokens * tokens
        ceiling = flops / max(products) / 1e9 + spread / max(attention) / 1e9
        medians = {name: float(np.median(found)) for name, found in times.items()}
        report(
            "prefill",
            f"{tokens:,} tokens, full cache",
            tokens / medians["full"],
            "tok/s",
            tokens / ceiling,
            products_gflop_s=max(products),
            attention_gflop_s=max(attention),
        )
        pairs = [a / b for a, b in zip(times["cake"], times["full"], strict=True)]
        report(
            "prefill",
            f"{tokens:,} tokens, time with CAKE {args.budget} over time with everything kept",
            float(np.median(pairs)),
            "x",
            1.0,
            cake_s=medians["cake"],
            full_s=medians["full"],
        )


if __name__ == "__main__":
    main()
