"""The hub's cache on this machine, read without the network and without huggingface_hub's own view of it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from .embedded import in_home
from .hub_files import absent_files

_COMMIT = re.compile(r"[0-9a-f]{40}")


def hub_cache_folder() -> Path:
    """Where hub models are kept: HF_HUB_CACHE, else HF_HOME/hub, else huggingface/hub in the user's cache."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(variable):
            return _expanded(os.environ[variable])
    if os.environ.get("HF_HOME"):
        return _expanded(os.environ["HF_HOME"]) / "hub"
    return _expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface" / "hub"


def offline() -> bool:
    """Whether HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE) forbids the network."""
    value = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return value.upper() in ("1", "ON", "YES", "TRUE")


def _expanded(path: str) -> Path:
    return in_home(os.path.expandvars(path), "HF_HOME")


@dataclass(frozen=True)
class Cached:
    """What the cache has for one repository and revision.

    `snapshot` is the folder, None where nothing (or nothing certain) is there; `absent` are the files it lacks;
    `commits` are all cached snapshots, for an error that must ask which.
    """

    snapshot: Path | None
    absent: tuple[Path, ...]
    commits: tuple[str, ...]

    @property
    def complete(self) -> bool:
        return self.snapshot is not None and not self.absent


def cached(repo: str, revision: str | None = None) -> Cached:
    """Look `repo` up in the cache; `revision` is a branch, a tag or a commit, None being the default branch.

    A reference file may end with a newline. Without references the one snapshot is taken if there is only one.
    """
    storage = hub_cache_folder() / f"models--{repo.replace('/', '--')}"
    snapshots = storage / "snapshots"
    commits = tuple(sorted(entry.name for entry in snapshots.iterdir() if entry.is_dir())) if snapshots.is_dir() else ()
    commit = _commit(storage, revision, commits)
    if commit is None or commit not in commits:
        return Cached(None, (), commits)
    return Cached(snapshots / commit, tuple(absent_files(snapshots / commit)), commits)


def _commit(storage: Path, revision: str | None, commits: tuple[str, ...]) -> str | None:
    if revision is not None and _COMMIT.fullmatch(revision):
        return revision
    reference = storage / "refs" / (revision or "main")
    try:
        text = reference.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        text = ""
    if text:
        return text
    if revision is None and len(commits) == 1:
        return commits[0]
    return None
