"""A folder that appears whole or not at all: written beside its target, renamed at the end."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import CakeError, MemoryLimit

_MARK = ".partial-"


def check_new_folder(target: Path) -> None:
    """Refuse a target that holds anything already; a missing or empty folder is fine."""
    if target.is_dir():
        if any(target.iterdir()):
            raise CakeError(f"{target} exists and is not empty: name a new folder, or remove this one first")
    elif target.exists() or target.is_symlink():
        raise CakeError(f"{target} exists and is not a folder: name a new folder")


def check_disk_space(folder: Path, needed: int, what: str) -> None:
    """Raise MemoryLimit with both figures unless the disk under `folder` (or its nearest parent) has `needed` bytes."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed:
        raise MemoryLimit(
            f"{what} needs {needed / 1e6:,.0f} MB of disk at {place}, {free / 1e6:,.0f} MB are free: "
            "free some space, or choose another place"
        )


@contextmanager
def staged_folder(target: Path, *, keep_existing: bool = False) -> Iterator[Path]:
    """Yield a temporary folder beside `target` that is renamed to it when the block ends without an error.

    After an error or an interrupt the temporary folder is removed and `target` is as it was. If another process has
    made the target meanwhile, its folder stays (`keep_existing`), or CakeError is raised.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}{_MARK}", dir=target.parent))
    except OSError as error:
        raise CakeError(f"cannot write beside {target}: {error.strerror or error}") from error
    try:
        yield staging
        staging.chmod(0o777 & ~_umask())
        try:
            os.rename(staging, target)  # an empty folder is replaced, a filled one refuses
        except OSError as error:
            if not (keep_existing and target.is_dir()):
                raise CakeError(f"cannot place the result at {target}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def remove_leftovers(target: Path) -> None:
    """Remove temporary folders that killed processes left beside `target`; the caller holds the target's lock."""
    for leftover in target.parent.glob(f".{target.name}{_MARK}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
