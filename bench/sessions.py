"""What a saved document saves: the time to the first token of a question, beside reading the document again.

    python bench/sessions.py --tokens 7800 --budget 1024

In one process the second question goes on from the rows in memory; a new process loads the model and the file. Beside
them the same prompt is read in one go, once in this process and in a new one. A new process is timed from its start to
its first token, and what it cannot do without is `import torch`. Random tokens; medians.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from report import report

QUESTION = 32  # tokens
CHILD = """
import sys
from cake_infer import Engine
with Engine.load(sys.argv[1], budget=int(sys.argv[2]), threads=int(sys.argv[3]) or None) as engine:
    ids = [int(token) for token in open(sys.argv[4]).read().split()]
    cache = engine.load_document(sys.argv[5]) if len(sys.argv) > 5 else None
    next(engine.stream(ids=ids, cache=cache, max_new_tokens=2, temperature=0.0))
    print("first", flush=True)
"""


def median(action, rounds: int) -> float:
    """Seconds of a call, the median of several after one that does not count."""
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return float(np.median(times[1:]))


def until_it_speaks(command: list[object]) -> float:
    """Seconds from the start of a process to its first line."""
    start = time.perf_counter()
    with subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = time.perf_counter() - start
    if not line or process.returncode != 0:
        raise SystemExit("a process ended without its first token")
    return seconds


def main() -> None:
    from cake_infer import Engine

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=7800)
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0, help="0: one per core")
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        Engine.load(args.model, budget=args.budget, threads=args.threads or None) as engine,
    ):
        ids = random.Random(0).choices(range(256, engine.config.vocab_size), k=args.tokens + QUESTION)
        document_ids, question = ids[: args.tokens], ids[args.tokens :]
        path = Path(folder) / "document.cake"
        document = engine.compress(ids=document_ids)
        document.save(path)

        def first_token(cache=None) -> None:
            stream = engine.stream(ids=question if cache else ids, cache=cache, max_new_tokens=2, temperature=0.0)
            next(stream)
            stream.close()

        name = f"{args.tokens} tokens, budget {args.budget}"
        again = median(lambda: first_token(document), args.rounds)
        start = time.perf_counter()
        first_token()
        fresh = time.perf_counter() - start
        report("sessions", f"first token of a second question, {name}", again, "s", None, {"read again": fresh})
        layout = engine.runner.layout
        slots = args.tokens * layout.num_layers * layout.num_kv_heads
        full = slots * 2 * layout.head_dim * layout.kv_dtype.itemsize
        report("sessions", f"file, {name}", path.stat().st_size, "bytes", document.nbytes, {"full cache": full})
        load = median(lambda: engine.load_document(path), args.rounds)
        report("sessions", f"loading the file, {name}", load, "s", None)

        whole, asked = Path(folder) / "whole.txt", Path(folder) / "question.txt"
        whole.write_text(" ".join(map(str, ids)))
        asked.write_text(" ".join(map(str, question)))
        child = [sys.executable, "-c", CHILD, args.model, args.budget, args.threads]
        torch_alone = until_it_speaks([sys.executable, "-c", "import torch; print()"])
        new = float(np.median([until_it_speaks([*child, asked, path]) for _ in range(args.rounds + 1)][1:]))
        fresh_process = until_it_speaks([*child, whole])
        report("sessions", f"the same from a new process, {name}", new, "s", torch_alone, {"read again": fresh_process})


if __name__ == "__main__":
    main()
