"""Work in the background: whoever waits can leave at once, and finds the same work when coming back."""

from __future__ import annotations

import threading

import pytest
from cake_infer.engine.background import Background


def test_the_wait_ends_at_once_and_the_work_goes_on() -> None:
    release, runs = threading.Event(), []

    def work() -> None:
        runs.append(1)
        release.wait(60)

    def leave() -> None:
        raise KeyboardInterrupt

    background = Background(work, name="test")
    with pytest.raises(KeyboardInterrupt):
        background.wait(leave)
    assert not background.done
    release.set()
    background.wait(lambda: None)
    assert background.done
    assert runs == [1]


def test_what_the_work_raises_is_raised_to_everybody_who_waits() -> None:
    def work() -> None:
        raise ValueError("broken")

    background = Background(work, name="test")
    for _ in range(2):
        with pytest.raises(ValueError, match="broken"):
            background.wait()
