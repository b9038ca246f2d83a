"""Needles lie where they should, and are found only as words."""

from __future__ import annotations

import itertools

import pytest
from cake_infer.engine.evaluation.haystack import CITIES, Hunt, Needle, filler, haystack, hide, magic_numbers, sentences
from cake_infer.errors import OptionError

HUNT = Hunt((Needle("The code is 42.", "42"),), "What is the code?")
HAY = [f"Sentence {i}." for i in range(10)]


@pytest.mark.parametrize(("depth", "place"), [(0, 0), (0.25, 2), (0.5, 5), (1, 10)])
def test_one_needle_lies_at_its_depth(depth, place) -> None:
    text = hide(HAY, HUNT, depth)
    assert text.split(". ").index("The code is 42" if place < 10 else "The code is 42.") == place
    assert all(sentence.rstrip(".") in text for sentence in HAY)


def test_several_needles_are_spread_from_the_first_one_on() -> None:
    hunt = magic_numbers(5, seed=3)
    text = hide(HAY, hunt, 0.2)
    places = [text[: text.index(needle.sentence)].count("Sentence") for needle in hunt.needles]
    assert places == [2, 4, 6, 8, 0]
    assert all(needle.answer in needle.sentence for needle in hunt.needles)
    assert len({needle.answer for needle in hunt.needles}) == 5
    assert magic_numbers(5, seed=3) == hunt != magic_numbers(5, seed=4)
    with pytest.raises(OptionError, match="25 built-in needles, not 26"):
        magic_numbers(len(CITIES) + 1, seed=0)


def test_an_answer_counts_as_a_word() -> None:
    hunt = Hunt((Needle("", "42"), Needle("", "Dolores Park")), "")
    assert hunt.score("It is 42, in dolores park!") == 1.0
    assert hunt.score("It is 142 or 420.") == 0.0
    assert hunt.score("42") == 0.5


def test_hay_is_as_long_as_it_may_be_and_goes_round() -> None:
    count = len
    for hay in (None, HAY):
        found = haystack(hay, 500, 0, count)
        size = sum(count(sentence + " ") for sentence in found)
        assert 400 < size <= 500
    assert haystack(HAY, 500, 0, count)[:12] == HAY + HAY[:2]
    assert haystack(None, 500, 0, count) == haystack(None, 500, 0, count) != haystack(None, 500, 1, count)
    first = list(itertools.islice(filler(0), 200))
    assert len(set(first)) > 100
    assert not any(city in sentence for city in CITIES for sentence in first)


def test_a_text_is_cut_into_sentences() -> None:
    assert sentences("One. Two!\nThree?  Four\n\nFive") == ["One.", "Two!", "Three?", "Four", "Five"]
    with pytest.raises(OptionError, match="not even two sentences"):
        sentences("word word")
