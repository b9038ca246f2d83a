"""From single results to a table: means over prompts with intervals, each policy against a baseline. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .bootstrap import Interval, bootstrap, paired

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Measure:
    """A field of the records. lower: whether less is better. scale: what it is multiplied by to be shown."""

    field: str
    title: str
    digits: int = 3
    lower: bool = True
    scale: float = 1.0


@dataclass(frozen=True)
class Entry:
    """One policy at one budget: by field the interval, and that of the paired difference to the baseline."""

    policy: str
    budget: str
    prompts: int
    values: Mapping[str, Interval | None]
    differences: Mapping[str, Interval | None]


def summarise(
    records: Iterable[Record],
    measures: Sequence[Measure],
    policies: Sequence[str],
    budgets: Sequence[str],
    baseline: str | None,
) -> list[Entry]:
    """One entry per budget and policy, in the given order, over the prompts that every policy has a result of.

    A prompt that some policy lacks at a budget (a run that was stopped) is left out there, so that all means are over
    the same prompts.
    """
    table: dict[tuple[str, str], dict[str, Record]] = {}
    for record in records:
        table.setdefault((record["policy"], record["budget"]), {})[record["prompt"]] = record
    entries = []
    for budget in budgets:
        there = [set(table.get((policy, budget), {})) for policy in policies]
        prompts = sorted(set.intersection(*there)) if there else []
        for policy in policies:
            own = [table[policy, budget][prompt] for prompt in prompts]
            base = [table[baseline, budget][prompt] for prompt in prompts] if baseline is not None else []
            values: dict[str, Interval | None] = {}
            differences: dict[str, Interval | None] = {}
            for measure in measures:
                name = measure.field
                values[name] = bootstrap([one[name] for one in own if one.get(name) is not None])
                differences[name] = None
                if baseline is not None and policy != baseline:
                    pairs = [
                        (one[name], other[name])
                        for one, other in zip(own, base, strict=True)
                        if one.get(name) is not None and other.get(name) is not None
                    ]
                    differences[name] = paired([one for one, _ in pairs], [other for _, other in pairs])
            entries.append(Entry(policy, budget, len(prompts), values, differences))
    return entries


def interval_text(interval: Interval | None, measure: Measure, *, sign: bool = False) -> str:
    """`0.123 (0.100 to 0.150)`."""
    if interval is None:
        return "-"
    form = f"{'+' if sign else ''}.{measure.digits}f"
    mean, low, high = (f"{value * measure.scale:{form}}" for value in (interval.mean, interval.low, interval.high))
    return mean if interval.count < 2 else f"{mean} ({low} to {high})"


def rows(
    entries: Sequence[Entry], measures: Sequence[Measure], baseline: str | None
) -> tuple[list[str], list[list[str]]]:
    """Header and cells of one budget's table. A difference whose interval leaves out 0 is marked: better or worse."""
    header = ["policy", "prompts"]
    for measure in measures:
        header.append(measure.title)
        if baseline is not None:
            header.append(f"minus {baseline}")
    table = []
    for entry in entries:
        cells = [entry.policy, str(entry.prompts)]
        for measure in measures:
            cells.append(interval_text(entry.values[measure.field], measure))
            if baseline is not None:
                difference = entry.differences[measure.field]
                text = interval_text(difference, measure, sign=True) if difference is not None else ""
                if difference is not None and difference.significant:
                    text += " better" if (difference.mean < 0) == measure.lower else " worse"
                cells.append(text)
        table.append(cells)
    return header, table
