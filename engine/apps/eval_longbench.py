"""`cake-infer eval longbench`: LongBench's tasks with its prompts, truncation and metrics, per policy and budget."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..evaluation.longbench import NEW_TOKENS
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

MEASURES = (Measure("score", "score", 2, lower=False, scale=100.0),)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    add_row_arguments(parser)
    group = parser.add_argument_group("replies")
    group.add_argument(
        "--tokens", metavar="N", type=positive_count, help="most tokens of a reply (default the task's official number)"
    )
    add_comparison_arguments(parser)
    add_output_arguments(parser.add_argument_group("output"))


def conflict(args: argparse.Namespace, given: set[str]) -> str | None:
    """Why these flags do not go together, or None."""
    return comparison_conflict(args, given)


def run(args: argparse.Namespace, load: Load | None = None) -> int:
    """Write the replies that are missing in the results, score them, then print and write the report."""
    from ..evaluation.metrics import check_libraries

    found = read_rows(args.rows, args.limit)
    check_libraries(sorted({row.task for row in found}))
    return compare("longbench", args, load, lambda setting: measure(setting, found), report)


def measure(setting: Setting, found: Sequence[Row]) -> Records:
    """The records of this run, old ones and new ones."""
    from ..evaluation.metrics import score
    from ..evaluation.replies import greedy_replies
    from ..evaluation.study import read

    engine, args = setting.engine, setting.args
    tokenizer = engine.text_tokenizer()
    longest = {row.task: args.tokens or NEW_TOKENS[row.task] for row in found}
    newline = tokenizer.encode("\n", add_bos=False)[-1]
    by_name = {row.name: row for row in found}
    after = max(longest.values())

    def compute(item: Item, cells: list[Cell], on_chunk: OnChunk) -> Records:
        row, suffix = by_name[item.name], list(item.encoded.suffix)
        tokens = longest[row.task]
        reading = read(
            engine.runner, list(item.encoded.prefix), cells, new_tokens=len(suffix) + tokens, on_chunk=on_chunk
        )

        one_line = row.task == "samsum"  # officially a newline ends its replies, and neither it nor a stop begins them
        never = engine.stop_ids | {newline} if one_line else frozenset[int]()

        def ended(ids: list[int]) -> bool:
            return one_line and "\n" in tokenizer.decode(ids[-1:])

        said = greedy_replies(
            engine.runner,
            reading,
            reading.kept,
            suffix,
            tokens,
            stop_ids=engine.stop_ids,
            ended=ended,
            not_first=never,
        )
        replies = [tokenizer.decode(ids) for ids in said]
        return [{"reply": reply, "score": score(row.task, reply, row.answers, row.classes)} for reply in replies]

    items = setting.items(found, after=after, answer_tokens=64)
    return setting.fill(items, compute, after=after, new_tokens=args.tokens or 0, replies=True)


def report(
    records: Sequence[dict[str, Any]], args: argparse.Namespace, comparison: Comparison, console: Console
) -> None:
    """The tables on standard output, and plots and a page beside the results."""
    budgets = [str(budget) for budget in comparison.budgets]
    tasks = list(dict.fromkeys(record["task"] for record in records))
    entries = summarise(records, MEASURES, comparison.names, budgets, comparison.baseline)
    tables = []
    for budget in budgets:
        title = f"all rows, budget {budget}, question {args.question}, {comparison.model}"
        tables.append(budget_table(title, entries, MEASURES, comparison, budget))
        lines = []
        for policy in comparison.names:
            means = []
            for task in tasks:
                scores = [
                    one["score"]
                    for one in records
                    if (one["task"], one["policy"], one["budget"]) == (task, policy, budget)
                ]
                means.append(100 * sum(scores) / len(scores) if scores else float("nan"))
            lines.append([policy, *(f"{mean:.2f}" for mean in means), f"{sum(means) / len(means):.2f}"])
        tables.append((f"by task, budget {budget}", ["policy", *tasks, "mean of tasks"], lines))
    publish(console, comparison, f"longbench-{args.question}", MEASURES, entries, tables)
