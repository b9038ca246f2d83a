"""A prompt's prefill in pieces (--stream-prefill) against that of the whole, in turns.

    python bench/pieces.py --tokens 7800 --pieces 1024 2048

Attention over a whole prompt grows with the square of its length, over a piece and the kept rows before it, it does
not. There is no ceiling but the whole itself: below 1 pieces are faster.
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
from cake_infer.engine.pieces import ListedPieces
from cake_infer.engine.piecewise import read_pieces
from cake_infer.engine.sequence import Sequence
from cake_infer.engine.timing import Timing
from report import report

REPLY = 512


def whole(engine: Engine, ids: list[int]) -> float:
    """Seconds of a prefill, with room for a reply."""
    runner, sequence = engine.runner, Sequence()
    limit = runner.prepare(sequence, len(ids), REPLY)
    start = time.perf_counter()
    runner.feed(sequence, ids, limit)
    return time.perf_counter() - start


def in_pieces(engine: Engine, ids: list[int], size: int) -> float:
    """Seconds of the same in pieces of `size` tokens."""
    timing = Timing()
    read_pieces(engine.runner, Sequence(), ListedPieces(ids, size), REPLY, timing=timing)
    return timing.prefill_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, nargs="+", default=[7800])
    parser.add_argument("--pieces", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--policy", default="cake")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with Engine.load(args.model, policy=args.policy, budget=args.budget) as engine:
        for tokens in args.tokens:
            generator = torch.Generator().manual_seed(0)
            ids = torch.randint(0, engine.config.vocab_size, (tokens,), generator=generator).tolist()
            whole(engine, ids[: 2 * args.budget])  # what is loaded and compiled once
            times: dict[int, list[float]] = {size: [] for size in (0, *args.pieces)}
            for _ in range(args.rounds):
                for size in times:
                    times[size].append(in_pieces(engine, ids, size) if size else whole(engine, ids))
            median = {size: float(np.median(found)) for size, found in times.items()}
            for size in args.pieces:
                report(
                    "pieces",
                    f"{tokens:,} tokens, {args.policy} {args.budget}, in pieces of {size:,} over the whole",
                    median[size] / median[0],
                    "x",
                    1.0,
                    pieces_s=median[size],
                    whole_s=median[0],
                )


if __name__ == "__main__":
    main()
