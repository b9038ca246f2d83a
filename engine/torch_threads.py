"""How many of torch's threads work on a CPU: all of them in a prefill, the caller's alone beside a decode step."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from typing import TypeVar

import torch

Stop = TypeVar("Stop")
Result = TypeVar("Result")


class TorchThreads:
    """What torch was set to when this was made; nothing is done on other devices.

    A thread that asks torch while another one samples would see 1: hence the number is remembered.
    """

    def __init__(self, device: torch.device) -> None:
        self._count = torch.get_num_threads() if device.type == "cpu" else None

    def all(self) -> None:
        """Let torch use all the threads that a prefill should."""
        if self._count is not None:
            torch.set_num_threads(self._count)

    @contextmanager
    def one(self) -> Iterator[None]:
        """torch works in the calling thread alone: a row of logits needs no other, and torch's would spin on beside
        those of the next step. A prefill asks for `all` of them again."""
        if self._count is None:
            yield
            return
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(self._count)

    def one_between(self, steps: Generator[Stop, None, Result]) -> Generator[Stop, None, Result]:
        """A generator's work with `one`, where compiled code has threads of its own; whoever it stops for has all."""
        with closing(steps):
            while True:
                with self.one():
                    try:
                        stop = next(steps)
                    except StopIteration as end:
                        result: Result = end.value
                        return result
                yield stop
