"""The engines people would use instead, on the same weights, ids and threads, warm and in turn.

    python bench/peers.py --gguf MODEL.gguf --tokens 100 2000 7800 \
        --python llama.cpp=/path/to/venv/bin/python --python openvino=/path/to/venv/bin/python

Peers that are not installed (in this environment, or in the one named for them) are left out. transformers reads the
safetensors in fp32 with its full cache; llama.cpp and OpenVINO GenAI read the GGUF file. Each measurement is a process
of its own that runs a short prompt first; the rounds are interleaved, and medians are compared.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

STEPS = 32
ENGINES = (
    "cake",
    "cake full cache",
    "transformers",
    "llama.cpp",
    "llama.cpp flash attention",
    "openvino",
    "openvino eviction",
)


def ids_of(count: int) -> list[int]:
    """The same pseudo-random ids in every process."""
    state, ids = 1, []
    for _ in range(count):
        state = (state * 1103515245 + 12345) % 2**31
        ids.append(100 + state % 40000)
    return ids


def run_cake(args: argparse.Namespace, count: int, full: bool) -> tuple[float, float]:
    from cake_infer import Engine
    from cake_infer.engine.sequence import Sequence

    cache: dict[str, Any] = {"policy": "full"} if full else {"budget": args.budget}
    engine = Engine.load(args.model, threads=args.threads, quant="int8", **cache)
    runner = engine.runner

    def measure(ids: list[int]) -> tuple[float, float]:
        sequence = Sequence()
        limit = runner.prepare(sequence, len(ids), STEPS + 2)
        start = time.perf_counter()
        runner.feed(sequence, ids, limit)
        prefill = time.perf_counter() - start
        runner.step(runner.tenancy.arena, sequence, 1000, window=runner.cache.window)
        start = time.perf_counter()
        for index in range(STEPS):
            runner.step(runner.tenancy.arena, sequence, 1000 + index, window=runner.cache.window)
        return prefill, time.perf_counter() - start

    measure(ids_of(min(count, 1200)))  # long enough for everything that is compiled or loaded once
    return measure(ids_of(count))


def run_transformers(args: argparse.Namespace, count: int) -> tuple[float, float]:
    import torch
    from cake_infer.models.hub import resolve_model
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(resolve_model(args.model), dtype=torch.float32).eval()

    @torch.inference_mode()
    def measure(ids: list[int], steps: int) -> tuple[float, float]:
        start = time.perf_counter()
        out = model(torch.tensor([ids]), use_cache=True, logits_to_keep=1)
        prefill = time.perf_counter() - start
        start = time.perf_counter()
        for index in range(steps):
            model(torch.tensor([[1000 + index]]), past_key_values=out.past_key_values, use_cache=True)
        return prefill, (time.perf_counter() - start) * STEPS / steps

    measure(ids_of(64), 2)
    return measure(ids_of(count), 12)


def run_llama(args: argparse.Namespace, count: int, flash: bool) -> tuple[float, float]:
    import llama_cpp.llama
    from llama_cpp import Llama

    if args.plain_buffers:
        defaults = llama_cpp.llama.llama_cpp.llama_model_default_params

        def without_extra_buffers() -> Any:
            params = defaults()
            params.use_extra_bufts = False
            return params

        llama_cpp.llama.llama_cpp.llama_model_default_params = without_extra_buffers
    model = Llama(
        args.gguf,
        n_ctx=count + 128,
        n_threads=args.threads,
        n_threads_batch=args.threads,
        n_batch=512,
        flash_attn=flash,
        verbose=False,
    )

    def measure(ids: list[int]) -> tuple[float, float]:
        model.reset()
        start = time.perf_counter()
        model.eval(ids)
        prefill = time.perf_counter() - start
        start = time.perf_counter()
        for index in range(STEPS):
            model.eval([1000 + index])
        return prefill, time.perf_counter() - start

    measure(ids_of(64))
    return measure(ids_of(count))


def run_openvino(args: argparse.Namespace, count: int, evict: bool) -> tuple[float, float]:
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 2
    scheduler.enable_prefix_caching = False
    if evict:
        scheduler.use_cache_eviction = True
        scheduler.cache_eviction_config = genai.CacheEvictionConfig(
            start_size=32, recent_size=128, max_cache_size=672, aggregation_mode=genai.AggregationMode.NORM_SUM
        )
    pipe = genai.LLMPipeline(args.gguf, "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=args.threads)
    config = genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.apply_chat_template = STEPS + 1, True, False

    def measure(ids: list[int]) -> tuple[float, float]:
        inputs = genai.TokenizedInputs(
            ov.Tensor(np.array([ids], dtype=np.int64)), ov.Tensor(np.ones((1, len(ids)), dtype=np.int64))
        )
        metrics = pipe.generate(inputs, config).perf_metrics
        return metrics.get_ttft().mean / 1e3, metrics.get_tpot().mean / 1e3 * STEPS

    measure(ids_of(64))
    return measure(ids_of(count))


def child(args: argparse.Namespace) -> None:
    """Measure one engine at one length and print `{prefill_s, decode_s}`."""
    count = args.tokens[0]
    runs = {
        "cake": lambda: run_cake(args, count, False),
        "cake full cache": lambda: run_cake(args, count, True),
        "transformers": lambda: run_transformers(args, count),
        "llama.cpp": lambda: run_llama(args, count, False),
        "llama.cpp flash attention": lambda: run_llama(args, count, True),
        "openvino": lambda: run_openvino(args, count, False),
        "openvino eviction": lambda: run_openvino(args, count, True),
    }
    prefill, decode = runs[args.child]()
    print(json.dumps({"prefill_s": prefill, "decode_s": decode}))


def measured(
    engine: str, tokens: int, args: argparse.Namespace, pythons: dict[str, str], plain: set[str]
) -> dict[str, float] | None:
    """One measurement in a process of its own; None, with the reason, where the engine cannot run.

    plain: engines that are to run without extra buffers, added to where one has crashed with them.
    """
    python = pythons.get(engine.split()[0], sys.executable)
    command = [python, __file__, "--child", engine, "--tokens", str(tokens), "--threads", str(args.threads)]
    command += ["--model", args.model, "--budget", str(args.budget)]
    command += ["--gguf", str(args.gguf)] if args.gguf else []
    command += ["--plain-buffers"] if engine in plain else []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode < 0 and engine.startswith("llama.cpp") and engine not in plain:
        # its AMX buffers end with an illegal instruction where a virtual machine has AMX but does not grant it
        print(f"{engine} was killed by signal {-done.returncode}: measured without its extra buffers", file=sys.stderr)
        plain.add(engine)
        return measured(engine, tokens, args, pythons, plain)
    if done.returncode:
        reason = (done.stderr.strip() or f"exit {done.returncode} without a message").splitlines()[-1]
        print(f"{engine} at {tokens:,} tokens is left out: {reason}", file=sys.stderr)
        return None
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--gguf")
    parser.add_argument("--tokens", type=int, nargs="+", default=[100, 2000, 7800])
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--plain-buffers", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--child", choices=ENGINES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args)
        return
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from statistics import median

    from report import report

    pythons = dict(entry.split("=", 1) for entry in args.python)
    absent: set[str] = set()
    plain: set[str] = set()
    for tokens in args.tokens:
        times: dict[str, list[dict[str, float]]] = {}
        for _ in range(args.rounds):
            for engine in args.engines:
                if engine in absent:
                    continue
                found = measured(engine, tokens, args, pythons, plain)
                if found is None:
                    absent.add(engine)
                else:
                    times.setdefault(engine, []).append(found)
        prefill = {name: tokens / median(run["prefill_s"] for run in runs) for name, runs in times.items()}
        decode = {name: STEPS / median(run["decode_s"] for run in runs) for name, runs in times.items()}
        for what, rates in (("prefill", prefill), ("decode", decode)):
            for own in ("cake", "cake full cache"):
                if own in rates:
                    peers = {name: rate for name, rate in rates.items() if not name.startswith("cake")}
                    report("peers", f"{what} at {tokens:,} tokens, {own}", rates[own], "tok/s", None, peers)


if __name__ == "__main__":
    main()
