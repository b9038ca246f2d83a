"""`cake-infer policies`: every method by name, with what it reads, what it costs, its parameters and its paper."""

from __future__ import annotations

import argparse
import json
import textwrap
from typing import Any

from ...cache.allocations import ALLOCATIONS, HEADS
from ...cache.holds import HOLDS
from ...cache.indicators import INDICATORS
from ...cache.inputs import INPUTS
from ...cache.merges import MERGES
from ...cache.method import Method
from ...cache.policies import DEFAULT_WINDOW, NAMED, POLICIES, own_window
from ...cache.schedules import SCHEDULES
from .console import Console

CLASSES = {
    "indicator": INDICATORS,
    "allocation": ALLOCATIONS,
    "heads": HEADS,
    "merge": MERGES,
    "schedule": SCHEDULES,
    "hold rule": HOLDS,
}
HEADINGS = {
    "indicator": "indicators (--indicator): which tokens of a row stay; each but cake is a policy of its own name too",
    "allocation": "allocations (--allocation): how layers share the budget",
    "heads": "heads (--heads): how the KV heads of a layer share",
    "merge": "merging (--merge): what kept values take over of evicted ones",
    "schedule": "schedules (--schedule): when the tokens of a prompt are evicted",
    "hold rule": "hold rules (--decode-policy hold --hold-by): what full rows give up for the tokens of a reply, at "
    "every step or every interval",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    parser.add_argument("--json", action="store_true", help="one JSON object with all there is")


def run(args: argparse.Namespace) -> int:
    """Print the list on standard output; loads nothing."""
    text = json.dumps(document(), indent=2) if args.json else listing()
    with Console() as console:
        console.text(text + "\n")
    return 0


def document() -> dict[str, Any]:
    """What programs read."""
    return {
        "policies": [policy(name) for name in POLICIES],
        "methods": [entry(part, method) for part, methods in CLASSES.items() for method in methods.values()],
        "inputs": {name: {"help": one.help, "cost": one.cost} for name, one in INPUTS.items()},
    }


def policy(name: str) -> dict[str, Any]:
    """The parts that a policy's name means."""
    if name == "full":
        return {"name": name, **dict.fromkeys(CLASSES), "window": None, "paper": ""}
    named = NAMED.get(name)
    allocation = named.allocation if named else "uniform"
    return {
        "name": name,
        "indicator": named.indicator if named else name,
        "allocation": allocation,
        "heads": named.heads if named else "equal",
        "merge": named.merge if named else "none",
        "schedule": "late" if ALLOCATIONS[allocation].late else "cascade",
        "window": own_window(name),
        "paper": named.paper if named else INDICATORS[name].paper,
    }


def entry(part: str, method: Method) -> dict[str, Any]:
    """One method."""
    return {
        "name": method.name,
        "class": part,
        "summary": method.summary,
        "inputs": list(method.inputs),
        "cost": method.cost,
        "defaults": {option.name: option.default for option in method.options},
        "options": {option.name: f"{option.help}; {option.wanted()}" for option in method.options},
        "paper": method.paper,
    }


def listing() -> str:
    """What people read: the policies, then every class of methods."""
    lines = ["policies (--policy)", ""]
    for name in POLICIES:
        parts = policy(name)
        if name == "full":
            lines.append(f"  {name:<22} keeps everything")
        elif name in NAMED:
            line = (
                f"  {name:<22} indicator {parts['indicator']}, allocation {parts['allocation']}, heads {parts['heads']}"
            )
            usual = {"merge": "none", "schedule": "cascade", "window": DEFAULT_WINDOW}
            more = "".join(f", {part} {parts[part]}" for part, value in usual.items() if parts[part] != value)
            lines.append(line + more)
    alone = ", ".join(
        name if own_window(name) == DEFAULT_WINDOW else f"{name} (window {own_window(name)})"
        for name in INDICATORS
        if name not in NAMED
    )
    lines.append(f"  and every other indicator, with allocation uniform and heads equal: {alone}")
    for part, methods in CLASSES.items():
        lines += ["", HEADINGS[part]]
        for method in methods.values():
            lines += ["", f"  {method.name:<22} {method.summary}"]
            about = [
                f"reads: {', '.join(method.inputs) or 'keys and positions'}; costs: {method.cost}",
                *(
                    f"{option.name}={'' if option.default is None else option.default}: {option.help}"
                    for option in method.options
                ),
                method.paper,
            ]
            lines += [line for text in about for line in wrapped(text)]
    return "\n".join(lines)


def wrapped(text: str) -> list[str]:
    """Lines below a name."""
    indent = " " * 25
    return textwrap.wrap(text, width=110, initial_indent=indent, subsequent_indent=indent + "  ")
