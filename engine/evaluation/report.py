"""The page at the end of a comparison: tables and plots in one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import html
import logging
from collections.abc import Sequence
from pathlib import Path

from ... import __version__
from ...errors import CakeError
from ..whole_file import write_whole
from .plots import by_budget
from .summary import Entry, Measure

log = logging.getLogger(__name__)

Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]  # title, header, rows

NO_PLOTS = "no plots: matplotlib is not installed (pip install 'cake-infer[eval]')"
STYLE = """
:root { color-scheme: light dark; --ink: #1d2230; --dim: #667; --line: #d8dbe3; --page: #fbfbfd; --good: #0a7d33;
  --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8ef; --dim: #9aa0b0; --line: #333845; --page: #14161c;
  --good: #6fd08c; --bad: #f2877f; } img { filter: invert(0.9) hue-rotate(180deg); } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); margin: 2rem auto;
  max-width: 90rem; padding: 0 1.5rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2.2rem; } p { color: var(--dim); max-width: 60rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 0.3rem 0.8rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { font-weight: 600; }
td.better { color: var(--good); } td.worse { color: var(--bad); } img { max-width: 100%; margin: 0.8rem 0; }
"""
ABOUT = (
    "Means over prompts with 95% percentile bootstrap intervals (10,000 resamples of prompts). A difference is paired, "
    "prompt by prompt; it is marked where its interval leaves out 0. Every policy saw the same prefills and kept "
    "equally many slots."
)


def write_report(
    folder: Path,
    name: str,
    title: str,
    measures: Sequence[Measure],
    entries: Sequence[Entry],
    tables: Sequence[Table],
    *,
    images: Sequence[tuple[str, bytes | None]] = (),
    about: str = ABOUT,
) -> Path:
    """Write `name`.html and its plots as PNG files into the folder; returns the page's path.

    A measure with several budgets gets a plot; `images` are further ones, by name. about: how its figures are to be
    read. Without matplotlib the page has its tables alone, and a notice says so.
    """
    drawn = [(measure.field, by_budget(entries, measure)) for measure in measures] + list(images)
    if entries and all(image is None for _, image in drawn):
        log.info(NO_PLOTS)
    parts = [f"<h1>{html.escape(name)}: {html.escape(title)}</h1>", f"<p>{about}</p>"]
    try:
        for field, image in drawn:
            if image is not None:
                write_whole(folder / f"{name}-{field}.png", image)
                data = base64.b64encode(image).decode()
                parts.append(f'<img alt="{html.escape(field)}" src="data:image/png;base64,{data}">')
        parts += [html_table(table) for table in tables]
        parts.append(f"<p>cake-infer {__version__}</p>")
        page = folder / f"{name}.html"
        write_whole(page, document(f"{name}: {title}", STYLE, "\n".join(parts)).encode())
    except OSError as error:
        raise CakeError(f"cannot write the report to {folder}: {error.strerror or error}") from error
    return page


def html_table(table: Table) -> str:
    """A table with its title."""
    title, header, rows = table
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = []
    for row in rows:
        cells = []
        for cell in row:
            verdict = cell.rsplit(" ", 1)[-1]
            mark = f' class="{verdict}"' if verdict in ("better", "worse") else ""
            cells.append(f"<td{mark}>{html.escape(cell)}</td>")
        body.append(f"<tr>{''.join(cells)}</tr>")
    return (
        f'<h2>{html.escape(title)}</h2><div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def document(title: str, style: str, body: str, script: str = "") -> str:
    """A whole page that asks the network for nothing."""
    code = f"<script>{script}</script>" if script else ""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{style}</style></head>\n<body>\n{body}\n{code}</body></html>\n"
    )
