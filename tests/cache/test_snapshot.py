"""Saved caches: what was written comes back, anything else is refused, and a save that is cut leaves the old file."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import signal
import struct
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from cake_infer.cache.saved_file import MARK, check_target
from cake_infer.cache.saved_rows import SavedPacked, SavedRows, whole
from cake_infer.cache.snapshot import Snapshot, read_snapshot, write_snapshot
from cake_infer.errors import SnapshotError
from safetensors.torch import save_file

LENGTH = np.array([[3, 3], [5, 2], [0, 4]])  # ragged, one row empty


def made(seed=0, dtype=torch.bfloat16, queries=True):
    generator = torch.Generator().manual_seed(seed)
    slots = int(LENGTH.sum())
    rows = SavedRows(
        torch.randn(slots, 8, generator=generator).to(dtype),
        torch.randn(slots, 8, generator=generator).to(dtype),
        torch.randint(0, 40, (slots,), generator=generator, dtype=torch.int32),
        torch.randn(slots, generator=generator),
        LENGTH.copy(),
        LENGTH + 7,
    )
    ring = torch.randn(3, 4, 4, 8, generator=generator) if queries else None
    return Snapshot(rows, list(range(40)), ring, {"kind": "document", "text": 'a "quote", "checksum":"no" é'})


def same(one: Snapshot, other: Snapshot) -> bool:
    """Bit for bit; headroom is not part of a file."""
    tables = ("keys", "values", "position", "score")
    equal = all(torch.equal(getattr(one.rows, name), getattr(other.rows, name)) for name in tables)
    equal = equal and all(getattr(one.rows, name).dtype == getattr(other.rows, name).dtype for name in tables)
    if (one.queries is None) != (other.queries is None):
        return False
    if one.queries is not None and other.queries is not None:
        equal = equal and torch.equal(one.queries, other.queries)
    lengths = np.array_equal(one.rows.length, other.rows.length)
    return equal and lengths and one.ids == other.ids and one.about == other.about


def parts(data: bytes) -> tuple[dict, bytes]:
    """The header of a safetensors file as JSON, and its payload."""
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def joined(header: dict, payload: bytes) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + payload


def signed(data: bytes) -> bytes:
    """The file with the checksum that its content has."""
    import hashlib

    at = data.index(MARK) + len(MARK)
    blank = data[:at] + b"0" * 64 + data[at + 64 :]
    return data[:at] + hashlib.sha256(blank).hexdigest().encode() + data[at + 64 :]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("queries", [True, False])
def test_what_was_written_comes_back(tmp_path, dtype, queries):
    saved = made(dtype=dtype, queries=queries)
    write_snapshot(tmp_path / "a.cake", saved)
    read = read_snapshot(tmp_path / "a.cake")
    assert same(saved, read)
    assert np.array_equal(read.rows.capacity, LENGTH)
    assert os.listdir(tmp_path) == ["a.cake"]  # nothing is left beside it
    assert signed((tmp_path / "a.cake").read_bytes()) == (tmp_path / "a.cake").read_bytes()


def test_a_file_is_replaced_while_it_is_mapped(tmp_path):
    path = tmp_path / "a.cake"
    write_snapshot(path, made(1))
    mapped = read_snapshot(path)
    write_snapshot(path, made(2))
    assert same(mapped, made(1))
    assert same(read_snapshot(path), made(2))


def test_every_broken_file_is_refused_or_is_what_was_written(tmp_path):
    saved, path = made(), tmp_path / "a.cake"
    write_snapshot(path, saved)
    good = path.read_bytes()
    header_end = 8 + struct.unpack("<Q", good[:8])[0]
    random = np.random.default_rng(0)
    broken = []
    for _ in range(400):  # bits of the header, of the payload
        for low, high in ((0, header_end), (header_end, len(good))):
            data = bytearray(good)
            data[random.integers(low, high)] ^= 1 << int(random.integers(8))
            broken.append(bytes(data))
    broken += [good[:n] for n in random.integers(0, len(good), 150)] + [good[:n] for n in (0, 1, 7, 8, header_end)]
    broken += [good + b"\0", good + good, good[:-1] + b"\0\0"]
    for _ in range(50):  # stretches moved, or overwritten
        at, other = sorted(random.integers(8, len(good) - 16, 2))
        broken.append(good[:at] + good[other : other + 16] + good[at + 16 :])
    header, payload = parts(good)
    for one, other in (("keys", "values"), ("position", "score"), ("ids", "length"), ("keys", "queries")):
        swapped = {**header, one: header[other], other: header[one]}
        broken.append(joined(swapped, payload))
    assert len(broken) > 500
    refused = 0
    for data in broken:
        path.write_bytes(data)
        try:
            found = read_snapshot(path)
        except SnapshotError:
            refused += 1
        else:
            assert same(found, saved)
    assert refused >= len(broken) - 50  # a stretch put where it was is no damage


def test_files_that_contradict_themselves_are_refused_though_their_checksum_is_right(tmp_path):
    path = tmp_path / "a.cake"
    write_snapshot(path, made())
    header, payload = parts(path.read_bytes())
    path.write_bytes(signed(joined(header, payload)))
    assert same(read_snapshot(path), made())  # so that the others are refused for what is changed in them

    def refused(changed, data=payload):
        path.write_bytes(signed(joined(changed, data)))
        with pytest.raises(SnapshotError, match=r"inconsistent|damaged|altered|truncated|no saved cache"):
            read_snapshot(path)

    refused({**header, "position": header["score"], "score": header["position"]})  # int32 and float32
    refused({**header, "length": header["ids"], "ids": header["length"]})
    refused({name: value for name, value in header.items() if name != "values"})
    refused({**header, "extra": header["ids"]})
    keys = header["keys"]
    refused({**header, "keys": {**keys, "shape": [keys["shape"][0] * 2, 4]}})  # as many numbers, other rows
    refused({**header, "keys": {**keys, "dtype": "I16"}})
    start, _ = header["position"]["data_offsets"]
    refused(header, payload[:start] + struct.pack("<i", 40) + payload[start + 4 :])  # a position behind the text
    refused(header, payload[:start] + struct.pack("<i", -1) + payload[start + 4 :])
    start, _ = header["length"]["data_offsets"]
    refused(header, payload[:start] + struct.pack("<qq", 7, -1) + payload[start + 16 :])  # of the same sum
    refused(header, payload[:start] + struct.pack("<q", 4) + payload[start + 8 :])
    about = {**header["__metadata__"], "about": "[]"}
    refused({**header, "__metadata__": about})
    for absurd in (10**400, -1, float("inf"), float("nan"), 1e300, True, "7", None, [7]):
        refused({**header, "keys": {**keys, "data_offsets": [0, absurd]}})
    for key in ("version", "kv_bits"):
        for absurd in ("9" * 400, "9" * 5000, "-1", "0", "1e400", "nan", "", 10**400, float("inf"), [1]):
            refused({**header, "__metadata__": {**header["__metadata__"], key: absurd}})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: b"", "no saved cache"),
        (lambda data: b"once upon a time there was a text", "no saved cache"),
        (lambda data: data[: len(data) // 2], "truncated|beginning"),
        (lambda data: data[:-1], "is truncated"),
        (lambda data: data + b" ", "is altered"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "does not agree with its checksum"),
        (lambda data: data.replace(b'"version":"1"', b'"version":"3"'), "has format 3.*newer"),
    ],
)
def test_the_reason_is_said(tmp_path, change, reason):
    path = tmp_path / "a.cake"
    write_snapshot(path, made())
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(SnapshotError, match=reason):
        read_snapshot(path)


def test_another_programs_safetensors_file_and_no_file(tmp_path):
    save_file({"keys": torch.zeros(2)}, tmp_path / "a.safetensors")
    save_file({"keys": torch.zeros(2)}, tmp_path / "b.safetensors", metadata={"format": "pt"})
    for name in ("a.safetensors", "b.safetensors"):
        with pytest.raises(SnapshotError, match="no saved cache"):
            read_snapshot(tmp_path / name)
    with pytest.raises(SnapshotError, match="No such file"):
        read_snapshot(tmp_path / "none.cake")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / ("a" * 300), f"{tmp_path}/a\0b", tmp_path / "pipe"):
        with pytest.raises(SnapshotError, match="cannot read"):
            read_snapshot(path)


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_done(tmp_path):
    for path, reason in (
        (tmp_path, "is a folder"),
        (tmp_path / "none" / "a.cake", "there is no folder"),
        ("/dev/null", "no ordinary file"),
        (tmp_path / ("a" * 300), "File name too long"),
        (f"{tmp_path}/a\0b", "null"),
    ):
        with pytest.raises(SnapshotError, match=reason):
            check_target(path)
        with pytest.raises(SnapshotError, match=reason):
            write_snapshot(path, made())


def test_only_a_saved_cache_is_replaced_and_permissions_stay(tmp_path):
    path = tmp_path / "a.cake"
    write_snapshot(path, made(1))
    (tmp_path / "new").touch()
    assert path.stat().st_mode == (tmp_path / "new").stat().st_mode, "not what a new file has"
    path.chmod(0o640)
    (tmp_path / "link.cake").symlink_to(path)
    write_snapshot(tmp_path / "link.cake", made(2))
    assert same(read_snapshot(path), made(2))
    assert (path.stat().st_mode & 0o777, (tmp_path / "link.cake").is_symlink()) == (0o640, True)
    write_snapshot(tmp_path / "new", made(3))  # an empty file is nobody's
    path.write_bytes(path.read_bytes()[:-9])  # a damaged one of ours may go
    write_snapshot(path, made(4))
    assert same(read_snapshot(path), made(4))
    save_file({"keys": torch.zeros(2)}, tmp_path / "weights.safetensors", metadata={"format": "pt"})
    (tmp_path / "notes.txt").write_text("what I must not lose")
    (tmp_path / "short").write_bytes(b"x")
    for name in ("notes.txt", "short", "weights.safetensors"):
        before = (tmp_path / name).read_bytes()
        with pytest.raises(SnapshotError, match="is no saved cache; give another name"):
            write_snapshot(tmp_path / name, made())
        assert (tmp_path / name).read_bytes() == before
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".part")]


def test_two_processes_that_save_to_one_file_leave_one_of_the_two_whole(tmp_path):
    path = tmp_path / "a.cake"
    writers = [subprocess.Popen([sys.executable, "-c", SAVER, str(path)], stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for writer in writers:
            assert writer.stdout is not None
            writer.stdout.readline()
        while not path.exists():
            time.sleep(0.01)
        for _ in range(20):
            assert read_snapshot(path).about == {}
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()


@pytest.mark.parametrize("moment", ["saved_file._header", "saved_file._digest", "snapshot.safe_open"])
def test_a_file_that_is_replaced_while_it_is_read_is_the_old_one_or_the_new_one(tmp_path, monkeypatch, moment):
    path = tmp_path / "a.cake"
    module, name = moment.split(".")
    module = importlib.import_module(f"cake_infer.cache.{module}")
    original, seeds = getattr(module, name), iter([2])

    def replaced(*arguments, **options):
        found = original(*arguments, **options)
        for seed in seeds:
            write_snapshot(path, replace(made(seed), about={"seed": seed}))
        return found

    write_snapshot(path, replace(made(1), about={"seed": 1}))
    monkeypatch.setattr(module, name, replaced)
    found = read_snapshot(path)
    assert same(found, replace(made(found.about["seed"]), about=found.about))

    seeds = itertools.count(3)  # somebody who never stops
    monkeypatch.setattr(module, name, lambda *a, **k: (original(*a, **k), write_snapshot(path, made(next(seeds))))[0])
    if name != "_digest":  # which a writer calls as well
        with pytest.raises(SnapshotError, match="it was written anew 20 times meanwhile; try again"):
            read_snapshot(path)


def test_a_save_that_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path, monkeypatch):
    path = tmp_path / "a.cake"
    write_snapshot(path, made(1))

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SnapshotError, match="No space left"):
        write_snapshot(path, made(2))
    assert os.listdir(tmp_path) == ["a.cake"]
    assert same(read_snapshot(path), made(1))


SAVER = """
import sys, torch, numpy as np
from cake_infer.cache.saved_rows import SavedPacked, SavedRows, whole
from cake_infer.cache.snapshot import Snapshot, write_snapshot
slots = 1 << 12
length = np.array([[slots]])
rows = SavedRows(
    torch.ones(slots, 64), torch.ones(slots, 64), torch.arange(slots, dtype=torch.int32), torch.ones(slots), length,
    length,
)
print("ready", flush=True)
while True:
    write_snapshot(sys.argv[1], Snapshot(rows, list(range(slots)), None, {}))
"""


def test_what_a_killed_save_left_goes_with_a_later_one_and_nothing_else_does(tmp_path):
    target, hour_ago = tmp_path / "a.cake", time.time() - 3700
    old = [tmp_path / ".a.cake.0123456789ab.part", tmp_path / ".a.cake.ffffffffffff.part"]
    others = [tmp_path / ".b.cake.0123456789ab.part", tmp_path / "a.cake.part", tmp_path / ".a.cake.notes.part"]
    being_written = tmp_path / ".a.cake.aaaaaaaaaaaa.part"
    for path in (*old, *others, being_written):
        path.write_bytes(b"half")
        if path != being_written:
            os.utime(path, (hour_ago, hour_ago))
    write_snapshot(target, made())
    assert sorted(tmp_path.iterdir()) == sorted([target, *others, being_written])


def test_killed_during_a_save_the_old_file_or_the_new_one_is_there(tmp_path):
    path = tmp_path / "a.cake"
    write_snapshot(path, made())
    process = subprocess.Popen([sys.executable, "-c", SAVER, str(path)], stdout=subprocess.PIPE)
    seen_unfinished = False
    try:
        assert process.stdout is not None
        process.stdout.readline()
        deadline = time.monotonic() + 20
        while not seen_unfinished and time.monotonic() < deadline:
            seen_unfinished = any(name.endswith(".part") for name in os.listdir(tmp_path))
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert seen_unfinished
    assert read_snapshot(path).about in ({}, made().about)


def made_packed(bits: int = 4) -> Snapshot:
    generator = torch.Generator().manual_seed(bits)
    packed_length = LENGTH * 2  # beside LENGTH tokens that are not packed
    slots = int(whole(packed_length).sum())

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).half()

    codes = [torch.randint(0, 255, (slots, bits), generator=generator, dtype=torch.uint8) for _ in range(2)]
    key, value = [numbers(slots // 32, 8) for _ in range(2)], [numbers(slots, 1) for _ in range(2)]
    position = torch.randint(0, 40, (slots,), generator=generator, dtype=torch.int32)
    tables = (*codes, *key, *value, position, torch.zeros(slots))
    one = made()
    rows = replace(one.rows, packed=SavedPacked(bits, tables, packed_length, whole(packed_length)))
    return replace(one, rows=rows)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_packed_rows_come_back_bit_for_bit(tmp_path, bits):
    path, one = tmp_path / "a.cake", made_packed(bits)
    write_snapshot(path, one)
    other = read_snapshot(path)
    assert same(one, other)
    assert other.rows.packed.bits == bits
    assert (other.rows.packed.length == one.rows.packed.length).all()
    assert (other.rows.packed.capacity == whole(one.rows.packed.length)).all()
    for table, found in zip(one.rows.packed.tables, other.rows.packed.tables, strict=True):
        assert torch.equal(table, found)
    assert b'"version":"2"' in path.read_bytes()
    write_snapshot(path, made())
    assert b'"version":"1"' in path.read_bytes(), "what older programs read is written as they read it"


def test_packed_tables_that_do_not_fit_each_other_are_refused(tmp_path):
    path, one = tmp_path / "a.cake", made_packed()
    packed = one.rows.packed
    wrong = [replace(packed, bits=2), replace(packed, bits=3), replace(packed, length=packed.length + 32)]
    for number in range(8):
        tables = list(packed.tables)
        tables[number] = tables[number][1:]
        wrong.append(replace(packed, tables=tuple(tables)))
        tables[number] = packed.tables[number].double()
        wrong.append(replace(packed, tables=tuple(tables)))
    outside = list(packed.tables)
    outside[6] = torch.full_like(outside[6], 40)
    wrong.append(replace(packed, tables=tuple(outside)))
    for spoilt in wrong:
        write_snapshot(path, replace(one, rows=replace(one.rows, packed=spoilt)))
        with pytest.raises(SnapshotError, match="is inconsistent"):
            read_snapshot(path)
