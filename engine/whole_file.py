"""A small file that is there whole or as it was before: written beside its place, renamed at the end."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from ..cache.saved_file import place_beside


def write_whole(path: Path, data: bytes) -> None:
    """Put `data` at `path`, links followed, in place of what is there, whose permissions stay. Raises OSError.

    On a full disk, or killed meanwhile, the old file is left as it was.
    """
    target = Path(os.path.realpath(path))
    beside = place_beside(target)
    try:
        with open(beside, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            os.chmod(beside, stat.S_IMODE(target.stat().st_mode))
        os.replace(beside, target)
    finally:
        with suppress(OSError):
            beside.unlink()
