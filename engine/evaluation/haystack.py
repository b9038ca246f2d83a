"""Needles in a haystack: facts put into a long text at a given depth, and a question about them. No torch here.

The test is Greg Kamradt's (LLMTest_NeedleInAHaystack); the built-in needles are magic numbers of cities, as in RULER
(Hsieh et al., COLM 2024, arXiv 2404.06654), and the built-in filler are sentences drawn from a small grammar.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ...errors import OptionError

CITIES = (
    "Aarhus",
    "Bergen",
    "Cordoba",
    "Dakar",
    "Essen",
    "Fukuoka",
    "Genoa",
    "Hobart",
    "Izmir",
    "Jaipur",
    "Kyoto",
    "Lima",
    "Malmo",
    "Nairobi",
    "Oslo",
    "Porto",
    "Quito",
    "Riga",
    "Seville",
    "Turin",
    "Utrecht",
    "Vienna",
    "Warsaw",
    "Yerevan",
    "Zagreb",
)
_WHO = "the baker|a retired sailor|our neighbour|the night guard|a young painter|the station master|an old teacher"
_DID = "walked past|spoke about|wrote a letter about|looked for|described|forgot|remembered|drew a map of"
_WHAT = "the harbour wall|a row of lime trees|the closed museum|the narrow bridge|a wooden clock|the market hall"
_WHEN = "before the rain came|on a quiet morning|while the shops were closed|after a long winter|without any hurry"
_ALSO = (
    "Nobody was surprised by that|The light was already fading|It took most of the afternoon|Somebody laughed softly"
)


@dataclass(frozen=True)
class Needle:
    """A sentence that says something, and the words of a reply that show it was found."""

    sentence: str
    answer: str


@dataclass(frozen=True)
class Hunt:
    """Needles and the question for all of them."""

    needles: tuple[Needle, ...]
    question: str

    def score(self, reply: str) -> float:
        """The share of needles whose answer is in the reply, as words."""
        return sum(_found(needle.answer, reply) for needle in self.needles) / len(self.needles)

    @property
    def answer(self) -> str:
        return ", ".join(needle.answer for needle in self.needles)


def magic_numbers(count: int, seed: int) -> Hunt:
    """`count` built-in needles. Raises OptionError for more than there are cities."""
    if count > len(CITIES):
        raise OptionError(f"there are {len(CITIES)} built-in needles, not {count}: give fewer")
    generator = random.Random(f"needle {seed}")
    cities = generator.sample(CITIES, count)
    numbers = generator.sample(range(10_000, 100_000), count)
    needles = tuple(
        Needle(f"The magic number of {city} is {number}.", str(number))
        for city, number in zip(cities, numbers, strict=True)
    )
    if count == 1:
        return Hunt(needles, f"What is the magic number of {cities[0]}? Answer with the number alone.")
    listed = ", ".join(cities[:-1]) + f" and {cities[-1]}"
    return Hunt(needles, f"What are the magic numbers of {listed}? Answer with the numbers alone.")


def filler(seed: int) -> Iterator[str]:
    """Sentences without end, the same for the same seed."""
    generator = random.Random(f"filler {seed}")
    parts = [part.split("|") for part in (_WHO, _DID, _WHAT, _WHEN, _ALSO)]
    while True:
        who, did, what, when, also = (generator.choice(part) for part in parts)
        sentence = f"{who} {did} {what} {when}."
        yield sentence[0].upper() + sentence[1:]
        if generator.random() < 0.4:
            yield f"{also}."


def sentences(text: str) -> list[str]:
    """A text in sentences, or paragraphs where it has no full stops. Raises OptionError for one that is too short."""
    found = [part for part in re.split(r"(?<=[.!?\u3002])\s+|\n\s*\n", text) if part and part.strip()]
    if len(found) < 2:
        raise OptionError("the haystack has not even two sentences: give a longer text")
    return found


def haystack(hay: Sequence[str] | None, tokens: int, seed: int, count: Callable[[str], int]) -> list[str]:
    """Sentences of about `tokens` in all, never more: from the text `hay`, again from its beginning where it ends, or
    filler. `count` gives a sentence's tokens."""
    source = filler(seed) if hay is None else _round(hay, seed)
    found: list[str] = []
    room = tokens
    for sentence in source:
        room -= count(sentence + " ")
        if room < 0:
            return found
        found.append(sentence)
    return found


def hide(hay: Sequence[str], hunt: Hunt, depth: float) -> str:
    """The haystack with its needles between sentences: the first at `depth` (0 to 1), the others evenly over the rest
    of the text, round its end."""
    places: list[tuple[int, int, str]] = []
    for number, needle in enumerate(hunt.needles):
        share = depth if len(hunt.needles) == 1 else (depth + number / len(hunt.needles)) % 1.0
        places.append((round(share * len(hay)), number, needle.sentence))
    found = list(hay)
    for place, _, sentence in sorted(places, reverse=True):
        found.insert(place, sentence)
    return " ".join(found)


def _round(hay: Sequence[str], seed: int) -> Iterator[str]:
    start = random.Random(f"hay {seed}").randrange(len(hay)) if seed else 0
    while True:
        yield from hay[start:]
        yield from hay[:start]


def _found(answer: str, reply: str) -> bool:
    if not answer.isascii():
        return answer in reply
    return re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", reply, re.IGNORECASE) is not None
