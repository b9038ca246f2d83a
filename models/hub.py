"""From what a user calls a model (folder, alias, hub id) to the folder with its files."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..errors import ModelNotFound, OptionError
from ..ranges import shown
from .embedded import embedded_folder, ensure_embedded, is_embedded_complete
from .hub_cache import Cached, cached, hub_cache_folder, offline
from .hub_files import CONFIG
from .progress import OnProgress
from .registry import ALIASES, EMBEDDED, alias_of, near_aliases

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve_model(
    name: str | Path,
    *,
    revision: str | None = None,
    on_progress: OnProgress | None = None,
    before_download: Callable[[Path | None, int], None] | None = None,
) -> Path:
    """The local folder of a model, downloaded if it must be.

    An existing folder wins, then an alias of the registry, then a hub id `org/name`. A model that is complete in the
    cache is taken from there without asking the network; HF_HUB_OFFLINE=1 forbids the network altogether.
    `on_progress` may be called from another thread. `before_download(folder, weight bytes)` is called before weights
    are fetched, with a folder that has config.json (None for the embedded model), and may raise to prevent it.

    Raises ModelNotFound, saying which it is: no such name, repository or revision; gated; not granted; offline and not
    cached; no safetensors. Raises MemoryLimit for too little disk, OptionError for a revision of something that has
    none.
    """
    target = _target(name, revision)
    if target.folder is not None:
        return target.folder
    if target.repo is None:
        if before_download is not None and not is_embedded_complete():
            before_download(None, ALIASES[EMBEDDED].bytes)
        return ensure_embedded(on_progress)
    found = cached(target.repo, revision)
    if found.complete:
        assert found.snapshot is not None
        return found.snapshot
    if offline():
        raise _not_cached(target.repo, revision, found)
    from .hub_remote import Unreachable, download, inspect_remote

    try:
        remote = inspect_remote(target.repo, revision)
    except Unreachable as error:
        if found.commits:  # what the cache lacks says more than that there is no network
            raise _not_cached(target.repo, revision, found) from error
        raise
    if before_download is not None:
        before_download(remote.folder, remote.weight_bytes)
    return download(remote, on_progress)


def check_name(name: str | Path, *, revision: str | None = None) -> None:
    """Raise what `resolve_model` would raise without asking the network."""
    target = _target(name, revision)
    if target.repo is not None and offline() and not (found := cached(target.repo, revision)).complete:
        raise _not_cached(target.repo, revision, found)


def local_model(name: str | Path, *, revision: str | None = None) -> Path | None:
    """The folder of a model that is complete on this machine, else None; never uses the network."""
    try:
        target = _target(name, revision)
    except ModelNotFound:
        return None
    if target.folder is not None:
        return target.folder
    if target.repo is None:
        return embedded_folder() if is_embedded_complete() else None
    found = cached(target.repo, revision)
    return found.snapshot if found.complete else None


@dataclass(frozen=True)
class _Target:
    """What a name means: an existing folder, a repository, or (neither) the embedded model."""

    folder: Path | None = None
    repo: str | None = None


def _target(name: str | Path, revision: str | None) -> _Target:
    text = str(name)
    if not text.strip():
        raise ModelNotFound("the model's name is empty: give a folder, an alias or a hub id (see `cake-infer models`)")
    path = Path(os.path.expanduser(text))
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except OSError as error:  # too long a name, no way into the folder
        raise ModelNotFound(f"cannot look for the model {shown(text)}: {error.strerror or error}") from error
    if is_folder:
        if revision is not None:
            raise OptionError(
                f"a revision belongs to a hub model, and {text} is a folder: leave the option revision out"
            )
        return _Target(folder=_checked_folder(path, text))
    if is_file:
        hint = (
            f"import it with `cake-infer import-gguf {text} FOLDER` and name the folder"
            if path.suffix == ".gguf"
            else "name the folder that holds the model"
        )
        raise ModelNotFound(f"{text} is a file: {hint}")
    alias = alias_of(text)
    if alias == EMBEDDED:
        if revision is not None:
            raise OptionError(
                f"a revision belongs to a hub model, and {EMBEDDED} has one version: leave the option revision out"
            )
        return _Target()
    if alias is not None:
        return _Target(repo=ALIASES[alias].repo)
    if _HUB_ID.fullmatch(text) and "--" not in text and ".." not in text:
        return _Target(repo=text)
    if isinstance(name, Path) or text[0] in "./~\\" or text.endswith(os.sep) or os.sep in text:
        raise ModelNotFound(f"no folder {text}: check the path, or give an alias or a hub id (see `cake-infer models`)")
    near = near_aliases(text)
    meant = f"did you mean {' or '.join(near)}?" if near else "see `cake-infer models` for the aliases."
    raise ModelNotFound(f"no model {text!r}: {meant} A folder or a hub id (org/name) will do too")


def _checked_folder(path: Path, text: str) -> Path:
    """The folder, if it holds a model. That it wins over an alias of the same name is said where it cannot be one."""
    if not (path / CONFIG).exists():
        hides = f" (it hides the {'alias' if alias_of(text) else 'hub id'} of that name)"
        hides = hides if alias_of(text) or _HUB_ID.fullmatch(text) else ""
        raise ModelNotFound(f"the folder {text} has no {CONFIG}{hides}: name a folder with a model in it")
    return path


def _not_cached(repo: str, revision: str | None, found: Cached) -> ModelNotFound:
    """Why the cache alone does not do."""
    where = f"{repo}{'' if revision is None else f' at revision {revision}'}"
    network = "HF_HUB_OFFLINE forbids the network" if offline() else "the hub cannot be reached"
    if found.snapshot is not None:
        lost = found.absent[0]
        how = "is a link to nothing" if lost.is_symlink() else "is missing"
        return ModelNotFound(f"{where}: {lost} {how} and {network}: run once with the network, or complete the folder")
    if revision is None and len(found.commits) > 1:
        return ModelNotFound(
            f"{repo} has {len(found.commits)} snapshots in {hub_cache_folder()} and no main reference: "
            f"give the option revision ({', '.join(found.commits)})"
        )
    return ModelNotFound(
        f"{where} is not in {hub_cache_folder()} and {network}: run once with the network, or give a folder"
    )
