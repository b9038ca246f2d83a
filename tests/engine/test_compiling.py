"""A kernel that was compiled runs, whether it could be kept or not."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from cake_infer.engine import compiling
from cake_infer.engine.compiling import Compiling

numba = pytest.importorskip("numba", reason="the compiled step needs the extra cpu")


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds that are remembered as kept."""
    kinds: list[str] = []
    monkeypatch.setattr(compiling, "mark_cached", kinds.append)
    monkeypatch.setattr(compiling, "kernels_cached", lambda kind: False)
    return kinds


def double(number: int, counter: Any, values: Any) -> None:
    for i in range(len(values)):
        values[i] *= 2


def ensure(function: Any) -> list[float]:
    values, counter = np.array([1.0, 2.0]), np.zeros(2, dtype=np.int64)
    Compiling().ensure("double", function, (values,), what="double", seconds=1)
    function.disable_compile()
    function(0, counter, values)
    return list(values)


def test_a_full_disk_takes_the_cache_and_not_the_run(
    marked: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    function = numba.njit(double)

    def full(signature: object, compiled: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(function._cache, "save_overload", full, raising=False)
    with caplog.at_level(logging.WARNING):
        assert ensure(function) == [2.0, 4.0]
    assert "cannot be kept ([Errno 28] No space left on device): the next start compiles it anew" in caplog.text
    assert marked == []


def test_what_was_kept_is_remembered(marked: list[str]) -> None:
    assert ensure(numba.njit(double)) == [2.0, 4.0]
    assert marked == ["double"]


def test_a_compilation_that_fails_is_not_taken_for_one_that_could_not_be_kept(
    marked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    function = numba.njit(double)

    def broken(arguments: object, result: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(function._compiler, "compile", broken)
    with pytest.raises(OSError, match="Input/output"):
        ensure(function)
    assert marked == []
