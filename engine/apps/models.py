"""`cake-infer models`: the models that have a short name, and which of them are on this machine."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from .console import Console

HEADINGS = ("name", "repository", "parameters", "on disk", "context", "local", "")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    parser.add_argument("--json", action="store_true", help="one JSON list, with the folders of the local ones")


def run(args: argparse.Namespace) -> int:
    """Print the list on standard output; uses no network."""
    entries = model_list()
    text = json.dumps(entries, indent=2) if args.json else format_table(entries)
    with Console() as console:
        console.text(text + "\n")
    return 0


def model_list() -> list[dict[str, Any]]:
    """One entry per alias: name, repository, parameters, bytes on disk, context, note, and folder (None: not local).

    The bytes of a local model are those of its files, of another those that it will take.
    """
    from ...errors import CakeError
    from ...models.embedded import embedded_folder, is_embedded_complete
    from ...models.hub_cache import cached
    from ...models.hub_files import weight_bytes
    from ...models.registry import ALIASES, EMBEDDED

    entries = []
    for name, alias in ALIASES.items():
        folder: Path | None = None
        try:
            if name == EMBEDDED:
                folder = embedded_folder() if is_embedded_complete() else None
            else:
                found = cached(alias.repo)
                folder = found.snapshot if found.complete else None
            nbytes = weight_bytes(folder) if folder else alias.bytes
        except CakeError:  # a broken cache entry is no local model
            folder, nbytes = None, alias.bytes
        entries.append(
            {
                "name": name,
                "repository": alias.repo,
                "parameters": alias.parameters,
                "bytes": nbytes,
                "context": alias.context,
                "note": alias.note,
                "local": folder is not None,
                "folder": None if folder is None else str(folder),
            }
        )
    return entries


def format_table(entries: list[dict[str, Any]]) -> str:
    """Aligned columns with a heading; figures to the right."""
    rows = [HEADINGS]
    for entry in entries:
        rows.append(
            (
                entry["name"],
                entry["repository"],
                count(entry["parameters"]),
                f"{entry['bytes'] / 1e9:.2f} GB",
                f"{entry['context']:,}",
                "yes" if entry["local"] else "no",
                entry["note"],
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    right = {2, 3, 4}
    lines = []
    for row in rows:
        cells = (
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def count(parameters: int) -> str:
    """`135M`, `7.25B`."""
    return f"{parameters / 1e6:.0f}M" if parameters < 1e9 else f"{parameters / 1e9:.2f}B"
