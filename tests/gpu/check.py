"""Whether the GPU path is right, and how fast: to be run once on a machine with a GPU, from a bare checkout.

    python tests/gpu/check.py                      everything, within 4 minutes on an H200
    python tests/gpu/check.py kernels ids          some parts
    python tests/gpu/check.py text --model DIR     a real model's text, on the GPU and on the CPU
    python tests/gpu/check.py --dry                every function at tiny shapes on a CPU, in Triton's interpreter

Installs and downloads nothing. Ends with a table and a line of JSON, with status 1 where something is wrong or a bar is
missed.
"""

from __future__ import annotations

import argparse
import sys
import time

from setting import DRY, GPU, Check, register, report, use_interpreter

PARTS = (
    "kernels",
    "ids",
    "batch",
    "families",
    "text",
    "launches",
    "bandwidth",
    "decode",
    "int8",
    "small",
    "prefill",
    "peers",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all of them without one")
    parser.add_argument("--dry", action="store_true", help="tiny shapes on a CPU: that everything runs, no figures")
    parser.add_argument("--model", metavar="DIR", help="a folder with a small real model, for the part text")
    parser.add_argument("--seconds", type=float, default=230.0, help="no part begins after this (230)")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.parts) - set(PARTS))
    if unknown:
        parser.error(f"no such part: {unknown[0]}; there are {', '.join(PARTS)}")
    if arguments.dry:
        use_interpreter()
    register()

    import torch

    if not arguments.dry and not torch.cuda.is_available():
        print("error: there is no CUDA device here; --dry runs the functions on a CPU", file=sys.stderr)
        return 1
    import right
    import speed

    torch.backends.cuda.matmul.allow_tf32 = False
    check, started = Check(DRY if arguments.dry else GPU, model=arguments.model), time.perf_counter()
    works = {**right.PARTS, **speed.PARTS}
    assert set(works) == set(PARTS)
    for part in PARTS:
        if arguments.parts and part not in arguments.parts:
            continue
        if time.perf_counter() - started > arguments.seconds:
            check.part = part
            check.tell("not run: out of time", "", ok=False)
            continue
        check.run(part, works[part])
    name = "cpu" if arguments.dry else torch.cuda.get_device_name()
    return report(check, time.perf_counter() - started, name)


if __name__ == "__main__":
    sys.exit(main())
