"""Plots of results as PNG, by matplotlib (extra `eval`). Imported only where one is drawn."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from .summary import Entry, Measure


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
    drawing = figure(7.5, 4.5) if shown else None
    if drawing is None:
        return None
    budgets = list(dict.fromkeys(entry.budget for entry in shown))
    axes = drawing.add_subplot()
    policies = list(dict.fromkeys(entry.policy for entry in shown))
    for number, policy in enumerate(policies):
        own = {entry.budget: entry.values[measure.field] for entry in shown if entry.policy == policy}
        at = [i + 0.3 * ((number + 0.5) / len(policies) - 0.5) for i, budget in enumerate(budgets) if budget in own]
        found = [one for budget in budgets if (one := own.get(budget)) is not None]
        means = [one.mean * measure.scale for one in found]
        below = [max(0.0, (one.mean - one.low) * measure.scale) for one in found]
        above = [max(0.0, (one.high - one.mean) * measure.scale) for one in found]
        style = "-" if number < 10 else "--"
        axes.errorbar(
            at, means, [below, above], label=policy, marker="o", markersize=3, linewidth=1.2, capsize=2, ls=style
        )
    axes.set_xticks(range(len(budgets)), budgets)
    axes.set_xlabel("budget per layer and KV head")
    axes.set_ylabel(measure.title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return png(drawing)
