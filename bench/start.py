"""How long until something happens: `--help`, and the first token of a short prompt, beside the import of torch alone.

    python bench/start.py

Whole processes, in turn, caches warm; medians.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from report import report


def seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    run = [sys.executable, "-m", "cake_infer"]
    first = [*run, "--model", args.model, "--prompt-tokens", "100", "--quiet", "--max-tokens"]
    commands = {
        "import torch": [sys.executable, "-c", "import torch"],
        "--help": [*run, "--help"],
        "first token": [*first, "1"],
        "second token": [*first, "2"],
    }
    times: dict[str, list[float]] = {name: [] for name in commands}
    for command in commands.values():
        seconds(command)
    for _ in range(args.rounds):
        for name, command in commands.items():
            times[name].append(seconds(command))
    medians = {name: float(np.median(found)) for name, found in times.items()}
    report("start", "--help", medians["--help"], "s", 0.3)
    torch_s = medians["import torch"]
    for name in ("first token", "second token"):
        report(
            "start",
            f"{name} of a 100-token prompt, beyond the import of torch",
            medians[name] - torch_s,
            "s",
            1.5,
            import_torch_s=torch_s,
            whole_s=medians[name],
        )


if __name__ == "__main__":
    main()
