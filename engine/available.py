"""How much memory can still be had on this machine, in this container, on a device."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Available:
    """Bytes that can still be had, and who sets the limit."""

    bytes: int
    limit: str


def available_memory(device: str = "cpu", root: Path = Path("/")) -> Available | None:
    """What can be allocated now on a device; None where the system does not say. `root` is for tests.

    On a CPU the least of the machine's free memory (page cache counts as free) and of what every control group above
    this process (container, service) still allows; on a GPU its free memory.
    """
    if torch.device(device).type == "cuda":
        free, _ = torch.cuda.mem_get_info(torch.device(device))
        return Available(free, "the GPU")
    limits = [Available(free, "this machine") for free in _machine_free(root)]
    limits += [Available(free, "this container (its cgroup)") for free in _cgroup_free(root)]
    return min(limits, key=lambda limit: limit.bytes, default=None)


def _machine_free(root: Path) -> list[int]:
    """MemAvailable of /proc/meminfo, else (no Linux) the physical memory."""
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return [int(line.split()[1]) * 1024]
    except OSError:
        pass
    try:
        return [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    except (OSError, ValueError, AttributeError):
        return []


def _cgroup_free(root: Path) -> list[int]:
    """What each memory control group of this process, version 1 or 2, and each one above it still allows."""
    free: list[int] = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return free
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = top / path.lstrip("/")
        # inside a container the path may be the host's: then only the top is there, and it is the container's own
        for folder in [group, *group.parents]:
            if not folder.is_relative_to(top):
                break
            room = _group_free(folder, *names)
            if room is not None:
                free.append(room)
    return free


def _group_free(folder: Path, limit_name: str, usage_name: str, cache_name: str) -> int | None:
    """Limit minus usage of one group, its droppable page cache counted as free; None without a limit."""
    try:
        limit = (folder / limit_name).read_text().strip()
        usage = int((folder / usage_name).read_text())
        cached = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if limit == "max" or int(limit) >= 1 << 60:  # version 1 writes a huge number for none
        return None
    return max(0, int(limit) - usage + int(cached.get(cache_name, 0)))
