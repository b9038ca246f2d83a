"""Which numbers an option may have, and how a message shows one that it may not. No torch here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from .errors import OptionError

MOST_TOKENS = 2**31 - 1  # positions are int32
MOST_BYTES = 2**60  # 1,048,576 TiB: more than a machine has
MOST = 1e30  # what fp32 can still be multiplied by
DAY_S = 86_400.0
LONGEST_SHOWN = 60  # characters of a value
EXACT_BELOW = 10**18  # whole numbers from here on are told by their digits


@dataclass(frozen=True)
class Range:
    """Whole numbers or numbers from `least` to `most`, both included; with `above`, `least` itself is not.

    kind: int, or float, which takes whole numbers too. odd: odd whole numbers alone.
    """

    least: float
    most: float
    kind: type = int
    above: bool = False
    odd: bool = False

    def wanted(self) -> str:
        """`a whole number between 1 and 1,024`."""
        words = ("an odd whole number" if self.odd else "a whole number") if self.kind is int else "a number"
        if self.above:
            return f"{words} above {number_text(self.least)} and at most {number_text(self.most)}"
        return f"{words} between {number_text(self.least)} and {number_text(self.most)}"

    def has(self, value: object) -> bool:
        """Whether it is such a number. True and False are none, and no text is."""
        if isinstance(value, bool) or not isinstance(value, int if self.kind is int else (int, float)):
            return False
        low = value <= self.least if self.above else value < self.least
        return not low and value <= self.most and not (self.odd and value % 2 == 0)

    def refusal(self, value: object) -> str:
        """Why a value is none of these."""
        return f"must be {self.wanted()}, not {shown(value)}"

    def check(self, what: str, value: object) -> None:
        """Raise OptionError unless it is such a number; `what` begins the message."""
        if not self.has(value):
            raise OptionError(f"{what} {self.refusal(value)}")

    def parse(self, text: str) -> int | float:
        """The number that a text spells, as Python does. Raises ValueError that says what it has to be."""
        try:
            value: int | float = int(text) if self.kind is int else float(text)
        except (ValueError, OverflowError):  # no number, or one of more digits than Python reads
            raise ValueError(self.refusal(text)) from None
        if not self.has(value):
            raise ValueError(self.refusal(value if self.kind is int else text))
        return value


def check_numbers(options: Any) -> None:
    """Raise OptionError for a field of a dataclass that is outside of its range in `numbers`, a table of the class.

    None stands for a value that is left open, where the field's default is None.
    """
    for name, numbers in options.numbers.items():
        value = getattr(options, name)
        if value is not None or options.__dataclass_fields__[name].default is not None:
            numbers.check(f"the option {name}", value)


COUNT, POSITIVE = Range(0, MOST_TOKENS), Range(1, MOST_TOKENS)
SIZE = Range(1, MOST_BYTES)
SECONDS = Range(0, DAY_S, float)


def number_text(number: float) -> str:
    """`1,024`, `0.5`, `1e+30`."""
    whole = isinstance(number, int) or (number.is_integer() and abs(number) < EXACT_BELOW)
    return f"{int(number):,}" if whole else f"{number:g}"


def shown(value: object) -> str:
    """A value as a message shows it: however long it is, in a few words. Python writes no number of 5,000 digits."""
    if isinstance(value, int) and not isinstance(value, bool):
        if abs(value) < EXACT_BELOW:
            return f"{value:,}"
        return f"{'a negative' if value < 0 else 'a'} number of {int(math.log10(abs(value))) + 1:,} digits"
    try:
        text = repr(value)
    except ValueError:  # it holds such a number
        return f"a {type(value).__name__} with a number that is too long to be written"
    if len(text) <= LONGEST_SHOWN:
        return text
    length = len(value) if isinstance(value, str) else len(text)
    return f"{text[: LONGEST_SHOWN // 2]}... ({length:,} characters)"
