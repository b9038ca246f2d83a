"""Compiled kernels for decoding on a CPU. Nothing here is imported, let alone compiled, until a run asks for it."""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import tempfile
from pathlib import Path
from types import ModuleType

from ...errors import BackendError
from ...models.embedded import cache_home

log = logging.getLogger(__name__)

SOURCES = ("arithmetic", "matvec", "attention", "step")


def load_step() -> ModuleType:
    """The module with `decode_step`, compiled once and cached on disk. Raises BackendError with the reason if it cannot.

    numba does not notice that a function in another file has changed, so the cache folder is named after all kernel
    sources, numba's version and the processor.
    """
    try:
        import numba
        from llvmlite import binding
    except ImportError:
        raise BackendError("numba is not installed (pip install 'cake-infer[cpu]')") from None
    _check_threads()
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update((Path(__file__).parent / f"{name}.py").read_bytes())
    for fact in (numba.__version__, binding.get_host_cpu_name(), str(binding.get_host_cpu_features())):
        digest.update(fact.encode())
    folder = _writable(cache_home() / "kernels" / digest.hexdigest()[:16])
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(folder)  # read once by each function that is being decorated
    try:
        return importlib.import_module(".step", __name__)
    finally:
        numba.config.CACHE_DIR = before


def _check_threads() -> None:
    """Refuse numba's own thread pool: a hundred times slower to enter, and two threads in it abort the process."""
    for layer in ("omppool", "tbbpool"):
        try:
            importlib.import_module(f"numba.np.ufunc.{layer}")
        except ImportError:
            continue
        if os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive":
            log.warning("OMP_WAIT_POLICY=passive makes decoding about 4 times slower: unset it")
        return
    raise BackendError("numba has no OpenMP here (install the system package libgomp1, or pip install tbb)")


def _writable(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        log.warning("the compiled kernels cannot be cached in %s (%s): each start compiles them anew", folder, error)
        return Path(tempfile.mkdtemp(prefix="cake-infer-kernels-"))
