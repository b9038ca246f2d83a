"""How the comparing commands run: what is on disk stays, what is missing is measured, and then comes the report."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..evaluation.ledger import Ledger, open_ledger
from ..evaluation.summary import Entry, Measure, rows
from ..evaluation.table import show
from .comparison import KEY, Comparison, base_key, console_progress, encode_rows
from .console import Console
from .loading import Load, open_engine

if TYPE_CHECKING:
    from ..engine import Engine
    from ..evaluation.campaign import Check, Compute, Item
    from ..evaluation.rows import Row

Records = list[dict[str, Any]]
Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]  # title, header, rows


@dataclass(frozen=True)
class Setting:
    """A comparison under way. what: the command's word, which results are filed under."""

    what: str
    args: argparse.Namespace
    comparison: Comparison
    ledger: Ledger
    console: Console
    engine: Engine

    def items(self, rows: Sequence[Row], *, after: int, answer_tokens: int) -> list[Item]:
        """The rows as prompts, with room for `after` more tokens."""
        from ..evaluation.campaign import Item

        encoded = encode_rows(self.engine, self.args, rows, after, answer_tokens, self.console)
        return [Item(row.name, one, {"task": row.task}) for row, one in encoded]

    def fill(
        self,
        items: Sequence[Item],
        compute: Compute,
        *,
        after: int,
        replies: bool = False,
        check: Check | None = None,
        **key: int,
    ) -> Records:
        """The records of this run, old ones and new ones.

        replies: policies write them from caches of their own. check: see `Campaign`. key: fields of the results' keys
        that are not the usual.
        """
        from ..evaluation.campaign import Campaign

        campaign = Campaign(
            self.engine,
            self.ledger,
            self.comparison.policies,
            self.comparison.budgets,
            base_key(self.what, self.args, self.comparison) | key,
            self.console.notice,
            console_progress(self.console),
            check,
        )
        return campaign.run(items, compute, after=after, replies=replies)


def compare(
    what: str,
    args: argparse.Namespace,
    load: Load | None,
    measure: Callable[[Setting], Records],
    report: Callable[[Records, argparse.Namespace, Comparison, Console], None],
) -> int:
    """Measure what is missing in the results, then print and write the report; returns the exit code."""
    comparison = Comparison.of(args)
    args.window = comparison.window
    with (
        Console(quiet=args.quiet, verbose=args.verbose) as console,
        open_ledger(comparison.out / f"{what}.jsonl", KEY) as ledger,
    ):
        with open_engine(args, console, load) as engine:
            records = measure(Setting(what, args, comparison, ledger, console, engine))
        report(records, args, comparison, console)
    return 0


def budget_table(
    title: str, entries: Sequence[Entry], measures: Sequence[Measure], comparison: Comparison, budget: str
) -> Table:
    """The policies at one budget, each against the baseline."""
    return (title, *rows([one for one in entries if one.budget == budget], measures, comparison.baseline))


def publish(
    console: Console,
    comparison: Comparison,
    name: str,
    measures: Sequence[Measure],
    entries: Sequence[Entry],
    tables: Sequence[Table],
    *,
    images: Sequence[tuple[str, bytes | None]] = (),
    about: str | None = None,
) -> None:
    """The tables on standard output, and plots and a page beside the results; see `write_report`."""
    from ..evaluation.report import ABOUT, write_report

    for title, header, cells in tables:
        console.text(show(title, header, cells) + "\n")
    page = write_report(
        comparison.out, name, comparison.model, measures, entries, tables, images=images, about=about or ABOUT
    )
    console.notice(f"wrote {page}")
