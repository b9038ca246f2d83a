"""Decode steps a second of the compiled step, against the time it takes to read the bytes of a step.

    python bench/decode.py                                        # formats, prompt lengths and budgets of the README
    python bench/decode.py --weights int8 --prompt 7800 --budget 512
    python bench/decode.py --batch 1 2 4 8                        # several sequences together
    python bench/decode.py --kv-bits 16 8 4 2                     # the full cache of a long prompt, packed and not

A step reads every weight once and every kept key and value once; the ceiling is those bytes over the bandwidth that the
same process measures right before and after (see ceilings.py); shares are medians over the rounds. Prompts are random
ids: speed does not depend on them.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from cake_infer import Engine, GenerationConfig
from cake_infer.cache.layout import kept_bytes
from cake_infer.engine.batch import Batch
from cake_infer.engine.generation import resolve_generation
from cake_infer.engine.sequence import Sequence
from ceilings import read_bandwidth, show
from report import report

CASES = (
    # weights, prompt tokens, budget (0: everything)
    ("bfloat16", 100, 512),
    ("int8", 100, 512),
    ("int4", 100, 512),
    ("int8", 1000, 512),
    ("int8", 7800, 512),
    ("int8", 7800, 0),
)


def time_steps(engine: Engine, prompt: int, steps: int) -> tuple[np.ndarray, int]:
    """Seconds of each step after a prefill, and the bytes of keys and values that a step reads."""
    runner, sequence = engine.runner, Sequence()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, engine.config.vocab_size, (prompt,), generator=generator).tolist()
    runner.feed(sequence, ids, runner.prepare(sequence, prompt, steps + 8))
    arena, window = runner.tenancy.arena, runner.cache.window
    times = []
    for index in range(steps + 8):
        start = time.perf_counter()
        runner.step(arena, sequence, index, window=window)
        times.append(time.perf_counter() - start)
    return np.array(times[8:]), sum(kept_bytes(runner.layout, int(held)) for held in arena.held.flat)


def time_batch(engine: Engine, prompt: int, size: int, steps: int) -> float:
    """Median seconds of a step that feeds one token to each of `size` sequences."""
    resolved = resolve_generation(GenerationConfig(max_new_tokens=steps + 8, temperature=0.0), None)
    generator = torch.Generator().manual_seed(0)
    with Batch(engine.runner, most=size) as batch:
        for _ in range(size):
            ids = torch.randint(0, engine.config.vocab_size, (prompt,), generator=generator).tolist()
            batch.join(Sequence(), ids, resolved)
        batch.read()
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            batch.step()
            times.append(time.perf_counter() - start)
    return float(np.median(times[8:]))


def run_batches(args: argparse.Namespace) -> None:
    """Tokens a second of batches of growing size, beside one sequence."""
    for weights in ("int8", "bfloat16"):
        how = {"quant": "int8"} if weights == "int8" else {}
        engine = Engine.load(args.model, threads=args.threads, step="compiled", budget=512, **how)
        times: dict[int, list[float]] = {size: [] for size in args.batch}
        for _ in range(args.rounds):
            for size in args.batch:
                times[size].append(time_batch(engine, args.prompt or 1000, size, args.steps))
        rates = {size: size / float(np.median(found)) for size, found in times.items()}
        for size, rate in rates.items():
            name = f"{weights} weights, prompt {args.prompt or 1000:,}, budget 512, {size} sequences"
            report("decode", name, rate, "tok/s", None, {"one sequence": rates[args.batch[0]]})


def run_bits(args: argparse.Namespace) -> None:
    """Tokens a second over the full cache of a long prompt, by the bits of what is kept outside of the window."""
    prompt, weights = args.prompt or 7800, args.weights or "int8"
    how = {"quant": weights} if weights.startswith("int") else {"dtype": None if weights == "bfloat16" else weights}
    engines = {
        bits: Engine.load(
            args.model,
            threads=args.threads,
            step="compiled",
            policy="full",
            kv_bits=None if bits == 16 else bits,
            **how,
        )
        for bits in args.kv_bits
    }
    times: dict[int, list[float]] = {bits: [] for bits in engines}
    shares: dict[int, list[float]] = {bits: [] for bits in engines}
    read: dict[int, int] = {}
    for _ in range(args.rounds):
        for bits, engine in engines.items():
            before = max(read_bandwidth(256 << 20).values())
            found, kv = time_steps(engine, prompt, args.steps)
            bandwidth = max(before, *read_bandwidth(256 << 20).values())
            read[bits] = engine.runner.decoder.nbytes + kv
            times[bits].append(float(np.median(found)))
            shares[bits].append(read[bits] / times[bits][-1] / (bandwidth * 1e9))
    first = float(np.median(times[args.kv_bits[0]]))
    for bits in engines:
        seconds, share = float(np.median(times[bits])), float(np.median(shares[bits]))
        report(
            "decode",
            f"{weights} weights, prompt {prompt:,}, full cache in {bits} bits",
            1 / seconds,
            "tok/s",
            1 / seconds / share,
            {f"{args.kv_bits[0]} bits": 1 / first},
            bytes_per_token=read[bits],
            ms_per_token=seconds * 1e3,
            threads=args.threads,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--weights", choices=("float32", "bfloat16", "int8", "int4"))
    parser.add_argument("--prompt", type=int)
    parser.add_argument("--budget", type=int, default=512, help="0 keeps everything")
    parser.add_argument("--policy", default="auto", help="what keeps the budget (default auto)")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3, help="each case is measured so often, interleaved")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--batch",
        type=int,
        nargs="+",
        metavar="N",
        help="sequences decoded together; the first is what others are compared with",
    )
    parser.add_argument(
        "--kv-bits",
        type=int,
        nargs="+",
        choices=(16, 8, 4, 2),
        help="bits of kept keys and values (16: not packed); the first is what others are compared with",
    )
    args = parser.parse_args()
    if args.kv_bits:
        run_bits(args)
        return
    if args.batch:
        run_batches(args)
        return
    cases = CASES if args.prompt is None else ((args.weights or "int8", args.prompt, args.budget),)
    engines: dict[tuple[str, int], Engine] = {}
    medians: dict[tuple[str, int, int], list[float]] = {case: [] for case in cases}
    read: dict[tuple[str, int, int], int] = {}
    shares: dict[tuple[str, int, int], list[float]] = {case: [] for case in cases}
    bandwidths: dict[tuple[str, int, int], list[float]] = {case: [] for case in cases}
    for _ in range(args.rounds):
        for case in cases:
            weights, prompt, budget = case
            if (weights, budget) not in engines:
                cache = {"policy": args.policy, "budget": budget} if budget else {"policy": "full"}
                how = (
                    {"quant": weights}
                    if weights.startswith("int")
                    else {"dtype": None if weights == "bfloat16" else weights}
                )
                engines[weights, budget] = Engine.load(
                    args.model, threads=args.threads, step="compiled", **cache, **how
                )
            engine = engines[weights, budget]
            before = max(read_bandwidth(256 << 20).values())
            times, kv = time_steps(engine, prompt, args.steps)
            # beside what is measured, before and after: a shared machine's bandwidth moves by a third within minutes
            bandwidth = max(before, show("bandwidth", read_bandwidth(256 << 20), "GB/s"))
            read[case] = engine.runner.decoder.nbytes + kv
            medians[case].append(float(np.median(times)))
            bandwidths[case].append(bandwidth)
            shares[case].append(read[case] / medians[case][-1] / (bandwidth * 1e9))
    found: dict[tuple[str, int, int], float] = {}
    for case in cases:
        weights, prompt, budget = case
        found[case] = float(np.median(medians[case]))
        name = f"{weights} weights, prompt {prompt:,}, {f'{args.policy} {budget}' if budget else 'full cache'}"
        share = float(np.median(shares[case]))
        report(
            "decode",
            name,
            1 / found[case],
            "tok/s",
            1 / found[case] / share,
            bytes_per_token=read[case],
            bandwidth_gb_s=float(np.median(bandwidths[case])),
            ms_per_token=found[case] * 1e3,
            threads=args.threads,
        )
    short, long = ("int8", 1000, 512), ("int8", 7800, 512)
    if short in found and long in found:
        report("decode", "time per token, prompt 7,800 over 1,000, budget 512", found[long] / found[short], "x", 1.0)


if __name__ == "__main__":
    main()
