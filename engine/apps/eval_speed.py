"""`cake-infer eval speed`: prefill, decode and peak memory of each policy, each run in a process of its own."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from ...errors import CakeError
from ...ranges import Range
from ..evaluation.combination import PARTS, Combination
from ..evaluation.ledger import Ledger, open_ledger
from ..evaluation.summary import Measure, summarise
from ..options import of_range, positive_count
from .comparison import KEY, Comparison, add_comparison_arguments, comparison_conflict, console_progress
from .comparison_run import budget_table, publish
from .console import Console
from .loading import DEFAULT_MODEL, add_output_arguments

MIB = 1 / (1 << 20)
MOST_REPEATS = 1000
MEASURES = (
    Measure("prefill_s", "prefill (s)", 2),
    Measure("decode_rate", "decode (tokens/s)", 1, lower=False),
    Measure("peak_memory", "peak memory (MiB)", 0, scale=MIB),
    Measure("kept_bytes", "kept KV (MiB)", 1, scale=MIB),
)
ENGINE = ("dtype", "device", "threads", "context", "rope_scaling", "chunk", "attention", "step", "quant", "kv_dtype")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    group = parser.add_argument_group("runs")
    group.add_argument(
        "--lengths",
        metavar="N",
        nargs="+",
        type=positive_count,
        default=[2048],
        help="random prompt tokens (default 2048)",
    )
    group.add_argument("--tokens", metavar="N", type=positive_count, default=64, help="tokens of a reply (default 64)")
    group.add_argument(
        "--repeats", metavar="N", type=of_range(Range(1, MOST_REPEATS)), default=3, help="runs of each (default 3)"
    )
    add_comparison_arguments(parser)
    add_output_arguments(parser.add_argument_group("output"))


def conflict(args: argparse.Namespace, given: set[str]) -> str | None:
    """Why these flags do not go together, or None."""
    return comparison_conflict(args, given, real_runs=True)


def run(args: argparse.Namespace, load: object = None) -> int:
    """Run what is missing in the results, then print and write the report. Models are loaded by the runs themselves."""
    comparison = Comparison.of(args)
    with (
        Console(quiet=args.quiet, verbose=args.verbose) as console,
        open_ledger(comparison.out / "speed.jsonl", KEY) as ledger,
    ):
        records = measure(args, comparison, ledger, console)
        report(records, args, comparison, console)
    return 0


def measure(args: argparse.Namespace, comparison: Comparison, ledger: Ledger, console: Console) -> list[dict[str, Any]]:
    """The records of this run, old ones and new ones. Policies take turns, so that a slow minute hits all of them."""
    keys = [
        {
            "what": "speed",
            "model": comparison.model,
            "question": "none",
            "prompt": f"{length} random tokens, run {repeat}",
            "policy": policy.text,
            "budget": str(budget),
            "window": "own" if args.own_windows else args.window,
            "new_tokens": args.tokens,
            "answer_limit": 0,
        }
        for repeat in range(args.repeats)
        for length in args.lengths
        for budget in comparison.budgets
        for policy in comparison.policies
    ]
    policies = {policy.text: policy for policy in comparison.policies}
    progress = console_progress(console)
    for number, key in enumerate(keys):
        if key in ledger:
            continue
        length = int(str(key["prompt"]).split()[0])
        progress(number, len(keys), f"{key['policy']} {key['budget']}")
        command = command_line(args, policies[str(key["policy"])], str(key["budget"]), length)
        stats = one_run(command)
        found = {name: stats[name] for name in ("prefill_s", "peak_memory", "kept_bytes")}
        ledger.append([{**key, "length": length, "decode_rate": stats["decode_tokens_per_s"], **found}])
    found_all = [ledger.get(key) for key in keys]
    return [record for record in found_all if record is not None]


def command_line(args: argparse.Namespace, policy: Combination, budget: str, length: int) -> list[str]:
    """A one-shot run with that policy."""
    words = [sys.executable, "-m", "cake_infer", "--json", "--quiet", "--prompt-tokens", str(length)]
    words += ["--max-tokens", str(args.tokens), "--temperature", "0", "--seed", "0", "--tuning", "off"]
    if args.random_weights is not None:
        words += ["--random-weights", args.random_weights]
    else:
        words += ["--model", args.model or DEFAULT_MODEL]
        words += ["--revision", args.revision] if args.revision else []
    for name in ENGINE:
        if (value := getattr(args, name)) is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    config = policy.config
    words += ["--policy", config.policy]
    if config.kv_bits is not None:
        words += ["--kv-bits", str(config.kv_bits)]
        words += ["--window", str(args.window)] if config.policy == "full" else []
    if config.policy != "full":
        words += ["--budget", budget, "--window", str(config.window)]
        for part in PARTS:
            if (value := getattr(config, part)) is not None:
                words += [f"--{part}", value]
        for option in config.policy_options:
            words += ["--policy-option", str(option)]
    if policy.piece is not None:
        words += ["--stream-prefill", str(policy.piece)]
    return words


def one_run(command: Sequence[str]) -> dict[str, Any]:
    """The statistics of one run. Raises CakeError with its message if it fails."""
    done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise CakeError((lines[-1] if lines else "a run failed").removeprefix("error: "))
    stats: dict[str, Any] = json.loads(done.stdout)["stats"]
    return stats


def report(
    records: Sequence[dict[str, Any]], args: argparse.Namespace, comparison: Comparison, console: Console
) -> None:
    """The tables on standard output, and plots and a page beside the results."""
    budgets = [str(budget) for budget in comparison.budgets]
    tables, shown = [], []
    runs = f"{args.repeats} {'run' if args.repeats == 1 else 'runs'}"
    for length in args.lengths:
        own = [record for record in records if record["length"] == length]
        entries = summarise(own, MEASURES, comparison.names, budgets, comparison.baseline)
        shown += entries if length == max(args.lengths) else []
        for budget in budgets:
            title = f"{length:,} prompt tokens, budget {budget}, {runs}, {comparison.model}"
            title, header, cells = budget_table(title, entries, MEASURES, comparison, budget)
            tables.append((title, ["policy", "runs", *header[2:]], cells))
    publish(console, comparison, "speed", MEASURES, shown, tables)
