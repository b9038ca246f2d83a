"""The script that checks a GPU, at tiny shapes on a CPU: every part of it runs, and what is wrong is told."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "gpu"
PARTS = {
    "kernels",
    "ids",
    "batch",
    "families",
    "text",
    "launches",
    "bandwidth",
    "decode",
    "int8",
    "small",
    "prefill",
    "peers",
}


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The script in a process of its own, from a folder of no meaning and without this one's paths."""
    return subprocess.run(
        [sys.executable, str(FOLDER / "check.py"), *arguments],
        capture_output=True,
        text=True,
        cwd="/",
        env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        timeout=300,
    )


def test_every_part_runs_dry_and_what_is_worked_out_is_right():
    pytest.importorskip("triton")
    done = check("--dry")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["missed"] == []
    assert {name.partition(":")[0] for name in found["values"]} == PARTS
    for part, name in {
        "ids": "hold, sampled: graph's ids are the eager step's",
        "batch": "grow: ids of a batch are those of each alone",
        "kernels": "hold float32: slots exchanged as in torch",
    }.items():
        assert found["values"][f"{part}: {name}"] == "True"
    for name in ("decode: CAKE over full, batch 4", "prefill: 40 tokens: CAKE over full", "small: graph over eager"):
        assert found["values"][name] > 0


def test_every_kernel_compiles_for_a_gpu_that_is_not_there():
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "PYTHONPATH")}
    done = subprocess.run(
        [sys.executable, str(FOLDER / "compiles.py")], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    compiled = json.loads(done.stdout.splitlines()[-1])["compiled"]
    written = {
        name
        for folder in ("cache", "engine", "models")
        for path in (FOLDER.parents[1] / folder).rglob("triton_*.py")
        for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.MULTILINE)
    }
    assert set(compiled) == written, "a kernel is never launched here"


def test_a_part_can_be_chosen_and_an_unknown_one_is_refused():
    done = check("--dry", "bandwidth")
    assert done.returncode == 0
    assert {name.partition(":")[0] for name in json.loads(done.stdout.splitlines()[-1])["values"]} == {"bandwidth"}
    assert check("--dry", "nothing").returncode == 2


def test_a_part_that_fails_is_told_and_does_not_hide_the_others(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(FOLDER))
    import setting

    def broken(_):
        raise ValueError("a kernel went wrong\nsomewhere")

    one = setting.Check(setting.GPU)
    one.run("first", broken)
    one.run("second", lambda found: found.measured("figure", 1.5, "x", "at least 2", False))
    assert setting.report(one, 1.0, "card") == 1
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["missed"] == ["first: raised", "second: figure"]
    assert last["values"]["first: raised"] == "ValueError: a kernel went wrong"
    good = setting.Check(setting.GPU)
    good.run("first", lambda found: found.tell("figure", 1.5, ok=True))
    assert setting.report(good, 1.0, "card") == 0
