"""A folder that appears whole or not at all: written beside its target, renamed at the end."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import CakeError, MemoryLimit

_MARK = ".partial-"
_YOUNG_S = 2.0  # between its making and its locking a folder is in use, and not locked


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
    made the target meanwhile, its folder stays (`keep_existing`), or CakeError is raised. The folder is locked while it
    is written, so that what a killed process left behind can be told from it; such folders of the same target are
    removed first.
    """
    remove_leftovers(target.parent, target.name)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}{_MARK}", dir=target.parent))
    except OSError as error:
        raise CakeError(f"cannot write beside {target}: {error.strerror or error}") from error
    lock = _locked(staging)
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
        if lock is not None:
            os.close(lock)


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """Remove temporary folders that killed processes left in `folder`: of the target `name`, or of any.

    A folder that somebody still writes is locked and stays, as does one where folders cannot be locked.
    """
    with suppress(OSError):
        for leftover in folder.iterdir():
            mine = name is None or leftover.name.startswith(f".{name}{_MARK}")
            if not (mine and leftover.name.startswith(".") and _MARK in leftover.name):
                continue
            with suppress(OSError):
                if time.time() - leftover.stat().st_mtime < _YOUNG_S or leftover.is_symlink():
                    continue
                lock = _locked(leftover)
                if lock is not None:
                    shutil.rmtree(leftover, ignore_errors=True)
                    os.close(lock)


def _locked(folder: Path) -> int | None:
    """A descriptor that holds the folder's lock until it is closed; None where it is taken or cannot be had."""
    try:
        import fcntl

        descriptor = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
