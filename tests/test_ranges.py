"""Numbers that no option can have are refused, each in one line that says which it can: every option that there is."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, get_type_hints

import pytest
from cake_infer import cli
from cake_infer.cache.allocations import ALLOCATIONS, HEADS
from cake_infer.cache.budget import Budget, parse_bytes
from cake_infer.cache.config import CacheConfig
from cake_infer.cache.holds import HOLDS
from cake_infer.cache.indicators import INDICATORS
from cake_infer.cache.merges import MERGES
from cake_infer.cache.method import Option
from cake_infer.engine.evaluation.combination import Combination
from cake_infer.engine.generation import GenerationConfig
from cake_infer.engine.options import EngineOptions
from cake_infer.engine.serving.options import ServeOptions
from cake_infer.errors import CakeError, OptionError
from cake_infer.ranges import Range, shown

HUGE, ENDLESS = "9" * 400, "9" * 5000  # Python reads no number of more than 4,300 digits
LONGEST = 400  # characters of a message
NUMBERS = {"N", "X", "K", "P", "S", "SIZE", "BYTES", "PERCENT"}
TEXTS = {"NAME", "TEXT", "FILE", "FOLDER", "PATH", "SPEC", "CONFIG", "REV", "ADDRESS", "KEY", "KIND:F", "NAME=VALUE"}
TEXTS |= {"NAME[,OPTION=VALUE]", "TASK", "COLUMN", "CAPTION", "GGUF"}


def flags(command: str | None) -> tuple[list[str], list[argparse.Action]]:
    """What a command line of this command must have, and every flag that takes a number."""
    parser = cli.build_parser(command)
    valued = [action for action in parser._actions if action.nargs != 0 and not action.choices and action.metavar]
    metavars = {str(action.metavar) for action in valued if action.option_strings}
    assert metavars <= NUMBERS | TEXTS, "a metavar that this test does not know: is it a number?"
    needed = [word for action in parser._actions if action.required for word in (*action.option_strings[-1:], "x")]
    return needed, [action for action in valued if action.metavar in NUMBERS]


def cases() -> Iterator[Any]:
    for command in (None, *cli.COMMANDS):
        needed, numbers = flags(command)
        for action in numbers:
            flag = action.option_strings[-1]
            yield pytest.param([*(command or "").split(), *needed], flag, id=f"{command} {flag}")


@pytest.mark.parametrize(("words", "flag"), list(cases()))
def test_a_flag_says_which_numbers_it_takes(words: list[str], flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    if flag == "--recascade":
        words = [*words, "--decode-policy", "hold", "--policy", "cake"]
    for text in (HUGE, ENDLESS, "nan"):
        assert cli.main([*words, f"{flag}={text}"]) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: ")
        assert said.count("\n") == 1
        assert len(said) < LONGEST
        assert flag in said or any(word in said for word in ("budget", "size"))
        if text != "nan":
            assert "between" in said or "at most" in said, said


@pytest.mark.parametrize(
    "words",
    [
        ["--rope-scaling", f"yarn:{HUGE}"],
        ["--rope-scaling", f"linear:{ENDLESS}"],
        ["--policy-option", f"pool={ENDLESS}"],
        ["--policy", "expected-attention", "--policy-option", "ahead=99999999"],
        ["--decode-policy", "hold", "--hold-by", f"attention,interval={HUGE}"],
        ["eval", "needle", "--policy", f"snapkv,pool={ENDLESS}"],
        ["eval", "needle", "--policy", f"cake,pieces={ENDLESS}"],
        ["eval", "generation", "--text", "x", "--policy", f"cake,recascade={ENDLESS}"],
    ],
)
def test_a_number_within_a_text_is_looked_at_too(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert len(said) < LONGEST
    assert "between" in said


WRONG: tuple[Any, ...] = (
    10**400, 10**5000, -(10**400), 1e300, -1, -0.5, True, False, math.nan, math.inf, -math.inf, "1", "", [1], {}, b"1",
)  # fmt: skip


def numeric(cls: type) -> list[str]:
    """Fields whose type is a number, or a text that stands for one."""
    hints = get_type_hints(cls)
    names = [field.name for field in fields(cls) if any(kind in str(hints[field.name]) for kind in ("int", "float"))]
    return [name for name in names if name != "policy_options"] + (["arena"] if cls is ServeOptions else [])


@pytest.mark.parametrize("cls", [GenerationConfig, CacheConfig, EngineOptions, ServeOptions])
def test_no_field_takes_a_number_that_it_could_not_apply(cls: type) -> None:
    names = numeric(cls)
    assert set(cls.numbers) <= set(names)  # type: ignore[attr-defined]
    assert set(names) - set(cls.numbers) <= {"budget", "kv_memory", "arena", "kv_bits"}  # type: ignore[attr-defined]
    for name in names:
        more = {"decode_policy": "hold", "policy": "cake"} if name == "recascade" else {}
        for value in WRONG:
            if name in ("budget", "kv_memory", "arena") and value in ("1", 1) and value is not True:
                continue  # texts are read there
            if value in (-1, -0.5) and name.endswith("_penalty") and name != "repetition_penalty":
                continue
            with pytest.raises(OptionError) as told:
                cls(**{name: value}, **more)
            assert len(str(told.value)) < LONGEST, name
            assert "\n" not in str(told.value)


def options() -> Iterator[Any]:
    for methods in (INDICATORS, ALLOCATIONS, HEADS, MERGES, HOLDS):
        for method in methods.values():
            for option in method.options:
                if option.kind is not str:
                    yield pytest.param(option, id=f"{method.name} {option.name}")


@pytest.mark.parametrize("option", list(options()))
def test_no_option_of_a_method_takes_a_number_that_it_could_not_apply(option: Option) -> None:
    for value in (*(str(v) for v in (math.nan, math.inf, 1e300)), HUGE, ENDLESS, "", "x", "1e400", *WRONG):
        if option.least is None and option.above is None and value in (-1, -0.5):
            continue
        if value == "1" or (value in ("", [1], {}) and option.kind is str):
            continue
        with pytest.raises(
            OptionError, match=rf"^{option.name} must be {option.range.wanted().split(' ')[0]} "
        ) as told:
            option.read(value)
        assert len(str(told.value)) < LONGEST
    assert option.read(str(option.range.most)) == option.range.most


@pytest.mark.parametrize("text", [HUGE, ENDLESS, f"{HUGE}%", f"{ENDLESS}%", f"{HUGE}.5%", "2147483648", "1000000.1%"])
def test_a_budget_is_a_number_of_tokens_that_there_can_be(text: str) -> None:
    with pytest.raises(CakeError, match=r"between 1 and 2,147,483,647|above 0 and at most 1,000,000") as told:
        Budget.parse(text)
    assert len(str(told.value)) < LONGEST
    assert Budget.parse("0" * 5000 + "64").count == 64


@pytest.mark.parametrize("text", [HUGE, ENDLESS, f"{HUGE}MiB", f"{ENDLESS}.5", "1048577TiB", "0", "0.5"])
def test_a_size_is_one_that_there_can_be(text: str) -> None:
    with pytest.raises(CakeError, match="between 1 byte and 1,048,576 TiB") as told:
        parse_bytes(text)
    assert len(str(told.value)) < LONGEST
    assert parse_bytes("1048576TiB") == 2**60


@pytest.mark.parametrize(
    ("numbers", "inside", "outside"),
    [
        (Range(1, 3), ["1", "3", " 2 ", "+2", "0_3"], ["0", "4", "2.0", "two", "", "2e0", ENDLESS]),
        (Range(1, 5, odd=True), ["1", "5"], ["2", "7"]),
        (Range(0, 1, float), ["0", "1", "1e-3", "-0"], ["-1e-9", "1.0000001", "nan", "inf", "1e400", "-1e400"]),
        (Range(0, 1, float, above=True), ["1e-300", "1"], ["0", "-0.0", "-1", "1.5"]),
    ],
)
def test_a_range_reads_what_it_has_and_nothing_else(numbers: Range, inside: list[str], outside: list[str]) -> None:
    for text in inside:
        assert numbers.parse(text) == numbers.kind(text)
    for text in outside:
        with pytest.raises(ValueError, match=r"^must be an? ") as told:
            numbers.parse(text)
        assert numbers.wanted() in str(told.value)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (5, "5"),
        (-123456, "-123,456"),
        (10**400, "a number of 401 digits"),
        pytest.param(-(10**5000), "a negative number of 5,001 digits", id="endless"),
        (True, "True"),
        (math.nan, "nan"),
        ("x" * 400, f"'{'x' * 29}... (400 characters)"),
        ([10**5000], "a list with a number that is too long to be written"),
    ],
)
def test_a_value_is_shown_in_a_few_words(value: object, words: str) -> None:
    assert shown(value) == words


def test_a_policy_in_a_comparison_reads_its_numbers_as_everywhere() -> None:
    made = Combination.parse("cake,recascade=1_28,pool=3", 32)
    assert made.config.recascade == 128
    assert Combination.parse("snapkv,pieces=64", 32).piece == 64
