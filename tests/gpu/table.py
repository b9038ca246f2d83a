"""What the check has found, as lines of a table and as one JSON object; written down as it comes."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass
class Row:
    """One line of the table. ok: whether it is what was asked for; None where it is only told."""

    part: str
    name: str
    value: float | str
    unit: str = ""
    bar: str = ""
    ok: bool | None = None

    @property
    def line(self) -> str:
        value = self.value
        if not isinstance(value, str):
            value = f"{value:,.4g}" if abs(value) < 100 else f"{value:,.0f}"
        verdict = {None: "", True: "ok", False: "MISSED"}[self.ok]
        return f"{self.name:<52} {value:>12} {self.unit:<8} {self.bar:<26} {verdict}".rstrip()


class Table:
    """Rows of all parts, in the order of `parts` however they come.

    found: figures that other parts need, by name. file: where the JSON object is written anew with every row, so that
    nothing is lost where the process is killed.
    """

    def __init__(self, parts: Sequence[str], *, dry: bool = False, file: Path | None = None) -> None:
        self.parts, self.dry, self.file = list(parts), dry, file
        self.rows: list[Row] = []
        self.found: dict[str, float] = {}
        self.about: dict[str, Any] = {}  # the card's name, versions
        self.seconds = 0.0
        self.over = False

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self.rows.sort(key=lambda row: self.parts.index(row.part) if row.part in self.parts else len(self.parts))
        self.write()

    @property
    def missed(self) -> list[str]:
        return [f"{row.part}: {row.name}" for row in self.rows if row.ok is False]

    def json(self) -> dict[str, Any]:
        """The whole as one object. NaN and infinite figures are None: JSON has no such numbers."""
        values = {f"{row.part}: {row.name}": row.value for row in self.rows}
        rate, ceiling = self.found.get("decode", math.nan), self.found.get("decode, at most", math.nan)
        ratios = {name.removeprefix("over "): value for name, value in self.found.items() if name.startswith("over ")}
        return _finite(
            {
                "bench": "gpu",
                "case": self.about.get("name", ""),
                "dry": self.dry,
                "over": self.over,
                "seconds": round(self.seconds, 1),
                "missed": self.missed,
                "value": rate,
                "unit": "tok/s",
                "ceiling": ceiling,
                "share": rate / ceiling,
                "ratio": ratios,
                "about": self.about,
                "values": values,
            }
        )

    def write(self) -> None:
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            part = self.file.with_name(self.file.name + ".part")
            part.write_text(json.dumps(self.json() | {"rows": [_finite(asdict(row)) for row in self.rows]}) + "\n")
            os.replace(part, self.file)

    def report(self) -> int:
        """Print the table and the line of JSON. Returns the exit status."""
        self.over = True
        self.write()
        print(f"{self.about.get('name', '')}, {self.seconds:.0f} s" + (", dry: figures mean nothing" * self.dry))
        part = ""
        for row in self.rows:
            if row.part != part:
                part = row.part
                print(f"\n{part}")
            print("  " + row.line)
        print("\n" + ("missed: " + "; ".join(self.missed) if self.missed else "nothing missed"))
        print(json.dumps(self.json()), flush=True)
        return 1 if self.missed else 0


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
