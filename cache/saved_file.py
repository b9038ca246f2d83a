"""The file of a saved cache: where one may be written, and whether one is whole. No torch here.

safetensors with metadata: `format`, `version` (1 without packed rows, which older programs read, 2 with), `kv_bits`
with packed rows, `about` (JSON, the engine's own) and `checksum`, the SHA-256 of the file with 64 zeros in its place.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import SnapshotError
from ..ranges import MOST_BYTES, POSITIVE, Range

FORMAT = "cake-infer cache"
VERSION = 2
BLANK = "0" * 64
MARK = b'"checksum":"'  # a quote inside a JSON string is escaped: nothing but the key can spell this
OURS = b'"format":"cake-infer cache"'  # likewise
LONGEST_HEADER = 1 << 28
PLACE = Range(0, MOST_BYTES)
BLOCK = 1 << 20
LEFT_S = 3600.0  # after which what was not renamed will not be


def check_target(
    path: str | Path, may_be_replaced: Callable[[Path], bool] | None = None, what: str = "saved cache"
) -> Path:
    """The path, links followed, if a file can be put there: in place of nothing or of a saved cache, no other file.

    `may_be_replaced` and `what`: another kind of file, and its name. Raises SnapshotError.
    """
    target = Path(os.path.realpath(path)) if os.path.islink(path) else Path(path)
    try:
        os.stat(target)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:  # too long a name, no way into the folder, a NUL
        raise SnapshotError(f"cannot write {target}: {getattr(error, 'strerror', None) or error}") from error
    if not target.name or target.is_dir():
        raise SnapshotError(f"cannot write {target}: it is a folder, give the name of a file")
    if target.exists() and not target.is_file():
        raise SnapshotError(f"cannot write {target}: it is no ordinary file")
    if not target.parent.is_dir():
        raise SnapshotError(f"cannot write {target}: there is no folder {target.parent}")
    if not os.access(target.parent, os.W_OK):
        raise SnapshotError(f"cannot write {target}: the folder {target.parent} is not open for writing")
    if target.exists() and not (may_be_replaced or _is_saved_cache)(target):
        raise SnapshotError(f"cannot write {target}: what is there is no {what}; give another name, or remove it")
    return target


def place_beside(target: Path) -> Path:
    """The name under which a file is written before it is renamed to `target`.

    What a process that was killed left there is removed, once nobody can be writing it any more.
    """
    begin = f".{target.name[:64]}."
    ours = re.compile(re.escape(begin) + r"[0-9a-f]{12}\.part")
    with suppress(OSError):
        for left in target.parent.iterdir():
            if ours.fullmatch(left.name) and time.time() - left.stat().st_mtime > LEFT_S:
                left.unlink()
    return target.with_name(f"{begin}{secrets.token_hex(6)}.part")


def _is_saved_cache(target: Path) -> bool:
    """Whether a file is empty, or a saved cache by its header."""
    try:
        with open(target, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            return target.stat().st_size == 0 or (length <= LONGEST_HEADER and OURS in file.read(length))
    except OSError:
        return False


@dataclass(frozen=True)
class Header:
    """What a file says of itself. about: JSON. bits: of its packed rows, None without. checksum_at: its place."""

    about: Any
    bits: int | None
    checksum: str
    checksum_at: int


def open_file(path: str | Path) -> BinaryIO:
    """A file, open for reading. Raises SnapshotError where there is none: a pipe would be waited for."""
    try:
        mode = os.stat(path).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise SnapshotError(f"cannot read {path}: it is no ordinary file")
        return open(path, "rb")
    except (OSError, ValueError) as error:  # a NUL in the name is a ValueError
        raise SnapshotError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def read_header(path: str | Path) -> Header:
    """The header of a file that is as long as it says. Raises SnapshotError for any other."""
    with open_file(path) as file:
        try:
            return _header(file, path)
        except OSError as error:
            raise SnapshotError(f"cannot read {path}: {error.strerror or error}") from error


def _header(file: BinaryIO, path: str | Path) -> Header:
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(LONGEST_HEADER, size - 8):
        raise SnapshotError(f"{path} is no saved cache, or only the beginning of one: {size:,} bytes")
    header = file.read(length)
    try:
        parsed = json.loads(header)
        metadata = parsed.pop("__metadata__")
        known, version = metadata["format"] == FORMAT, POSITIVE.parse(metadata["version"])
        checksum, bits = (
            metadata["checksum"],
            int(POSITIVE.parse(metadata["kv_bits"])) if "kv_bits" in metadata else None,
        )
        ends = [tensor["data_offsets"][1] for tensor in parsed.values()]
        if not all(PLACE.has(end) for end in ends):
            raise ValueError(ends)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        raise SnapshotError(f"{path} is no saved cache: its header is damaged, or another program's") from None
    if not known:
        raise SnapshotError(f"{path} is no saved cache, though a safetensors file")
    if version > VERSION:
        raise SnapshotError(
            f"{path} has format {version}, and this program reads up to {VERSION}: use a newer cake-infer, or "
            "compress the document again"
        )
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        what = "truncated" if size < expected else "altered"
        raise SnapshotError(f"{path} is {what}: {size:,} bytes, and its header says {expected:,}")
    at = header.find(MARK)
    if at < 0 or header.count(MARK) != 1 or not isinstance(checksum, str) or len(checksum) != len(BLANK):
        raise SnapshotError(f"{path} is altered: its checksum is not where it belongs")
    return Header(metadata.get("about"), bits, checksum, 8 + at + len(MARK))


def read_whole(file: BinaryIO, path: str | Path) -> tuple[dict[str, Any], int | None]:
    """`about` and `bits` of an open file whose every byte is as it was written. Raises SnapshotError for any other."""
    header = _header(file, path)
    file.seek(0)
    if _digest(file, header.checksum_at) != header.checksum:
        raise SnapshotError(f"{path} is altered: its content does not agree with its checksum")
    try:
        about = json.loads(header.about)
    except (ValueError, TypeError, RecursionError):
        about = None
    if not isinstance(about, dict):
        raise SnapshotError(f"{path} is no saved cache: it does not say of what")
    return about, header.bits


def seal(path: Path) -> None:
    """Put the checksum in its place, and bring the file to the disk."""
    with open(path, "r+b") as file:
        at = file.read(8 + int.from_bytes(file.read(8), "little")).index(MARK) + 8 + len(MARK)
        file.seek(0)
        digest = _digest(file, at)
        file.seek(at)
        file.write(digest.encode())
        file.flush()
        os.fsync(file.fileno())


def _digest(file: Any, blank_at: int) -> str:
    """SHA-256 of a file from here to its end, with 64 zeros from byte `blank_at` on."""
    digest = hashlib.sha256(file.read(blank_at))
    file.seek(len(BLANK), os.SEEK_CUR)
    digest.update(BLANK.encode())
    buffer = memoryview(bytearray(BLOCK))
    while count := file.readinto(buffer):
        digest.update(buffer[:count])
    return digest.hexdigest()
