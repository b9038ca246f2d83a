"""Parts of the check one after another in a process of their own.

An illegal access on a GPU spoils its process for good, a kernel that never ends would hold everything up, and some
errors end a process. So parts run in children, which say each line as they have it: what a part has found stays found
whatever becomes of it, and another child goes on with the parts behind it.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from setting import Check, register, use_interpreter
from shapes import DRY, GPU
from table import Row, Table

SCRIPT = Path(__file__).with_name("check.py")
STARTS_IN = 90.0  # seconds that a child may take before its first part, of which torch takes most


class Lane(threading.Thread):
    """Runs parts in a child, and those that are left in another one where it has ended too early.

    limit: seconds that one part may take. deadline: on time.monotonic's clock, when whatever runs is ended.
    """

    def __init__(
        self,
        parts: Sequence[str],
        table: Table,
        lock: threading.Lock,
        *,
        limit: float,
        deadline: float,
        options: Sequence[str] = (),
    ) -> None:
        super().__init__(daemon=True)
        self.left, self.table, self.lock = list(parts), table, lock
        self.limit, self.deadline, self.options = limit, deadline, list(options)
        self.refused = ""  # why nothing can run on this machine
        self.over = threading.Event()  # a join that is interrupted may take a thread for ended
        self._child: subprocess.Popen[str] | None = None
        self._part = ""  # that is running

    def run(self) -> None:
        try:
            self._run()
        finally:
            self.over.set()

    def _run(self) -> None:
        why = ""
        while self.left and time.monotonic() < self.deadline:
            before = len(self.left)
            why = self._one_child()
            if self._part:
                self._tell(self._part, "ended", why)
                self.left.remove(self._part)
            if self.refused:
                return
            if len(self.left) == before:
                break  # it did not come as far as a part: another one would not either
        for part in self.left:
            self._tell(part, "not run", "out of time" if time.monotonic() >= self.deadline else why)

    def end(self) -> None:
        """End the child at once."""
        self.deadline = 0.0
        if self._child is not None:
            self._child.kill()

    def _one_child(self) -> str:
        """Run as many parts as one child does. Returns why it ended before all were done."""
        self._part = ""
        command = [sys.executable, str(SCRIPT), "--child", *self.options, "--", *self.left]
        with self.lock:
            found = json.dumps(self.table.found)
        self._child = child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(found)
        child.stdin.close()
        said: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=_pass_on, args=(child.stdout, said.put), daemon=True).start()
        until = time.monotonic() + STARTS_IN if self.limit < float("inf") else self.limit
        while True:
            ends = min(until, self.deadline)
            try:
                line = said.get(timeout=None if ends == float("inf") else max(0.0, ends - time.monotonic()))
            except queue.Empty:
                child.kill()
                child.wait()
                return "out of time" if ends == self.deadline else "took too long: was ended"
            if line is None:
                status = child.wait()
                return f"the process ended with {status}" if self.left or status else ""
            message = json.loads(line)
            if "refused" in message:
                self.refused = message["refused"]
            if "about" in message:
                with self.lock:
                    self.table.about = message["about"]
            if "part" in message:
                self._part, until = message["part"], time.monotonic() + self.limit
            if "row" in message:
                with self.lock:
                    self._add(Row(**message["row"]))
            if "done" in message:
                self.left.remove(message["done"])
                self._part = ""
                with self.lock:
                    self.table.found |= message["found"]

    def _tell(self, part: str, name: str, why: str) -> None:
        with self.lock:
            self._add(Row(part, name, why, ok=False))

    def _add(self, row: Row) -> None:
        print(f"{row.part:<10}{row.line}", file=sys.stderr, flush=True)
        self.table.add(row)


def _pass_on(lines: Any, put: Callable[[str | None], None]) -> None:
    for line in lines:
        put(line)
    put(None)


def child(parts: Sequence[str], *, dry: bool, model: str | None) -> int:
    """What a child does: run the parts, saying every row on stdout as a line of JSON; stdin has what was found before.

    Returns 3 where the device answers no more and parts are left, 1 where there is none.
    """
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print is no part of it

    def say(**message: Any) -> None:
        print(json.dumps(message), file=channel, flush=True)

    check = Check(DRY if dry else GPU, model=model, found=json.loads(sys.stdin.read() or "{}"))
    check.tell_row = lambda row: say(row=asdict(row))
    use_interpreter(dry)
    register()
    import torch

    if not dry and not torch.cuda.is_available():
        say(refused="there is no CUDA device here; --dry runs the functions on a CPU")
        return 1
    say(about=about(dry))
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    import works

    for number, part in enumerate(parts, 1):
        say(part=part)
        well = check.run(part, works.PARTS[part])
        say(done=part, found=check.found)
        if not well and number < len(parts):
            return 3
    return 0


def about(dry: bool) -> dict[str, object]:
    """The card and what it is run with."""
    import torch

    found: dict[str, object] = {"name": "cpu" if dry else torch.cuda.get_device_name()}
    for name in ("torch", "triton", "transformers", "flash-attn", "numba"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found | {"python": platform.python_version(), "cuda": torch.version.cuda}
