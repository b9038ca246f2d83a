"""A kernel that was compiled runs, whether it could be kept or not."""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cake_infer.engine import compiling, kernels
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


def holds(lock: Path) -> bool:
    """Whether another process would have to wait."""
    code = "import fcntl, sys; fcntl.flock(open(sys.argv[1], 'ab'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    return b"BlockingIOError" in subprocess.run([sys.executable, "-c", code, lock], capture_output=True).stderr


def test_two_processes_do_not_compile_the_same_nor_keep_anything_at_the_same_time(
    marked: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Numba reads its index of a function, takes a free file name, and writes both: two at once took the same name."""
    monkeypatch.setattr(kernels, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    function = numba.njit(cache=True)(double)
    compiler, kept = function._compiler.compile, function._cache._cache_file.save
    seen = []

    def compile_(*arguments: Any) -> Any:
        seen.append(("compiles", holds(tmp_path / "double.lock"), holds(tmp_path / "index.lock")))
        return compiler(*arguments)

    def save(*arguments: Any) -> Any:
        seen.append(("keeps", holds(tmp_path / "double.lock"), holds(tmp_path / "index.lock")))
        return kept(*arguments)

    monkeypatch.setattr(function._compiler, "compile", compile_)
    monkeypatch.setattr(function._cache._cache_file, "save", save)
    for _ in range(2):  # whoever loads the function again does not lock twice: it would wait for itself
        kernels.keep_alone(function._cache)
    assert ensure(function) == [2.0, 4.0]
    assert seen == [("compiles", True, False), ("keeps", True, True)]
    assert not holds(tmp_path / "double.lock")
    assert not holds(tmp_path / "index.lock")


KERNEL = """
import numba

@numba.njit(cache=True)
def twice(x):
    return 2 * x
"""


def test_another_installation_of_the_same_sources_compiles_nothing_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Numba alone goes by path and time of a file: each checkout, and each reinstallation, compiled for a minute."""
    folder = tmp_path / "of-these-sources"
    folder.mkdir()
    monkeypatch.setattr(kernels, "cache_folder", lambda: folder)
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(folder))
    hits = []
    for number, place in enumerate(("one", "other", "other")):
        path = tmp_path / place / "kernel.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(KERNEL)
        os.utime(path, (number * 1000, number * 1000))
        spec = importlib.util.spec_from_file_location("kernel_of_a_test", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "kernel_of_a_test", module)
        spec.loader.exec_module(module)
        kernels.keep_by_sources(module.twice._cache)
        kernels.keep_alone(module.twice._cache)
        assert module.twice(4) == 8
        hits.append(sum(module.twice.stats.cache_hits.values()))
    assert hits == [0, 1, 1]
    assert {path.parent for path in tmp_path.rglob("*.nbi")} == {folder}
    assert list(folder.glob("kernels_*")) == []


@pytest.mark.parametrize("name", ["decode_step", "window_pass", "read_layer", "head"])
def test_what_is_compiled_for_a_model_is_kept_by_one_process_at_a_time(name: str) -> None:
    module = {"decode_step": kernels.load_step, "window_pass": kernels.load_window}.get(name, kernels.load_short)()
    assert getattr(module, name)._cache.save_overload.alone


def test_where_nothing_can_be_locked_nobody_waits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kernels, "cache_folder", lambda: tmp_path / "missing")
    with kernels.locked("double"):
        pass
