"""A prompt's prefill in pieces (--stream-prefill) against that of the whole, and what a text without end takes.

    python bench/pieces.py --tokens 7800 --pieces 1024 2048        # seconds, in turns
    python bench/pieces.py --long 100000 --text one.txt two.txt    # memory and seconds as the text goes on

Attention over a whole prompt grows with the square of its length, over a piece and the kept rows before it, it does
not. There is no ceiling but the whole itself: below 1 pieces are faster. Seconds of the clock and of the CPU are told.

A long text is read from files, from their beginning again where they are too short (this project's documents, where
none are given), with frequencies stretched by --rope-scaling. At every 10,000 tokens a line says what the arena takes,
and how far resident memory has been above what it was before the text, with every page of the weights resident; see
`memory.py`. The figure is the most at the end over the most at the first line: 1 where nothing grows. What pieces cost
in fidelity `cake-infer eval fidelity --policy cake cake,pieces=2048` tells.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from cake_infer import Engine
from cake_infer.engine.pieces import ListedPieces, Pieces, TextPieces
from cake_infer.engine.piecewise import read_pieces
from cake_infer.engine.sequence import Sequence
from cake_infer.engine.timing import Timing
from memory import Peak, Run, touch, warm_ours
from report import report

REPLY = 512
EVERY = 10_000  # tokens between two lines of a long text
PART = 5_000  # characters that a text comes in
MIB = 2**20
DOCUMENTS = Path(__file__).resolve().parent.parent / "docs"


def seconds(run: Callable[[], object]) -> tuple[float, float]:
    """Of the clock and of the CPU."""
    clock, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - clock, time.process_time() - cpu


def whole(engine: Engine, ids: list[int]) -> tuple[float, float]:
    """Seconds of a prefill, with room for a reply."""
    sequence = Sequence()
    limit = engine.runner.prepare(sequence, len(ids), REPLY)
    return seconds(lambda: engine.runner.feed(sequence, ids, limit))


def in_pieces(engine: Engine, ids: list[int], size: int) -> tuple[float, float]:
    """Seconds of the same in pieces of `size` tokens."""
    return seconds(lambda: read_pieces(engine.runner, Sequence(), ListedPieces(ids, size), REPLY, timing=Timing()))


def time_pieces(args: argparse.Namespace) -> None:
    """Whole and pieces in turns."""
    with Engine.load(args.model, policy=args.policy, budget=args.budget, threads=args.threads) as engine:
        for tokens in args.tokens:
            generator = torch.Generator().manual_seed(0)
            ids = torch.randint(0, engine.config.vocab_size, (tokens,), generator=generator).tolist()
            whole(engine, ids[: 2 * args.budget])  # what is loaded and compiled once
            found: dict[int, list[tuple[float, float]]] = {size: [] for size in (0, *args.pieces)}
            for _ in range(args.rounds):
                for size, times in found.items():
                    times.append(in_pieces(engine, ids, size) if size else whole(engine, ids))
            clock, cpu = (
                {size: float(np.median([one[i] for one in times])) for size, times in found.items()} for i in range(2)
            )
            for size in args.pieces:
                report(
                    "pieces",
                    f"{tokens:,} tokens, {args.policy} {args.budget}, in pieces of {size:,} over the whole",
                    clock[size] / clock[0],
                    "x",
                    1.0,
                    pieces_s=clock[size],
                    whole_s=clock[0],
                    pieces_cpu_s=cpu[size],
                    whole_cpu_s=cpu[0],
                    cpu_ratio=cpu[size] / cpu[0],
                    threads=torch.get_num_threads(),
                )


class FirstTokens(Pieces):
    """Pieces of the first `count` tokens of others."""

    def __init__(self, pieces: Pieces, count: int) -> None:
        super().__init__(pieces.size)
        self._pieces, self._count = pieces, count

    def __iter__(self) -> Iterator[list[int]]:
        left = self._count
        for piece in self._pieces:
            yield piece[:left]
            left -= len(piece)
            if left <= 0:
                return


def endless(files: list[Path]) -> Iterator[tuple[str, tuple[()]]]:
    """The texts of files, again and again, in parts."""
    while True:
        for file in files:
            with file.open(encoding="utf-8", errors="replace") as text:
                while part := text.read(PART):
                    yield part, ()


def read_long(args: argparse.Namespace) -> None:
    """One long text in pieces, a line at every 10,000 tokens."""
    warm_ours(Run("cake", args.model, 0, 0, args.budget, 512, args.threads))
    size = max(args.pieces)
    files = [Path(name) for name in args.text] or [DOCUMENTS.parent / "README.md", *sorted(DOCUMENTS.glob("*.md"))]
    with Engine.load(
        args.model,
        policy=args.policy,
        budget=args.budget,
        threads=args.threads,
        rope_scaling=args.rope_scaling,
        device="cpu",
    ) as engine:
        runner = engine.runner
        decoder = runner.decoder
        tensors = [tensor for layer in decoder.layers for _, tensor in layer.named_tensors()]
        touch([decoder.embed_tokens, decoder.lm_head, *tensors])
        pieces = FirstTokens(TextPieces(engine.text_tokenizer(), endless(files), size), args.long)
        peak, start, cpu = Peak(), time.perf_counter(), time.process_time()
        lines: list[dict[str, float]] = []
        print(
            f"{'tokens':>10} {'clock (s)':>10} {'CPU (s)':>10} {'arena (MiB)':>12} {'above weights (MiB)':>20}",
            flush=True,
        )

        def tell(done: int, _total: int | None) -> None:
            if done < min((len(lines) + 1) * EVERY, args.long):
                return
            line = {
                "tokens": done,
                "s": time.perf_counter() - start,
                "cpu_s": time.process_time() - cpu,
                "arena": runner.tenancy.arena.nbytes / MIB,
                "above": peak.above() / MIB,
            }
            lines.append(line)
            print("{tokens:>10,} {s:>10.1f} {cpu_s:>10.1f} {arena:>12.1f} {above:>20.1f}".format(**line), flush=True)

        read_pieces(runner, Sequence(), pieces, REPLY, timing=Timing(), on_tokens=tell)
    report(
        "pieces",
        f"{args.long:,} tokens, {args.policy} {args.budget}, pieces of {size:,}: memory at the end over the first line",
        lines[-1]["above"] / lines[0]["above"],
        "x",
        1.0,
        lines=lines,
        threads=torch.get_num_threads(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, nargs="+", default=[7800])
    parser.add_argument("--pieces", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--policy", default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, help="default all cores")
    parser.add_argument("--long", type=int, metavar="N", help="one text of N tokens instead, in the largest pieces")
    parser.add_argument("--text", nargs="*", default=[], metavar="FILE", help="of which the long text is made")
    parser.add_argument("--rope-scaling", default="yarn:16", help="for the long text (default yarn:16)")
    args = parser.parse_args()
    if args.long:
        read_long(args)
    else:
        time_pieces(args)


if __name__ == "__main__":
    main()
