"""Making the environment: one clear line where it cannot be made, and nothing of the user's is removed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def make_venv(python: str | Path, venv: Path) -> subprocess.CompletedProcess[str]:
    command = ["sh", str(ROOT / ".ci" / "venv"), str(python), str(venv)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def fake_python(tmp_path: Path) -> Callable[..., Path]:
    """A function that writes a command which answers --version and fails for code that holds a certain word."""

    def write(fails_at: str, version: str = "3.12.1") -> Path:
        path = tmp_path / "python"
        path.write_text(
            f'#!/bin/sh\ncase "$*" in\n--version) echo "Python {version}";;\n*{fails_at}*) exit 1;;\nesac\nexit 0\n'
        )
        path.chmod(0o755)
        return path

    return write


def test_no_python_is_one_line(tmp_path: Path) -> None:
    answer = make_venv("python-that-is-not-there", tmp_path / "venv")
    assert answer.returncode == 1
    (line,) = answer.stderr.splitlines()
    assert "python-that-is-not-there" in line
    assert "make PYTHON=" in line


def test_an_old_python_is_one_line_with_both_versions(fake_python: Callable[..., Path], tmp_path: Path) -> None:
    answer = make_venv(fake_python("version_info", "3.9.2"), tmp_path / "venv")
    assert answer.returncode == 1
    (line,) = answer.stderr.splitlines()
    assert "3.9.2" in line
    assert "3.11" in line


def test_a_python_without_ensurepip_is_one_line(fake_python: Callable[..., Path], tmp_path: Path) -> None:
    answer = make_venv(fake_python("ensurepip"), tmp_path / "venv")
    assert answer.returncode == 1
    (line,) = answer.stderr.splitlines()
    assert "python3-venv" in line
    assert not (tmp_path / "venv").exists()


def test_a_folder_of_the_users_is_not_cleared(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "letter.txt").write_text("keep me")
    answer = make_venv(sys.executable, folder)
    assert answer.returncode == 1
    assert "not a virtual environment" in answer.stderr
    assert (folder / "letter.txt").read_text() == "keep me"


def test_a_half_made_environment_is_made_again_and_a_whole_one_is_kept(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    venv.mkdir()
    (venv / "pyvenv.cfg").write_text("home = /nowhere\n")
    assert make_venv(sys.executable, venv).returncode == 0
    pip = subprocess.run([venv / "bin" / "python", "-m", "pip", "--version"], check=False, capture_output=True)
    assert pip.returncode == 0
    (venv / "mark").write_text("here")
    assert make_venv(sys.executable, venv).returncode == 0
    assert (venv / "mark").exists()
