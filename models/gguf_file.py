"""A GGUF file that has been checked: metadata as plain values, tensors dequantised a piece at a time."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CakeError, UnsupportedModel, WeightsError

_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # GGUFValueType: size
_STRING, _ARRAY = 8, 9
_PIECE_ELEMENTS = 1 << 22  # dequantised at a time: 16 MiB of fp32


class GgufTensor:
    """One tensor: `shape` in PyTorch's order (rows first), `type_name` such as "Q4_1"."""

    def __init__(self, path: Path, raw: Any) -> None:
        self._path = path
        self._raw = raw
        self.name: str = raw.name
        self.shape: tuple[int, ...] = tuple(int(size) for size in reversed(raw.shape.tolist()))
        self.type_name: str = raw.tensor_type.name

    def dequantised(self) -> np.ndarray[Any, Any]:
        """The whole tensor as fp32."""
        return np.concatenate(list(self.pieces())).reshape(self.shape)

    def pieces(self) -> Iterator[np.ndarray[Any, Any]]:
        """The tensor as fp32 in consecutive groups of rows, so that a large one is never widened whole."""
        from gguf.quants import dequantize

        data = self._raw.data
        rows_at_once = max(1, _PIECE_ELEMENTS * len(data) // max(1, int(self._raw.n_elements)))
        if data.ndim == 1:  # its entries may be bytes of a block, not elements
            rows_at_once = len(data)
        for start in range(0, len(data), rows_at_once):
            rows = data[start : start + rows_at_once]
            try:
                yield np.require(dequantize(rows, self._raw.tensor_type), np.float32, ["C", "W"])
            except NotImplementedError as error:
                raise UnsupportedModel(
                    f"{self._path}: tensor {self.name} has type {self.type_name}, which cannot be dequantised"
                ) from error


class GgufFile:
    """`metadata` (key -> scalar, string or list) and `tensors` (name -> GgufTensor) of one file.

    Raises WeightsError for a file that is not GGUF, is cut short or is broken, UnsupportedModel for one part of a split
    model, CakeError where the `gguf` package is missing.
    """

    def __init__(self, path: Path) -> None:
        try:
            from gguf import GGUFReader
        except ImportError as error:
            raise CakeError("reading GGUF needs the gguf package: pip install 'cake-infer[gguf]'") from error
        self.path = path
        _check_header(path)
        try:
            reader = GGUFReader(path)
            self.metadata: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
        except (ValueError, KeyError, IndexError, TypeError, OverflowError, UnicodeDecodeError) as error:
            raise WeightsError(
                f"{path}: not a complete, readable GGUF file ({_one_line(error)}): download it again"
            ) from error
        if self.metadata.get("split.count", 1) not in (0, 1):
            raise UnsupportedModel(
                f"{path} is one part of a split GGUF: join the parts with `llama-gguf-split --merge`"
            )
        size = path.stat().st_size
        for raw in reader.tensors:
            if int(raw.data_offset) + int(raw.n_bytes) > size:
                raise WeightsError(f"{path}: cut short inside tensor {raw.name}: download it again")
        self.tensors: dict[str, GgufTensor] = {raw.name: GgufTensor(path, raw) for raw in reader.tensors}

    @property
    def architecture(self) -> str:
        """`general.architecture`, as in "llama"."""
        return str(self.metadata.get("general.architecture", ""))

    def get(self, key: str, default: Any = None) -> Any:
        """Metadata by key; "{arch}" stands for the architecture."""
        value = self.metadata.get(key.replace("{arch}", self.architecture))
        return default if value is None else value


def _check_header(path: Path) -> None:
    """Walk the header with every length checked: the reader trusts them, and a broken count keeps it busy for ever."""
    if path.is_dir():
        raise WeightsError(f"{path} is a folder: name a .gguf file")
    if path.exists() and not path.is_file():  # a pipe would be waited for, and cannot be mapped
        raise WeightsError(f"cannot read {path}: it is no ordinary file")
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                hint = (
                    "a git-lfs pointer: run `git lfs pull`" if _is_lfs_pointer(path) else "its first bytes are others"
                )
                raise WeightsError(f"{path} is not a GGUF file ({hint})")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                _walk(data, size)
    except OSError as error:
        raise WeightsError(f"cannot read {path}: {error.strerror or error}") from error
    except (struct.error, IndexError) as error:
        raise WeightsError(f"{path}: the GGUF header is cut short or broken: download it again") from error
    except ValueError as error:
        raise WeightsError(f"{path}: {error}") from error


def _walk(data: mmap.mmap, size: int) -> None:
    """Step over all metadata and tensor records; struct.error or IndexError where one does not fit in the file."""
    version, tensor_count, kv_count = struct.unpack_from("<IQQ", data, 4)
    if version & 0xFFFF == 0:
        raise ValueError("a big-endian GGUF file, which is not supported")
    if version not in (2, 3):
        raise ValueError(f"GGUF version {version} is not supported (2 and 3 are)")
    at = 24

    def advance(count: int) -> None:
        nonlocal at
        if count > size - at:
            raise IndexError
        at += count

    def skip_string() -> None:
        length = struct.unpack_from("<Q", data, at)[0]
        advance(8 + length)

    def skip_value(kind: int) -> None:
        if kind == _STRING:
            skip_string()
        elif kind == _ARRAY:
            item_kind, count = struct.unpack_from("<IQ", data, at)
            advance(12)
            if item_kind in _SCALAR_BYTES:
                advance(_SCALAR_BYTES[item_kind] * count)
            elif item_kind == _STRING:
                for _ in range(count):
                    skip_string()
            else:
                raise IndexError
        else:
            if kind not in _SCALAR_BYTES:
                raise IndexError
            advance(_SCALAR_BYTES[kind])

    for _ in range(kv_count):
        skip_string()
        kind = struct.unpack_from("<I", data, at)[0]
        advance(4)
        skip_value(kind)
    for _ in range(tensor_count):
        skip_string()
        dimensions = struct.unpack_from("<I", data, at)[0]
        advance(4 + 8 * dimensions + 4 + 8)


def _is_lfs_pointer(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(40).startswith(b"version https://git-lfs")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
