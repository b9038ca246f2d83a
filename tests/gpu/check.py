"""Whether the GPU path is right, and how fast: to be run once on a machine with a GPU, from a bare checkout.

    python tests/gpu/check.py                      everything, within 4 minutes on an H200
    python tests/gpu/check.py kernels ids          some parts
    python tests/gpu/check.py --out DIR/gpu.json   also written down there as it comes
    python tests/gpu/check.py text --model DIR     a real model's text: a model's folder, or a checkpoint of llama2.c
    python tests/gpu/check.py --dry                every function at tiny shapes on a CPU, in Triton's interpreter

Installs and downloads nothing. Every line is said on stderr as it is found; at the end there are a table and a line of
JSON, and the status is 1 where something is wrong or a bar is missed. The first five parts say whether what is worked
out is right, and run beside one another; the others are timed and run alone. What breaks a part loses nothing that
has been found, see lane.py. The bars:

    kernels, ids, batch, families, text     equal to torch, to the eager step, to each prompt alone, to the CPU
    decode      80% of what a copy moves, at batch 1 and a short context; at the longest one CAKE over everything kept
                as the bytes predict, within 10%, at batch 1 and 4
    peers       CAKE at batch 4 and the longest context at least 10 times transformers' full cache
    launches    one graph launch a token and no other, and no wait but for the token's copy
    small       graph over eager at least 2 for a model of 135M
    products    our kernel for a token's products right, and at least as fast as the library's
    prefill     CAKE at most 1.03 of everything kept; its arena and the peak at most what the design's formulas give
    int8        faster than bf16 at batch 1
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
import threading
import time
from pathlib import Path

from lane import Lane, child
from table import Table

RIGHT = (("kernels",), ("ids",), ("batch", "families", "text"))  # beside one another on a GPU: nothing is timed
TIMED = (
    "bandwidth",
    "decode",
    "peers",
    "launches",
    "small",
    "products",
    "prefill",
    "packed",
    "int8",
)  # most wanted first
PARTS = (*(part for lane in RIGHT for part in lane), *TIMED)
SECONDS = 230.0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all of them without one")
    parser.add_argument("--dry", action="store_true", help="tiny shapes on a CPU: that everything runs, no figures")
    parser.add_argument("--model", metavar="DIR", help="a folder with a small real model, for the part text")
    parser.add_argument("--out", metavar="FILE", type=Path, help="write what is found there, anew with every line")
    parser.add_argument(
        "--seconds", type=float, metavar="N", help=f"end what still runs then ({SECONDS:g}; dry: never)"
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.parts) - set(PARTS))
    if unknown:
        parser.error(f"no such part: {unknown[0]}; there are {', '.join(PARTS)}")
    if arguments.seconds is not None and not arguments.seconds > 0:
        parser.error("seconds is a number above 0")
    return arguments


def main() -> int:
    arguments = parse()
    if arguments.child:
        return child(arguments.parts, dry=arguments.dry, model=arguments.model)
    started = time.monotonic()
    seconds = arguments.seconds or (math.inf if arguments.dry else SECONDS)
    table = Table(PARTS, dry=arguments.dry, file=arguments.out)
    wanted = [part for part in PARTS if not arguments.parts or part in arguments.parts]
    lanes = [[part for part in lane if part in wanted] for lane in (*RIGHT, TIMED)]
    together, alone = [lane for lane in lanes[:-1] if lane], lanes[-1]
    if arguments.dry:  # one after another: what takes longest on a CPU is the start of a process
        together, alone = [], [part for lane in lanes for part in lane]
    options = ["--dry"] * arguments.dry + (["--model", arguments.model] if arguments.model else [])
    lock, limit = threading.Lock(), seconds if arguments.dry else 0.45 * seconds
    deadline = started + seconds
    running: list[Lane] = []

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    try:
        for lanes_now, until in ((together, started + 0.5 * seconds if alone else deadline), ([alone], deadline)):
            running = [
                Lane(parts, table, lock, limit=limit, deadline=until, options=options) for parts in lanes_now if parts
            ]
            for lane in running:
                lane.start()
            for lane in running:
                lane.over.wait()
            refused = [lane.refused for lane in running if lane.refused]
            if refused:
                print(f"error: {refused[0]}", file=sys.stderr)
                return 1
            table.seconds = time.monotonic() - started
    except KeyboardInterrupt:
        for lane in running:
            lane.end()
        for lane in running:
            lane.over.wait(5)
    table.seconds = time.monotonic() - started
    return table.report()


if __name__ == "__main__":
    sys.exit(main())
