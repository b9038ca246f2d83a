"""How a script here tells its figure: the ceiling first, then measurement and peers, and one line of JSON last."""

from __future__ import annotations

import json
from collections.abc import Mapping


def report(
    bench: str,
    case: str,
    value: float,
    unit: str,
    ceiling: float | None,
    peers: Mapping[str, float] | None = None,
    **details: object,
) -> dict[str, object]:
    """Print one figure and return its JSON object.

    share = value / ceiling (for memory: peak / ideal); ratio = value / peer's value, each peer measured in the same run
    and unit. `details` are further keys of the JSON object.
    """
    peers = peers or {}
    share = value / ceiling if ceiling else None
    ratio = {name: value / other for name, other in peers.items() if other}
    print(f"{bench}: {case}")
    if ceiling is not None:
        print(f"  {'ceiling':<24} {ceiling:>12.4g} {unit}")
    print(f"  {'measured':<24} {value:>12.4g} {unit}" + (f"   share {share:.3f}" if share is not None else ""))
    for name, other in peers.items():
        print(f"  {name:<24} {other:>12.4g} {unit}" + (f"   ratio {ratio[name]:.3f}" if name in ratio else ""))
    line: dict[str, object] = {
        "bench": bench,
        "case": case,
        "value": value,
        "unit": unit,
        "ceiling": ceiling,
        "share": share,
        "ratio": ratio,
        **details,
    }
    print(json.dumps(line), flush=True)
    return line
