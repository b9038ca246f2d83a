"""`cake-infer models` lists what there is without a network; `cake-infer import-gguf` makes a folder that loads."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cake_infer.cli import main
from cake_infer.engine.apps import models as models_app
from cake_infer.models.registry import ALIASES


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty caches for models, and a network that fails the test when it is used."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("CAKE_INFER_HOME", str(tmp_path / "home"))

    def refuse(*args: Any, **keywords: Any) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    return tmp_path


def _cache_tinyllama(root: Path) -> Path:
    storage = root / "hub" / "models--TinyLlama--TinyLlama-1.1B-Chat-v1.0"
    snapshot = storage / "snapshots" / ("c" * 40)
    snapshot.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json"):
        (snapshot / name).write_text("{}")
    (snapshot / "model.safetensors").write_bytes(b"x" * 12_340_000)
    return snapshot


def test_every_alias_is_listed_with_its_figures_and_whether_it_is_local(
    caches: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot = _cache_tinyllama(caches)
    assert main(["models", "--json"]) == 0
    entries = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert entries.keys() == ALIASES.keys()
    assert [name for name, entry in entries.items() if entry["local"]] == ["tinyllama"]
    assert entries["tinyllama"]["folder"] == str(snapshot)
    assert entries["tinyllama"]["bytes"] == 12_340_000
    assert entries["mistral-7b"] == {
        "name": "mistral-7b",
        "repository": "mistralai/Mistral-7B-Instruct-v0.3",
        "parameters": 7_248_023_552,
        "bytes": 14_496_047_104,
        "context": 32_768,
        "note": "",
        "local": False,
        "folder": None,
    }


def test_an_incomplete_or_broken_snapshot_is_not_local(caches: Path, capsys: pytest.CaptureFixture[str]) -> None:
    snapshot = _cache_tinyllama(caches)
    (snapshot / "model.safetensors.index.json").write_text("not json")
    assert main(["models", "--json"]) == 0
    assert not any(entry["local"] for entry in json.loads(capsys.readouterr().out))
    (snapshot / "model.safetensors.index.json").unlink()
    (snapshot / "model.safetensors").unlink()
    assert main(["models", "--json"]) == 0
    assert not any(entry["local"] for entry in json.loads(capsys.readouterr().out))


def test_the_table_is_aligned_with_figures_to_the_right(caches: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _cache_tinyllama(caches)
    assert main(["models"]) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(ALIASES)
    assert heading.split() == ["name", "repository", "parameters", "on", "disk", "context", "local"]
    by_name = {line.split()[0]: line for line in lines}
    figures = ["7.25B", "14.50", "GB", "32,768", "no"]
    assert by_name["mistral-7b"].split()[1:] == [ALIASES["mistral-7b"].repo, *figures]
    assert by_name["tinyllama"].split()[2:] == ["1.10B", "0.01", "GB", "2,048", "yes"]
    for column in ("parameters", "on disk", "context"):
        end = heading.index(column) + len(column)
        assert {line[end - 1 : end + 1].strip() != "" for line in lines} == {True}
        assert {line[end : end + 2] for line in lines} == {"  "}
    assert models_app.count(134_515_008) == "135M"


def test_a_gguf_is_imported_by_the_command_and_its_folder_printed(
    tmp_path: Path,
    gguf_source: Callable[..., Path],
    write_gguf: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write_gguf(tmp_path / "m.gguf", gguf_source())
    out = tmp_path / "out"
    assert main(["import-gguf", str(path), str(out), "--dtype", "float16"]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{out}\n"
    assert str(out) in captured.err
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "float16"
    assert main(["import-gguf", str(path), str(out)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: {out} exists and is not empty")
    assert captured.err.count("\n") == 1
    assert main(["import-gguf", str(path), str(tmp_path / "quiet"), "--quiet"]) == 0
    assert capsys.readouterr().err == ""


def test_a_broken_gguf_is_one_line_and_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF\3")
    assert main(["import-gguf", str(tmp_path / "m.gguf"), str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_listing_the_models_imports_neither_torch_nor_the_hub_client(caches: Path) -> None:
    script = """if True:
        import sys
        from cake_infer.cli import main
        main(["models"])
        sys.exit(", ".join({"torch", "tokenizers", "huggingface_hub", "gguf", "numpy"} & sys.modules.keys()) or 0)
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == len(ALIASES) + 1
