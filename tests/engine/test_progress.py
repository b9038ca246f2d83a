"""The progress bar: what it shows, when, and that it shows nothing where nobody looks."""

from __future__ import annotations

import io
import os
import sys

import pytest
from cake_infer.engine.apps.console import Console
from cake_infer.engine.apps.progress import CLEAR_LINE, ProgressBar, duration
from cake_infer.engine.loading import stage_reporter
from cake_infer.engine.results import Progress


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def shown(stream: io.StringIO) -> list[str]:
    """Everything that was drawn; an empty string where the bar was taken away."""
    return stream.getvalue().split(CLEAR_LINE)[1:]


def test_the_time_left_follows_from_the_rate_of_this_stage(clock: Clock) -> None:
    stream = io.StringIO()
    bar = ProgressBar(stream, clock)
    bar(Progress("prefill", 100, 1000, 0, 10))
    clock.now += 20
    bar(Progress("prefill", 300, 1000, 3, 10))  # 200 in 20 s: 700 take 70
    assert shown(stream) == ["reading  [#######.................]  30%  layer 4/10  1m 10s left"]


def test_a_finished_stage_takes_the_bar_away(clock: Clock) -> None:
    stream = io.StringIO()
    bar = ProgressBar(stream, clock)
    bar(Progress("download", 0, 100))
    clock.now += 1
    bar(Progress("download", 50, 100))
    bar(Progress("download", 100, 100))
    assert [line[:11] for line in shown(stream)] == ["downloading", ""]


def test_a_quick_stage_never_shows_and_a_slow_one_is_not_drawn_at_every_step(clock: Clock) -> None:
    stream = io.StringIO()
    bar = ProgressBar(stream, clock)
    for done in range(40):
        clock.now += 0.01
        bar(Progress("load", done, 1000))
    assert shown(stream) == []
    for done in range(40, 140):
        clock.now += 0.01
        bar(Progress("load", done, 1000))
    assert 7 <= len(shown(stream)) <= 11


def test_the_next_turn_starts_its_own_clock(clock: Clock) -> None:
    stream = io.StringIO()
    bar = ProgressBar(stream, clock)
    bar(Progress("prefill", 90, 100, 9, 10))
    clock.now += 1000
    bar(Progress("prefill", 0, 100, 0, 10))
    clock.now += 1
    bar(Progress("prefill", 50, 100, 5, 10))
    assert shown(stream)[-1].endswith("1s left")


def test_an_unknown_total_shows_the_time_that_has_passed(clock: Clock) -> None:
    stream = io.StringIO()
    bar = ProgressBar(stream, clock)
    bar.update("import", 1, 0)
    clock.now += 75
    bar.update("import", 2, 0)
    assert shown(stream) == ["importing  1m 15s"]


def test_nothing_is_drawn_without_a_terminal_or_on_one_that_has_gone(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    bar = ProgressBar(None, clock)
    bar(Progress("load", 1, 2))
    bar.clear()
    stream = io.StringIO()
    gone = ProgressBar(stream, clock)
    gone(Progress("load", 0, 10))
    stream.close()
    clock.now += 1
    gone(Progress("load", 1, 10))
    gone.clear()
    assert capsys.readouterr() == ("", "")  # nor anywhere else


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0s"), (59.4, "59s"), (60, "1m 00s"), (3599, "59m 59s"), (3600, "1h 00m"), (9999, "2h 46m")],
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_loading_is_reported_once_for_each_percent() -> None:
    seen: list[Progress] = []
    report = stage_reporter(seen.append)
    assert report is not None
    for done in range(0, 1001, 5):  # as many tensors, most of them small
        report("load", done, 1000)
    report("fetch", 0, 1000)  # another stage begins anew
    assert [(event.stage, event.done // 10) for event in seen] == [("load", n) for n in range(101)] + [("download", 0)]


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        (80, "reading  [############............]  50%  layer 6/10  1s left"),
        (62, "reading  [############............]  50%  layer 6/10  1s left"),
        (61, "reading   50%  layer 6/10  1s left"),
        (20, "reading   50%  laye"),
    ],
)
def test_the_line_never_wraps(clock: Clock, monkeypatch: pytest.MonkeyPatch, columns: int, line: str) -> None:
    monkeypatch.setattr(os, "get_terminal_size", lambda descriptor: os.terminal_size((columns, 24)))
    stream = Terminal()
    bar = ProgressBar(stream, clock)
    bar(Progress("prefill", 0, 100, 0, 10))
    clock.now += 1
    bar(Progress("prefill", 50, 100, 5, 10))
    assert shown(stream) == [line]


class Terminal(io.StringIO):
    def fileno(self) -> int:
        return 2

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("name", "drawn"), [("xterm", True), ("dumb", False)])
def test_a_terminal_that_cannot_take_a_line_away_gets_no_bar_and_no_colour(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, name: str, drawn: bool
) -> None:
    monkeypatch.setenv("TERM", name)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    with Console() as console:
        console.progress._clock = clock
        console.progress.update("load", 0, 100)
        clock.now += 0.55
        console.progress.update("load", 50, 100)
        console.notice("a notice")
    assert ("loading" in stream.getvalue()) is drawn
    assert ("\x1b" in stream.getvalue()) is drawn
