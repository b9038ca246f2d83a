"""Results on disk, one JSON object a line, so that a run that was stopped goes on where it was. No torch here."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...errors import CakeError, OptionError

log = logging.getLogger(__name__)

Record = dict[str, Any]

# what a result is of: every record has these fields
KEY = ("what", "model", "question", "prompt", "policy", "budget", "window", "new_tokens", "answer_limit")


class Ledger:
    """Records that are appended as they are made; a record's `key` fields say what it is the result of.

    A last line that was cut off is dropped with a warning, and written anew when its turn comes. Raises CakeError for
    a file that is something else, or cannot be read or written.
    """

    def __init__(self, path: Path, key: Sequence[str]) -> None:
        self.path, self._key = path, tuple(key)
        self._records: dict[str, Record] = {}
        _make_folder(path)
        try:
            data = path.read_bytes() if path.exists() else b""
        except OSError as error:
            raise CakeError(f"cannot read the results in {path}: {error.strerror or error}") from error
        good = self._take(data)
        if good < len(data):
            log.warning("%s: the last line is damaged and was dropped; its result will be made again", path)
            self._cut(good)

    def _take(self, data: bytes) -> int:
        """Read all lines; returns how many bytes of the file are good."""
        good = 0
        while good < len(data):
            end = data.find(b"\n", good)
            line = data[good : end if end >= 0 else len(data)]
            record = _parsed(line)
            missing = None if record is None else next((name for name in self._key if name not in record), None)
            if record is None or missing is not None or end < 0:
                if end >= 0 and data[end + 1 :].strip():
                    number = data.count(b"\n", 0, good) + 1
                    raise OptionError(
                        f"{self.path}: line {number} is no result of this command: give another folder, or move the "
                        "file away"
                    )
                return good
            self._records[self.identity(record)] = record
            good = end + 1
        return good

    def _cut(self, length: int) -> None:
        try:
            with self.path.open("r+b") as file:
                file.truncate(length)
        except OSError as error:
            raise CakeError(f"cannot write the results to {self.path}: {error.strerror or error}") from error

    def identity(self, record: Mapping[str, Any]) -> str:
        """Equal for records of the same thing."""
        return json.dumps([record[name] for name in self._key])

    def __contains__(self, record: Mapping[str, Any]) -> bool:
        return self.identity(record) in self._records

    def get(self, record: Mapping[str, Any]) -> Record | None:
        """The result of what the key fields of `record` say, if there is one."""
        return self._records.get(self.identity(record))

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records.values())

    def append(self, records: Sequence[Record]) -> None:
        """Write records, and have them on their way to disk before the next prompt is begun."""
        lines = "".join(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n" for record in records)
        try:
            with self.path.open("ab") as file:
                file.write(lines.encode("utf-8"))
        except OSError as error:
            raise CakeError(f"cannot write the results to {self.path}: {error.strerror or error}") from error
        self._records.update((self.identity(record), record) for record in records)


@contextmanager
def open_ledger(path: Path, key: Sequence[str]) -> Iterator[Ledger]:
    """A ledger that no other run reads or writes meanwhile, where the system has locks; CakeError if one does."""
    _make_folder(path)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CREAT, 0o666)
    except OSError as error:
        raise CakeError(f"cannot read the results in {path}: {error.strerror or error}") from error
    try:
        _lock(descriptor, path)
        yield Ledger(path, key)
    finally:
        os.close(descriptor)  # and the lock is gone


def _lock(descriptor: int, path: Path) -> None:
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise CakeError(
            f"another run writes its results to {path}: wait until it has ended, or give another folder"
        ) from error
    except (ImportError, OSError):  # no locks here
        pass


def _make_folder(path: Path) -> None:
    try:
        for folder in path.parents:
            if folder.exists() and not folder.is_dir():
                raise CakeError(f"cannot put results in {path.parent}: {folder} is a file, not a folder")
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CakeError(f"cannot make the folder {path.parent}: {error.strerror or error}") from error


def _parsed(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # also UnicodeDecodeError
        return None
    return record if isinstance(record, dict) else None
