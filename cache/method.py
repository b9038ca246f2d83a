"""What a method is to the registry: a name, inputs, cost, parameters and a paper. No torch here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from ..errors import OptionError

Value = int | float | str | None
LARGEST: dict[type, float] = {int: 2**63 - 1, float: 1e30}  # what an int64 holds; what fp32 can still be multiplied by


@dataclass(frozen=True)
class Option:
    """One parameter of a method, `--policy-option NAME=VALUE`.

    kind: int, float or str. default: what the paper or its code uses, of that kind or None. least: the smallest value;
    above: a value that must be exceeded; most: the largest one. odd: only odd numbers. choices: the words that exist.
    file: the path of a file that must be there.
    """

    name: str
    default: Value
    help: str
    kind: type = float
    least: float | None = None
    above: float | None = None
    most: float | None = None
    odd: bool = False
    choices: tuple[str, ...] | None = None
    file: bool = False

    def read(self, value: object) -> Value:
        """The value in the option's own kind. Raises OptionError that says what it has to be."""
        refused = OptionError(f"{self.name} must be {self.wanted()}, not {value!r}")
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise refused
        if self.kind is str:
            if not isinstance(value, str) or not value or (self.choices is not None and value not in self.choices):
                raise refused
            return value
        try:
            number = self.kind(value) if isinstance(value, str) else value
        except ValueError:
            raise refused from None
        if abs(number) > LARGEST[self.kind]:
            raise OptionError(f"{self.name} must be at most {LARGEST[self.kind]:g}, not {value!r}")
        if self.kind is int and number != int(number) if math.isfinite(number) else True:
            raise refused
        low = (self.least is not None and number < self.least) or (self.above is not None and number <= self.above)
        if low or (self.most is not None and number > self.most) or (self.odd and number % 2 == 0):
            raise refused
        return int(number) if self.kind is int else float(number)

    def wanted(self) -> str:
        """`a whole number of at least 1`, `one of cake, snapkv`."""
        if self.kind is str:
            return "a word" if self.choices is None else f"one of {', '.join(self.choices)}"
        words = ("an odd whole number" if self.odd else "a whole number") if self.kind is int else "a number"
        if self.above is not None:
            words += f" above {self.above:g}"
        if self.least is not None:
            words += f" of at least {self.least:g}"
        if self.most is not None:
            words += f"{' and' if self.least is not None or self.above is not None else ' of'} at most {self.most:g}"
        return words


def parse_given(given: Mapping[str, object] | Iterable[str]) -> dict[str, object]:
    """`{"sinks": 4}` or `["sinks=4"]` as a dictionary. Raises OptionError for no NAME=VALUE, and for a name twice."""
    if isinstance(given, Mapping):
        return dict(given)
    found: dict[str, object] = {}
    for text in (given,) if isinstance(given, str) else given:
        name, equals, value = text.partition("=") if isinstance(text, str) else ("", "", "")
        name = name.strip()
        if not equals or not name:
            raise OptionError(f"cannot read the policy option {text!r}: give NAME=VALUE, e.g. sinks=4")
        if name in found:
            raise OptionError(f"the policy option {name} is given twice")
        found[name] = value.strip()
    return found


@dataclass(frozen=True)
class Input:
    """Something that a method may ask for by name, and that is worked out only then.

    all_queries: the last layer must run in full, where otherwise it works out the last token alone.
    """

    name: str
    help: str
    cost: str
    all_queries: bool = False


@dataclass(frozen=True)
class Method:
    """An indicator, an allocation, a rule over heads or a hold rule.

    where: `module:Class` below `cache`; the class takes the options as keywords. inputs: names in `INPUTS`.
    cost: beside attention itself, for a layer of n tokens. paper: the citation. heads: of an allocation, the rules over
    heads that it goes with, the usual one first. window: of an indicator, what its paper takes where that is not the
    usual one, for the policy of its name. late: of an allocation, that it compares all layers, so that no other
    schedule than late goes with it.
    """

    name: str
    where: str
    summary: str
    inputs: tuple[str, ...]
    cost: str
    paper: str
    options: tuple[Option, ...] = ()
    heads: tuple[str, ...] = ("equal", "adaptive")
    late: bool = False
    window: int | None = None

    def load(self) -> Any:
        """The class; imports its module."""
        module, name = self.where.split(":")
        return getattr(import_module(f".{module}", __package__), name)

    def option(self, name: str) -> Option | None:
        """The option of that name, if there is one."""
        return next((option for option in self.options if option.name == name), None)
