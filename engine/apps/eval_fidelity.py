"""`cake-infer eval fidelity`: how far each policy's cache is from the full one, over many prompts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..evaluation.rows import Row, read_rows
from ..evaluation.summary import Measure, summarise
from ..options import positive_count
from .comparison import Comparison, add_comparison_arguments, add_row_arguments, comparison_conflict
from .comparison_run import Records, Setting, budget_table, compare, publish
from .console import Console
from .loading import Load, add_output_arguments

if TYPE_CHECKING:
    from ..evaluation.campaign import Item
    from ..evaluation.study import Cell
    from ..prefill import OnChunk

MIB = 2**20
MEASURES = (
    Measure("kl", "KL (nats)", 4),
    Measure("top1", "top-1 (%)", 1, lower=False, scale=100.0),
    Measure("answer_loss", "answer loss (nats/token)", 3),
    Measure("bytes", "KV cache (MiB)", 2, scale=1 / MIB),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    add_row_arguments(parser)
    group = parser.add_argument_group("measure")
    group.add_argument(
        "--tokens",
        metavar="N",
        type=positive_count,
        default=64,
        help="most tokens of the full cache's continuation (default 64)",
    )
    group.add_argument(
        "--answer-tokens", metavar="N", type=positive_count, default=64, help="most tokens of an answer (default 64)"
    )
    add_comparison_arguments(parser)
    add_output_arguments(parser.add_argument_group("output"))


def conflict(args: argparse.Namespace, given: set[str]) -> str | None:
    """Why these flags do not go together, or None."""
    return comparison_conflict(args, given)


def run(args: argparse.Namespace, load: Load | None = None) -> int:
    """Measure what is missing in the results, then print and write the report."""
    found = read_rows(args.rows, args.limit)
    return compare("fidelity", args, load, lambda setting: measure(setting, found), report)


def measure(setting: Setting, found: Sequence[Row]) -> Records:
    """The records of this run, old ones and new ones."""
    from ..evaluation import fidelity

    engine, tokens, answer_tokens = setting.engine, setting.args.tokens, setting.args.answer_tokens
    after = max(tokens, answer_tokens)

    def compute(item: Item, cells: list[Cell], on_chunk: OnChunk) -> Records:
        one = item.encoded
        example = fidelity.Example(one.prefix, one.suffix, one.answer)
        results = fidelity.fidelity(
            engine.runner, example, cells, tokens=tokens, stop_ids=engine.stop_ids, on_chunk=on_chunk
        )
        return [asdict(result) for result in results]

    items = setting.items(found, after=after, answer_tokens=answer_tokens)
    return setting.fill(items, compute, after=2 * after, new_tokens=tokens, answer_limit=answer_tokens)


def report(
    records: Sequence[dict[str, Any]], args: argparse.Namespace, comparison: Comparison, console: Console
) -> None:
    """The tables on standard output, and plots and a page beside the results."""
    budgets = [str(budget) for budget in comparison.budgets]
    entries = summarise(records, MEASURES, comparison.names, budgets, comparison.baseline)
    titles = {budget: f"budget {budget}, question {args.question}, {comparison.model}" for budget in budgets}
    tables = [budget_table(titles[budget], entries, MEASURES, comparison, budget) for budget in budgets]
    publish(console, comparison, f"fidelity-{args.question}", MEASURES, entries, tables)
