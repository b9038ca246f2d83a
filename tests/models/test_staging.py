"""A folder appears whole or not at all, and what killed processes left is removed, but nothing that is in use."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cake_infer.models.config import read_config
from cake_infer.models.packed import load_quantised, packed_folder
from cake_infer.models.staging import remove_leftovers, staged_folder

WRITER = """
import sys, time
from pathlib import Path
from cake_infer.models.staging import staged_folder
with staged_folder(Path(sys.argv[1])) as staging:
    (staging / "half").write_text("half")
    print(staging, flush=True)
    time.sleep(60)
"""


def killed(target: Path) -> Path:
    """The folder that a killed process leaves, a while later."""
    with subprocess.Popen([sys.executable, "-c", WRITER, str(target)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        staging = Path(process.stdout.readline().strip())
        age(staging)
        remove_leftovers(target.parent)
        assert staging.is_dir(), "the folder of a process that is at work was removed"
        process.send_signal(signal.SIGKILL)
    assert (staging / "half").is_file()
    return staging


def age(folder: Path) -> None:
    os.utime(folder, (time.time() - 60,) * 2)


def test_what_a_killed_process_left_is_removed_the_next_time(tmp_path: Path) -> None:
    target = tmp_path / "model"
    staging = killed(target)
    with staged_folder(target) as other:
        assert not staging.exists()
        (other / "file").write_text("whole")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (target / "file").read_text() == "whole"


def test_only_leftovers_of_the_same_target_are_touched_beside_a_users_folder(tmp_path: Path) -> None:
    others = [tmp_path / ".models.partial-x", tmp_path / ".model.partially", tmp_path / "model.partial-x"]
    for folder in others:
        folder.mkdir()
        age(folder)
    with staged_folder(tmp_path / "model"):
        pass
    assert all(folder.is_dir() for folder in others)


def test_a_folder_that_is_being_written_stays_and_so_does_a_new_one(tmp_path: Path) -> None:
    new = tmp_path / ".model.partial-new"
    new.mkdir()
    with staged_folder(tmp_path / "model", keep_existing=True) as first:
        age(first)
        with staged_folder(tmp_path / "model", keep_existing=True) as second:
            assert first.is_dir()
            assert new.is_dir()
            assert first != second


@pytest.mark.parametrize("packed_before", [False, True])
def test_loading_packed_weights_removes_what_a_killed_packing_left(
    packed_before: bool, tmp_path: Path, write_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAKE_INFER_HOME", str(tmp_path / "home"))
    folder = write_checkpoint(tmp_path / "model")
    target = packed_folder(folder, "int8")
    if packed_before:
        load_quantised(folder, read_config(folder), "int8")
    own, another = (target.parent / f".{name}.partial-x" for name in (target.name, "another-int4-0"))
    for leftover in (own, another):
        leftover.mkdir(parents=True)
        (leftover / "weights.safetensors").write_bytes(b"half")
        age(leftover)
    load_quantised(folder, read_config(folder), "int8")
    assert [path.name for path in target.parent.iterdir()] == [target.name]
