"""Headers of safetensors files: which tensors a model folder holds and where, checked before any byte is read."""

from __future__ import annotations

import json
import math
import os
import stat
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import WeightsError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MAX_HEADER = 100_000_000  # bytes; the format's own limit
_LFS_POINTER = b"version https://git-lfs"
_ITEM_SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip


@dataclass(frozen=True)
class TensorHeader:
    """Where one tensor lies: `nbytes` bytes from byte `offset` of `file`, of a dtype spelled as in the file (BF16)."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    offset: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def tensor_headers(folder: str | Path) -> dict[str, TensorHeader]:
    """Name to header of every tensor of a model folder, from the headers of its files alone.

    `model.safetensors.index.json` decides which files are opened and, for a tensor that two of them hold, which file
    counts; without an index it is `model.safetensors`. No other file is touched. Raises `WeightsError`, naming the
    file, if there is neither, or if a file is missing, empty, truncated, a git-lfs pointer, or lays out its tensors in
    a way that does not fit its size.
    """
    folder = Path(folder)
    if (folder / INDEX).is_file():
        return _indexed_headers(folder)
    if (folder / SINGLE).exists() or (folder / SINGLE).is_symlink():
        return file_headers(folder / SINGLE)
    raise WeightsError(_nothing_to_load(folder))


def file_headers(path: Path) -> dict[str, TensorHeader]:
    """Name to header of every tensor in one safetensors file. Raises `WeightsError` as `tensor_headers` does."""
    try:
        if stat.S_ISFIFO(os.stat(path).st_mode):  # it would be waited for
            raise WeightsError(f"{path} is no ordinary file; download the model again")
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            start = file.read(len(_LFS_POINTER))
            if start == _LFS_POINTER:
                raise WeightsError(f"{path} is a git-lfs pointer, not the weights; run `git lfs pull` in its folder")
            if size < 8:
                raise WeightsError(f"{path} is {'empty' if size == 0 else 'truncated'}; download it again")
            (length,) = struct.unpack("<Q", start[:8])
            if length > min(size - 8, _MAX_HEADER):
                raise WeightsError(
                    f"{path} is truncated or not a safetensors file: its header of {length} bytes does not fit into "
                    f"its {size} bytes; download it again"
                )
            file.seek(8)
            text = file.read(length)
    except FileNotFoundError as error:
        raise WeightsError(f"{path} is missing; download the model again") from error
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror}") from error
    entries = _unique_json(text, path)
    entries.pop("__metadata__", None)
    headers = {name: _header(path, name, entry, 8 + length) for name, entry in entries.items()}
    _check_layout(path, headers, 8 + length, size)
    return headers


def _header(path: Path, name: str, entry: Any, data_start: int) -> TensorHeader:
    entry = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or not _sizes(shape) or not _sizes(offsets) or len(offsets) != 2:
        raise WeightsError(f"{path}: the header entry of {name} is malformed; download the file again")
    begin, end = offsets
    header = TensorHeader(path, dtype, tuple(shape), end - begin, data_start + begin)
    item_size = _ITEM_SIZES.get(dtype)
    if end < begin or (item_size is not None and header.nbytes != header.numel * item_size):
        raise WeightsError(
            f"{path}: {name} of shape {list(shape)} and dtype {dtype} cannot take bytes {begin} to {end}; "
            "download the file again"
        )
    return header


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_layout(path: Path, headers: dict[str, TensorHeader], data_start: int, size: int) -> None:
    """Tensors fill the file from the header to its end, without overlap or gap, as the format demands."""
    reached = data_start
    for name, header in sorted(headers.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        end = header.offset + header.nbytes
        if end > size:
            raise WeightsError(
                f"{path} is truncated: {name} ends at byte {end} and the file has {size}; download it again"
            )
        if header.offset != reached:
            raise WeightsError(f"{path}: {name} begins at byte {header.offset} instead of {reached}; download it again")
        reached = end
    if reached != size:
        raise WeightsError(f"{path} has {size - reached} bytes after its last tensor; download it again")


def _unique_json(text: bytes, path: Path) -> dict[str, Any]:
    """A JSON object in which no key occurs twice: the second would silently replace the first."""

    def pairs(items: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in items:
            if key in result:
                raise WeightsError(f"{path} names {key} twice")
            result[key] = value
        return result

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=pairs)
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or a number without end
        raise WeightsError(f"{path} is broken: its header is not valid JSON; download it again") from error
    if not isinstance(value, dict):
        raise WeightsError(f"{path} is broken: its header is not a JSON object; download it again")
    return value


def _indexed_headers(folder: Path) -> dict[str, TensorHeader]:
    path = folder / INDEX
    data = path.read_bytes()
    if data.startswith(_LFS_POINTER):
        raise WeightsError(f"{path} is a git-lfs pointer, not the index; run `git lfs pull` in its folder")
    weight_map = _unique_json(data, path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{path} has no weight_map; download it again")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise WeightsError(f"{path} places {name} in {file!r}, which is not a file of the folder")
    files = {file: file_headers(folder / file) for file in dict.fromkeys(weight_map.values())}
    for file, headers in files.items():
        for name in headers:
            if name not in weight_map:
                raise WeightsError(f"{folder / file} holds {name}, which {INDEX} does not name")
    for name, file in weight_map.items():
        if name not in files[file]:
            raise WeightsError(f"{folder / file} does not hold {name}, which {INDEX} places there")
    return {name: files[file][name] for name, file in weight_map.items()}


def _nothing_to_load(folder: Path) -> str:
    found = sorted(path.name for path in folder.glob("*")) if folder.is_dir() else []
    consolidated = [name for name in found if name.startswith("consolidated") and name.endswith(".safetensors")]
    if consolidated:
        return (
            f"{folder} holds only {consolidated[0]}, weights in Mistral's own format; "
            f"get the Hugging Face files ({SINGLE}, or the shards with {INDEX})"
        )
    if any(name.endswith(".safetensors") for name in found):
        return f"{folder} holds shards without {INDEX}; download the index as well"
    if any(name.endswith((".bin", ".pt", ".pth")) for name in found):
        return f"{folder} holds only pickled weights; convert them to safetensors or get a revision that has them"
    return f"{folder} holds no weights: there is neither {INDEX} nor {SINGLE}"
