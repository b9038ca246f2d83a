"""Plots of results as PNG, by matplotlib (extra `eval`). Imported only where one is drawn."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from .bootstrap import Interval
from .summary import Entry, Measure

Lines = dict[str, dict[int, Interval]]  # by policy, and by number of the tick


def figure(width: float, height: float) -> Any:
    """A figure without a window, whatever the machine; None where matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    drawing = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(drawing)
    return drawing


def png(drawing: Any) -> bytes:
    """The figure's bytes."""
    buffer = io.BytesIO()
    drawing.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()


def by_budget(entries: Sequence[Entry], measure: Measure) -> bytes | None:
    """One line per policy over the budgets, with intervals; None where there is nothing to draw or to draw with."""
    shown = [entry for entry in entries if entry.values[measure.field] is not None]
    budgets = list(dict.fromkeys(entry.budget for entry in shown))
    lines: Lines = {}
    for entry in shown:
        value = entry.values[measure.field]
        assert value is not None
        lines.setdefault(entry.policy, {})[budgets.index(entry.budget)] = value
    return _drawn(lines, budgets, "budget per layer and KV head", measure.title, measure.scale)


def over_parts(entries: Sequence[Entry], measures: Sequence[Measure], title: str) -> bytes | None:
    """One line per policy over measures that are of one thing in several parts; None as in `by_budget`."""
    lines: Lines = {}
    for entry in entries:
        found = {i: entry.values[measure.field] for i, measure in enumerate(measures)}
        lines[entry.policy] = {i: value for i, value in found.items() if value is not None}
    return _drawn(lines, [measure.title for measure in measures], "", title, measures[0].scale)


def _drawn(lines: Lines, ticks: Sequence[str], x_title: str, y_title: str, scale: float) -> bytes | None:
    """Lines by policy, beside each other at every tick."""
    lines = {policy: line for policy, line in lines.items() if line}
    drawing = figure(7.5, 4.5) if lines else None
    if drawing is None:
        return None
    axes = drawing.add_subplot()
    for number, (policy, line) in enumerate(lines.items()):
        at = [i + 0.3 * ((number + 0.5) / len(lines) - 0.5) for i in sorted(line)]
        found = [line[i] for i in sorted(line)]
        means = [one.mean * scale for one in found]
        below = [max(0.0, (one.mean - one.low) * scale) for one in found]
        above = [max(0.0, (one.high - one.mean) * scale) for one in found]
        style = "-" if number < 10 else "--"
        axes.errorbar(
            at, means, [below, above], label=policy, marker="o", markersize=3, linewidth=1.2, capsize=2, ls=style
        )
    axes.set_xticks(range(len(ticks)), ticks)
    axes.set_xlabel(x_title)
    axes.set_ylabel(y_title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return png(drawing)
