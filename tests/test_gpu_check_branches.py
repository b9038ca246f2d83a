"""What the check of a GPU does there and in no dry run: its timed parts on a GPU that is not there, at tiny shapes.

Tensors of the host among those of the device, options that are refused and figures that nobody works out would show on
the day of the real run alone.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
TESTS = Path(__file__).parent


@pytest.fixture
def run_part(monkeypatch):
    """A function that runs a part and gives its rows."""
    monkeypatch.syspath_prepend(str(TESTS / "gpu"))
    spec = importlib.util.spec_from_file_location("fake_gpu", TESTS / "engine" / "fake_gpu.py")
    fake = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "fake_gpu", fake)
    spec.loader.exec_module(fake)
    import reading
    import setting
    import shapes
    import works

    class Check(setting.Check):
        device = property(lambda self: torch.device(fake.GPU))

    scale = replace(
        shapes.DRY,
        dry=False,
        large={**shapes.TINY, "num_attention_heads": 8, "head_dim": 64},
        contexts=(64, 200),
        prefills=(80, 120),
        repeats=(2, 1),
        budget=48,
        window=8,
        new_tokens=4,
        dtype="bfloat16",
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        with fake.fake_gpu(monkeypatch) as watch:

            def reset() -> None:
                watch.peak = watch.alive

            for name, stand_in in {
                "is_available": lambda: True,
                "synchronize": lambda *_: None,
                "memory_allocated": lambda *_: watch.alive,
                "max_memory_allocated": lambda *_: watch.peak,
                "reset_peak_memory_stats": reset,
                "set_sync_debug_mode": lambda mode: setattr(watch, "waiting", mode != "error"),
            }.items():
                monkeypatch.setattr(torch.cuda, name, stand_in)
            every = SimpleNamespace(isfinite=lambda _: SimpleNamespace(all=lambda: True), cuda=torch.cuda)
            monkeypatch.setattr(reading, "torch", every)

            @contextlib.contextmanager
            def calls(_):
                """The waits that are watched, in place of the profiler's, and as many as it would have of its own."""
                watch.waits.clear()
                yield lambda *_: sum(watch.waits.values()) + 3

            monkeypatch.setattr(reading, "calls", calls)

            def run(part):
                rows = []
                assert Check(scale, tell_row=rows.append).run(part, works.PARTS[part])
                wrong = [row.line for row in rows if isinstance(row.value, str) and row.ok is False]
                assert not wrong, "something was raised"
                return {row.name: row for row in rows}

            yield run


def test_decode(run_part):
    rows = run_part("decode")
    for context in (64, 200):
        for policy, batches in (("cake", (1, 4, 8)), ("full", (1, 4))):
            for batch in batches:
                assert rows[f"{policy}, {context} tokens, batch {batch}"].value > 0
    assert rows["cake, hold, 200 tokens, batch 1"].value > 0
    judged = {name for name, row in rows.items() if row.ok is not None}
    assert judged == {
        "cake, 64 tokens, batch 1: share of a copy",
        "full, 64 tokens, batch 1: share of a copy",
        "CAKE over full, 200 tokens, batch 1",
        "CAKE over full, 200 tokens, batch 4",
    }


def test_packed(run_part):
    rows = run_part("packed")
    for bits in (8, 4, 2):
        for policy in ("full", "cake"):
            name = f"{policy} in {bits} bits, 200 tokens, batch 1"
            assert rows[name].value > 0
            assert rows[f"{name}: what waits in 40 steps"].value == "nothing"


def test_int8(run_part):
    assert run_part("int8")["int8 over bf16, batch 1"].ok is not None


def test_prefill(run_part):
    rows = run_part("prefill")
    for count in (80, 120):
        for policy in ("cake", "full"):
            assert rows[f"{count} tokens: KV arena, {policy}"].ok
            assert rows[f"{count} tokens: peak above weights, {policy}"].ok
            assert rows[f"{count} tokens: prefill, {policy}"].value > 0
        assert rows[f"{count} tokens: CAKE over full"].bar == "at most 1.03"
    # one for each layer, and some for all of them: ids and frequencies
    assert rows["80 tokens: waits in 2 layers, CAKE"].value <= 2 + 5 + 3
    assert rows["120 tokens: prefill, policy auto"].value > 0
    assert rows["120 tokens: prefill, chunks of 512"].value > 0
