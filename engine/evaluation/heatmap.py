"""Scores by length and depth of a haystack: as a grid, and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .plots import figure, png


@dataclass(frozen=True)
class Grid:
    """values[depth][length]: mean scores, 0 to 1."""

    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    values: tuple[tuple[float, ...], ...]


def grid(records: Sequence[Mapping[str, Any]]) -> Grid:
    """The mean score at every length and depth of one policy and budget; nan where there is none."""
    lengths = tuple(sorted({record["length"] for record in records}))
    depths = tuple(sorted({record["depth"] for record in records}))
    cells: dict[tuple[float, int], list[float]] = {}
    for record in records:
        cells.setdefault((record["depth"], record["length"]), []).append(record["score"])

    def mean(scores: list[float]) -> float:
        return sum(scores) / len(scores) if scores else float("nan")

    values = tuple(tuple(mean(cells.get((depth, length), [])) for length in lengths) for depth in depths)
    return Grid(lengths, depths, values)


def heat_map(grids: Mapping[str, Grid], budget: str) -> bytes | None:
    """One picture with a map per policy; None without matplotlib or without results."""
    shown = {policy: one for policy, one in grids.items() if one.values}
    columns = min(3, len(shown))
    drawing = figure(4.2 * columns, 3.4 * -(-len(shown) // columns)) if shown else None
    if drawing is None:
        return None
    last = None
    for number, (policy, one) in enumerate(shown.items(), start=1):
        axes = drawing.add_subplot(-(-len(shown) // columns), columns, number)
        last = axes.imshow(one.values, cmap="RdYlGn", vmin=0.0, vmax=1.0, aspect="auto")
        axes.set_title(f"{policy}, budget {budget}", fontsize=9)
        axes.set_xticks(range(len(one.lengths)), [f"{length:,}" for length in one.lengths], fontsize=7)
        axes.set_yticks(range(len(one.depths)), [f"{depth:g}%" for depth in one.depths], fontsize=7)
        axes.set_xlabel("tokens", fontsize=8)
        axes.set_ylabel("depth", fontsize=8)
        for row, line in enumerate(one.values):
            for column, value in enumerate(line):
                axes.text(column, row, f"{100 * value:.0f}", ha="center", va="center", fontsize=7)
    drawing.colorbar(last, ax=drawing.axes, label="needles found", shrink=0.8)
    return png(drawing)
