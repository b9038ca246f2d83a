"""Downloads from the model hub: what a repository holds, which of it is wanted, and every way that can fail."""

from __future__ import annotations

import errno
import glob
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CakeError, ModelNotFound
from .hub_cache import cached, hub_cache_folder
from .hub_files import CONFIG, DOCUMENTS, INDEX, SINGLE, check_has_safetensors, weight_names
from .progress import OnProgress
from .staging import check_disk_space

_POLL_S = 0.2
_HTTP_PACKAGES = ("huggingface_hub", "httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3", "hf_xet")


class Unreachable(ModelNotFound):
    """The hub does not answer."""


@dataclass(frozen=True)
class RemoteModel:
    """A repository at one commit: file sizes by name, those that are wanted, those of them that are weights.

    `folder` is its snapshot in the cache, which has config.json already.
    """

    repo: str
    revision: str | None
    sizes: dict[str, int]
    wanted: tuple[str, ...]
    weights: tuple[str, ...]
    folder: Path

    @property
    def weight_bytes(self) -> int:
        """Size of the safetensors."""
        return sum(self.sizes[name] for name in self.weights)


def inspect_remote(repo: str, revision: str | None) -> RemoteModel:
    """Ask the hub what `repo` holds; fetches config.json and the index (some kB) into the cache, no weights.

    Raises ModelNotFound for a repository or revision that does not exist, needs a token or a granted request, has no
    safetensors or config, or cannot be reached.
    """
    from huggingface_hub import HfApi

    with _explained(repo, revision):
        info = HfApi(endpoint=_endpoint()).model_info(repo, revision=revision, files_metadata=True, timeout=20)
    sizes = {item.rfilename: int(item.size or 0) for item in info.siblings or []}
    check_has_safetensors(repo, sizes)
    if CONFIG not in sizes:
        raise ModelNotFound(f"{repo} has no {CONFIG}: choose a repository with a whole model")
    small = [CONFIG, *([INDEX] if INDEX in sizes else [])]
    folder = _snapshot(repo, revision, small)
    weights = weight_names(folder / INDEX) if INDEX in sizes else [SINGLE]
    if missing := [name for name in weights if name not in sizes]:
        raise ModelNotFound(f"{repo}: {INDEX} names {missing[0]}, which the repository does not have")
    documents = [name for name in DOCUMENTS if name in sizes and name not in small]
    return RemoteModel(repo, revision, sizes, (*small, *documents, *weights), tuple(weights), folder)


def download(model: RemoteModel, on_progress: OnProgress | None = None) -> Path:
    """Fetch what is wanted and not yet cached; returns the snapshot folder. Raises MemoryLimit for too small a disk.

    An interrupted download is taken up again by the next one.
    """
    needed = sum(model.sizes[name] for name in model.wanted if not (model.folder / name).exists())
    check_disk_space(model.folder, needed, f"downloading {model.repo}")
    with _watched(model.folder.parent.parent / "blobs", needed, on_progress):
        try:
            result = _snapshot(model.repo, model.revision, list(model.wanted))
        except Unreachable as error:
            raise ModelNotFound(
                f"the download of {model.repo} broke off: run it again, it goes on ({error})"
            ) from error
    if absent := cached(model.repo, result.name).absent:
        raise ModelNotFound(f"the download of {model.repo} ended without {absent[0]}: run it again")
    return result


def _snapshot(repo: str, revision: str | None, names: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import tqdm

    class Quiet(tqdm):  # type: ignore[type-arg, unused-ignore]
        """huggingface_hub's own bars, off: progress goes to the caller."""

        def __init__(self, *args: Any, **keywords: Any) -> None:
            super().__init__(*args, **{**keywords, "disable": True})  # type: ignore[no-untyped-call, unused-ignore]

    with _explained(repo, revision):
        return Path(
            snapshot_download(
                repo,
                revision=revision,
                cache_dir=hub_cache_folder(),
                endpoint=_endpoint(),
                allow_patterns=[glob.escape(name) for name in names],
                tqdm_class=Quiet,
            )
        )


def _endpoint() -> str | None:
    return (os.environ.get("HF_ENDPOINT") or "").rstrip("/") or None


@contextmanager
def _explained(repo: str, revision: str | None) -> Iterator[None]:
    """Turn huggingface_hub's exceptions into one ModelNotFound that says which of the cases it is."""
    from huggingface_hub import constants, errors, get_token

    hub = _endpoint() or constants.ENDPOINT
    try:
        yield
    except CakeError:
        raise
    except errors.GatedRepoError as error:
        page = f"{hub}/{repo}"
        if get_token() is None:
            reason = (
                f"{repo} is gated and no token is set: accept its conditions at {page}, then set HF_TOKEN "
                "or run `hf auth login`"
            )
        else:
            reason = f"{repo} is gated and access was not granted to the token in use: request it at {page}"
        raise ModelNotFound(reason) from error
    except errors.RevisionNotFoundError as error:
        raise ModelNotFound(f"{repo} has no revision {revision!r}: name a branch, a tag or a commit of it") from error
    except errors.RepositoryNotFoundError as error:
        private = "or it is private and no token is set" if get_token() is None else "or the token in use has no access"
        raise ModelNotFound(
            f"no model {repo!r} at {hub} ({private}), and no such folder: check the spelling, or see "
            "`cake-infer models`"
        ) from error
    except (PermissionError, FileExistsError, NotADirectoryError) as error:
        raise CakeError(
            f"cannot write to the cache {hub_cache_folder()}: {error.strerror}; set HF_HUB_CACHE"
        ) from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise CakeError(f"cannot write to the cache {hub_cache_folder()}: {error.strerror}") from error
        package = type(error).__module__.split(".")[0]
        if package not in _HTTP_PACKAGES and not isinstance(error, OSError):
            raise
        raise _refusal(repo, hub, error) from error


def _refusal(repo: str, hub: str, error: BaseException) -> ModelNotFound:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status == 401:
        return ModelNotFound(f"{hub} refuses the token in use (HF_TOKEN or `hf auth login`): renew it, or remove it")
    if status == 403:
        return ModelNotFound(f"{hub} does not let the token in use read {repo} (403): give it read access to it")
    reason = f"status {status}" if status is not None else (" ".join(str(error).split())[:120] or type(error).__name__)
    return Unreachable(
        f"{repo} is not complete in {hub_cache_folder()} and {hub} cannot be reached ({reason}): "
        "check the connection, or give the model as a folder"
    )


@contextmanager
def _watched(blobs: Path, total: int, on_progress: OnProgress | None) -> Iterator[None]:
    """Report how much the cache's blobs have grown, which holds for every way in which the files may arrive."""
    if on_progress is None:
        yield
        return
    before = _folder_bytes(blobs)
    stop = threading.Event()

    def report(callback: Callable[[str, int, int], None]) -> None:
        while not stop.wait(_POLL_S):
            callback("download", min(total, max(0, _folder_bytes(blobs) - before)), total)

    thread = threading.Thread(target=report, args=(on_progress,), daemon=True)
    on_progress("download", 0, total)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    on_progress("download", total, total)


def _folder_bytes(folder: Path) -> int:
    total = 0
    try:
        for entry in os.scandir(folder):
            try:
                total += entry.stat().st_size
            except OSError:  # renamed meanwhile
                continue
    except OSError:
        return 0
    return total
