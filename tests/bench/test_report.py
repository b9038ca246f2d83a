"""A bench script's figures."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_the_ceiling_comes_first_and_the_last_line_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("bench_report", ROOT / "bench" / "report.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    returned = module.report("memory", "S=2048", 120.0, "MiB", 100.0, {"peer": 240.0, "absent": 0.0}, budget=512)
    lines = capsys.readouterr().out.splitlines()
    assert "ceiling" in lines[1]
    assert "measured" in lines[2]
    assert json.loads(lines[-1]) == returned
    assert returned["share"] == pytest.approx(1.2)
    assert returned["ratio"] == {"peer": 0.5}
    assert returned["budget"] == 512
    assert module.report("memory", "no ceiling", 1.0, "s", None)["share"] is None
