"""How many of torch's threads work on a CPU: all of them in a prefill, the caller's alone beside a decode step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


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
