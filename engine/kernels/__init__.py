"""Compiled kernels for decoding on a CPU. Nothing here is imported, let alone compiled, until a run asks for it."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import importlib
import logging
import shutil
import tempfile
import threading
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

from ...errors import BackendError
from ...models.embedded import cache_home

log = logging.getLogger(__name__)

_loading = threading.Lock()  # numba has one folder to keep kernels in, for all threads

NO_NUMBA = "numba is not installed (pip install 'cake-infer[cpu]')"
ON_CPU = "the compiled step runs on a CPU"
SOURCES = (
    "arithmetic",
    "attention",
    "digits",
    "embedding",
    "int4",
    "lengths",
    "matvec",
    "newcomers",
    "packed_rows",
    "packed_vectors",
    "processor",
    "rows",
    "short",
    "step",
    "team",
    "tile_rows",
    "tiles",
    "vectors",
    "window",
    "worst",
)


def load_step() -> ModuleType:
    """The module with `decode_step`, compiled once and cached on disk. BackendError says why it cannot run."""
    return _load("step")


def load_window() -> ModuleType:
    """The module with `window_pass`, likewise."""
    return _load("window")


def load_worst() -> ModuleType:
    """The module with `worst_pass`, likewise."""
    return _load("worst")


def load_lengths() -> ModuleType:
    """The module with `lengths_pass`, likewise."""
    return _load("lengths")


def load_short() -> ModuleType:
    """The module with the products of short pieces, likewise."""
    return _load("short")


def _load(name: str) -> ModuleType:
    try:
        import numba
    except ImportError:
        raise BackendError(NO_NUMBA) from None
    with _loading:
        before = numba.config.CACHE_DIR
        numba.config.CACHE_DIR = str(cache_folder())  # read once by each function that is being decorated
        try:
            module = importlib.import_module(f".{name}", __name__)
        finally:
            numba.config.CACHE_DIR = before
        for function in vars(module).values():
            if isinstance(function, numba.core.dispatcher.Dispatcher):
                keep_by_sources(function._cache)
                keep_alone(function._cache)
        return module


def kernel_home() -> Path:
    """The folder below which compiled kernels of every version are kept."""
    return cache_home() / "kernels"


@cache
def cache_folder() -> Path:
    """Where compiled kernels are kept.

    numba does not notice that a function in another file has changed, so the folder is named after all kernel sources,
    numba's version and the processor. Where it cannot be written, a temporary one is used, with a warning.
    """
    from llvmlite import binding  # not numba, which takes several times as long to import

    from .processor import has_tiles

    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update((Path(__file__).parent / f"{name}.py").read_bytes())
    for fact in (
        version("numba"),
        binding.get_host_cpu_name(),
        str(binding.get_host_cpu_features()),
        str(has_tiles()),
        "kept by sources",  # where the files lie
    ):
        digest.update(fact.encode())
    folder = kernel_home() / digest.hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        log.warning("compiled kernels cannot be kept in %s (%s): each start compiles them anew", folder, error)
        temporary = tempfile.mkdtemp(prefix="cake-infer-kernels-")
        atexit.register(shutil.rmtree, temporary, ignore_errors=True)
        return Path(temporary)


def kernels_kept() -> bool:
    """Whether what is compiled now is still there at the next start."""
    return cache_folder().is_relative_to(kernel_home())


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Other processes wait that ask for the lock of this name; where there can be no such lock, nobody does."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            file = stack.enter_context(open(cache_folder() / f"{name}.lock", "ab"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def keep_by_sources(kept: Any) -> None:
    """Keep what numba compiles of a function in `cache_folder` itself, which says what its sources are.

    Numba goes by the path and the time of the source file: another installation of the same version, or the same one
    anew, would be compiled anew, and without a word where `kernels_cached` knows of the first.
    """
    from numba.core.caching import IndexDataCacheFile

    if not hasattr(kept, "_cache_file"):
        return  # of a function that is kept as a part of others alone
    folder = cache_folder()
    kept._cache_path = str(folder)
    kept._cache_file = IndexDataCacheFile(kept._cache_path, kept._impl.filename_base, source_stamp=folder.name)
    kept._impl.locator.ensure_cache_path = lambda: None  # it is there


def keep_alone(kept: Any) -> None:
    """Let one process at a time add to what numba keeps of a function.

    It reads its index, takes a free file name and writes the index: two that did so at once would take the same name,
    and one kernel could be found under the other's arguments.
    """
    save = kept.save_overload
    if getattr(save, "alone", False):
        return

    def alone(signature: object, compiled: object) -> None:
        with locked("index"):
            save(signature, compiled)

    alone.alone = True  # type: ignore[attr-defined]
    kept.save_overload = alone


def kernels_cached(kind: str) -> bool:
    """Whether a compilation for this format of weights and rows has been finished here before."""
    return (cache_folder() / f"{kind}.done").exists()


def mark_cached(kind: str) -> None:
    """Remember that this format has been compiled."""
    with contextlib.suppress(OSError):
        (cache_folder() / f"{kind}.done").touch()
