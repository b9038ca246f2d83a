"""A saved cache: kept rows and what continuing on them needs, as one safetensors file.

Tensors: `keys` and `values` `[slots, head_dim]` in the KV dtype, row by row; `position` int32 and `score` fp32
`[slots]`; `length` int64 `[layers, kv_heads]`; `ids` int64 `[tokens]`, every id that was fed; and `queries`
`[layers, window, heads, head_dim]`, the last rotated queries, where tokens may be evicted. Where rows are packed these
are the parts that are not, and the packed parts follow: `packed_length` and a tensor for each table of the store, in
whole groups, row by row. The metadata is in `saved_file`.

A file is written beside its place, brought to the disk and renamed: whoever is killed meanwhile leaves the old file or
none. It is read in full once, for the checksum, and then mapped.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import SnapshotError
from .quantise import GROUP, KV_BITS, code_bytes, value_groups
from .saved_file import BLANK, FORMAT, VERSION, check_target, open_file, place_beside, read_whole, seal
from .saved_rows import TABLES, SavedPacked, SavedRows, inside, whole

KV_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
READS = 20  # of a file that somebody else writes anew meanwhile


@dataclass(frozen=True)
class Snapshot:
    """What a file holds. Tensors that were read are mapped from it; nobody writes to them.

    ids: every id that was fed. queries: `[layers, window, heads, head_dim]`, or None. about: JSON values.
    """

    rows: SavedRows
    ids: list[int]
    queries: Tensor | None
    about: dict[str, Any]


def write_snapshot(path: str | Path, snapshot: Snapshot) -> None:
    """Write a file, in place of one that may be there. Raises SnapshotError; then what was there is as it was."""
    target, rows = check_target(path), snapshot.rows
    tensors = {
        "keys": rows.keys,
        "values": rows.values,
        "position": rows.position,
        "score": rows.score,
        "length": torch.from_numpy(rows.length),
        "ids": torch.tensor(snapshot.ids, dtype=torch.int64),
    }
    if snapshot.queries is not None:
        tensors["queries"] = snapshot.queries
    metadata = {"format": FORMAT, "version": "1", "checksum": BLANK}
    if rows.packed is not None:
        metadata |= {"version": str(VERSION), "kv_bits": str(rows.packed.bits)}
        tensors["packed_length"] = torch.from_numpy(rows.packed.length)
        tensors |= {f"packed_{name}": table for name, table in zip(TABLES, rows.packed.tables, strict=True)}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    metadata["about"] = json.dumps(snapshot.about, ensure_ascii=False)
    beside = place_beside(target)
    try:
        mode = _mode_for(target, beside)
        save_file(tensors, beside, metadata=metadata)
        os.chmod(beside, mode)
        seal(beside)
        os.replace(beside, target)
        _settle(target.parent)
    except (OSError, SafetensorError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise SnapshotError(f"cannot write {target}: {reason}") from error
    finally:
        with suppress(OSError):
            beside.unlink()


def _mode_for(target: Path, beside: Path) -> int:
    """The permissions of the file that is replaced, or of a new one; makes `beside`."""
    with open(beside, "xb") as file:
        return stat.S_IMODE(os.stat(target).st_mode if target.exists() else os.fstat(file.fileno()).st_mode)


def read_snapshot(path: str | Path) -> Snapshot:
    """Check a file and map it. Raises SnapshotError for one that is truncated, altered, foreign or newer."""
    for _ in range(READS):
        try:
            with open_file(path) as checked:
                about, bits = read_whole(checked, path)
                with safe_open(path, framework="pt") as file:
                    tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
                # what was mapped has the name's file by now: another one, if somebody saved there meanwhile
                replaced = not os.path.samestat(os.fstat(checked.fileno()), os.stat(path))
        except OSError as error:
            raise SnapshotError(f"cannot read {path}: {error.strerror or error}") from error
        except SafetensorError as error:
            raise SnapshotError(f"{path} is damaged: {error}") from error
        if not replaced:
            return _assembled(path, tensors, about, bits)
    raise SnapshotError(f"cannot read {path}: it was written anew {READS} times meanwhile; try again")


def _assembled(path: str | Path, tensors: dict[str, Tensor], about: dict[str, Any], bits: int | None) -> Snapshot:
    """The parts, if they fit each other: a checksum only says that they are what somebody wrote."""

    def need(agrees: bool) -> None:
        if not agrees:
            raise SnapshotError(f"{path} is inconsistent: its tables do not fit each other")

    queries = tensors.pop("queries", None)
    packed = {name: tensors.pop(name) for name in sorted(tensors) if name.startswith("packed_")}
    need(sorted(tensors) == ["ids", "keys", "length", "position", "score", "values"])
    keys, values, position, score = (tensors[name] for name in ("keys", "values", "position", "score"))
    length, ids = tensors["length"], tensors["ids"]
    need(keys.dim() == 2 and keys.dtype in KV_DTYPES and values.shape == keys.shape and values.dtype == keys.dtype)
    slots, total = (keys.shape[0],), ids.numel()
    need(position.shape == slots and position.dtype == torch.int32)
    need(score.shape == slots and score.dtype == torch.float32)
    need(length.dim() == 2 and length.dtype == torch.int64 and ids.dim() == 1 and ids.dtype == torch.int64)
    need(bool((length >= 0).all()) and int(length.sum()) == keys.shape[0] and int(length.max()) <= total)
    need(bool(((position >= 0) & (position < total)).all()))
    need(queries is None or (queries.dim() == 4 and queries.is_floating_point()))
    need((bits is None) == (not packed))
    table = length.numpy().copy()
    rows = SavedRows(keys, values, position, score, table, table.copy())
    if bits is not None:
        rows.packed = _packed(packed, bits, table, keys.shape[1], total, need)
    return Snapshot(rows, ids.tolist(), queries, about)


def _packed(
    tensors: dict[str, Tensor],
    bits: int,
    beside: np.ndarray,
    head_dim: int,
    total: int,
    need: Callable[[bool], None],
) -> SavedPacked:
    """Packed rows, if their tables fit each other and the rows `beside` them."""
    need(sorted(tensors) == sorted(f"packed_{name}" for name in ("length", *TABLES)) and bits in KV_BITS)
    length = tensors.pop("packed_length")
    need(length.dtype == torch.int64 and length.shape == beside.shape and bool((length >= 0).all()))
    table = length.numpy().copy()
    need(int((table + beside).max()) <= total)
    slots, codes, groups = int(whole(table).sum()), code_bytes(head_dim, bits), value_groups(head_dim)
    shapes = {"codes": (slots, codes), "key": (slots // GROUP, head_dim), "value": (slots, groups)}
    dtypes = {"codes": torch.uint8, "key": torch.float16, "value": torch.float16}
    for name in TABLES[:6]:
        kind = "codes" if name.endswith("codes") else name.split("_")[0]
        found = tensors[f"packed_{name}"]
        need(found.dtype == dtypes[kind] and found.shape == shapes[kind])
    position, score = tensors["packed_position"], tensors["packed_score"]
    need(position.dtype == torch.int32 and position.shape == (slots,))
    need(score.dtype == torch.float32 and score.shape == (slots,))
    written = position[torch.from_numpy(inside(table))]
    need(bool(((written >= 0) & (written < total)).all()))
    return SavedPacked(bits, tuple(tensors[f"packed_{name}"] for name in TABLES), table, whole(table))


def _settle(folder: Path) -> None:
    """Bring the new name to the disk as well, where the system can."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
