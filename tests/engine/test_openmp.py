"""The threads that torch keeps for a caller are let go of, and come back when they are needed."""

from __future__ import annotations

import subprocess
import sys

import pytest
from cake_infer.engine import openmp

CODE = """
import os, sys, threading, time
import torch
from cake_infer.engine.openmp import _loaded, release_workers

def threads():
    return len(os.listdir("/proc/self/task"))

def work():
    return torch.randn(64, 4096, generator=torch.Generator().manual_seed(1)).exp().sum()

if not _loaded("libgomp"):
    sys.exit(77)
torch.set_num_threads(3)
first, many = work(), threads()
release_workers()
end = time.monotonic() + 20
while threads() > many - 2 and time.monotonic() < end:
    time.sleep(0.01)
few = threads()
again = []
other = threading.Thread(target=lambda: again.append(work()))
other.start()
other.join()
again.append(work())
print(many - few, torch.get_num_threads(), all(torch.equal(first, one) for one in again), threads() == many)
"""


def test_the_callers_waiting_threads_end_and_come_back_when_they_are_needed():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    if done.returncode == 77:
        pytest.skip("this torch has another OpenMP library")
    assert done.stdout == "2 3 True True\n", done.stderr


def test_libraries_are_told_by_the_names_of_their_files(tmp_path, monkeypatch):
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 r-xp 00000000 08:01 131  /a libgomp folder/libother.so\n"
        "7f02-7f03 r-xp 00000000 08:01 132  /a folder/libgomp-24e2ab19.so.1.0.0\n"
        "7f03-7f04 r--p 00001000 08:01 132  /a folder/libgomp-24e2ab19.so.1.0.0\n"
        "7f04-7f05 rw-p 00000000 00:00 0 \n"
    )
    monkeypatch.setattr(openmp, "MAPS", maps)
    assert openmp._loaded("libgomp") == {"/a folder/libgomp-24e2ab19.so.1.0.0"}
    openmp.release_workers()  # there is no such file: nothing happens
    monkeypatch.setattr(openmp, "MAPS", tmp_path / "none")
    assert openmp._loaded("libgomp") == set()
