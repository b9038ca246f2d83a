"""Tables for a terminal: with rich where it is installed and somebody looks, else aligned text. No torch here."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def text_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An aligned table; the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(padded).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([title, "", line(header), rule, *map(line, rows)]) + "\n"


def rich_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str | None:
    """The same for a terminal; None where standard output is none, or rich is not installed."""
    if not sys.stdout.isatty():
        return None
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        return None
    table = Table(title=title, title_justify="left")
    for number, name in enumerate(header):
        table.add_column(name, justify="left" if number == 0 else "right", no_wrap=number == 0)
    for row in rows:
        styles = {"better": "green", "worse": "red"}
        cells = [f"[{styles[last]}]{cell}[/]" if (last := cell.rsplit(" ", 1)[-1]) in styles else cell for cell in row]
        table.add_row(*cells)
    console = Console()
    with console.capture() as capture:
        console.print(table)
    text: str = capture.get()
    return text


def show(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Whichever fits."""
    return rich_table(title, header, rows) or text_table(title, header, rows)
