"""What a method is to the registry: a name, inputs, cost, parameters and a paper. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from ..errors import OptionError
from ..ranges import MOST, MOST_TOKENS, Range, shown

Value = int | float | str | None
LARGEST: dict[type, float] = {int: MOST_TOKENS, float: MOST}
WIDEST = 1023  # pooling over neighbours, which takes a step for each two


@dataclass(frozen=True)
class Option:
    """One parameter of a method, `--policy-option NAME=VALUE`.

    kind: int, float or str. default: what the paper or its code uses, of that kind or None. least: the smallest value;
    above: a value that must be exceeded; most: the largest one, where that is not what any option can have. odd: only
    odd numbers. choices: the words that exist. file: the path of a file that must be there.
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
        if self.kind is str:
            if not isinstance(value, str) or not value or (self.choices is not None and value not in self.choices):
                raise OptionError(f"{self.name} must be {self.wanted()}, not {shown(value)}")
            return value
        if isinstance(value, str):
            try:
                return self.range.parse(value)
            except ValueError as error:
                raise OptionError(f"{self.name} {error}") from None
        if self.kind is int and isinstance(value, float) and value.is_integer():
            value = int(value)
        self.range.check(self.name, value)
        assert isinstance(value, (int, float))
        return self.kind(value)  # type: ignore[no-any-return]

    @property
    def range(self) -> Range:
        """The numbers that it may have."""
        most = LARGEST[self.kind] if self.most is None else self.most
        least = self.above if self.above is not None else -most if self.least is None else self.least
        return Range(least, most, self.kind, above=self.above is not None, odd=self.odd)

    def wanted(self) -> str:
        """`a whole number between 1 and 1,024`, `one of cake, snapkv`."""
        if self.kind is str:
            return "a word" if self.choices is None else f"one of {', '.join(self.choices)}"
        return self.range.wanted()


def parse_given(given: Mapping[str, object] | Iterable[str]) -> dict[str, object]:
    """`{"sinks": 4}` or `["sinks=4"]` as a dictionary. Raises OptionError for no NAME=VALUE, and for a name twice."""
    if isinstance(given, Mapping):
        return dict(given)
    found: dict[str, object] = {}
    for text in (given,) if isinstance(given, str) else given:
        name, equals, value = text.partition("=") if isinstance(text, str) else ("", "", "")
        name = name.strip()
        if not equals or not name:
            raise OptionError(f"cannot read the policy option {shown(text)}: give NAME=VALUE, e.g. sinks=4")
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
