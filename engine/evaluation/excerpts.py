"""Excerpts of long texts: so many from each, as long as is asked for, and apart from each other. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...errors import PromptError


@dataclass(frozen=True)
class Excerpt:
    """ids: of the excerpt alone. first: the token of its text at which it begins."""

    text: str
    first: int
    ids: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.text} from {self.first}"


def excerpts(
    texts: Sequence[tuple[str, str]], count: int, length: int, encode: Callable[[str], list[int]]
) -> list[Excerpt]:
    """`count` of each text, of `length` tokens, at the beginnings of equal parts of it; `texts` are names and texts.

    Raises PromptError where a text is too short for them, with both numbers, or two have one name.
    """
    found: list[Excerpt] = []
    for name, text in texts:
        if any(one.text == name for one in found):
            raise PromptError(f"two texts are called {name!r}: their results could not be told apart")
        ids = encode(text)
        if len(ids) < count * length:
            most = len(ids) // length
            raise PromptError(
                f"{name} has {len(ids):,} tokens, fewer than {count} x {length:,}: "
                + (
                    f"take at most {most} excerpts, or shorter ones"
                    if most
                    else "take shorter excerpts, or leave it out"
                )
            )
        for number in range(count):
            first = number * len(ids) // count
            found.append(Excerpt(name, first, tuple(ids[first : first + length])))
    return found
