"""A GGUF becomes the weights it was made from; a broken one, a full disk or an interrupt leaves nothing."""

from __future__ import annotations

import shutil
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from cake_infer.errors import CakeError, MemoryLimit, OptionError, WeightsError
from cake_infer.models import gguf_file
from cake_infer.models.config import read_config
from cake_infer.models.gguf_import import import_gguf
from safetensors.numpy import load_file

Write = Callable[..., Path]


def _nothing_left(tmp_path: Path) -> bool:
    return {path.name for path in tmp_path.iterdir()} <= {"source", "m.gguf"}


# --- weights --------------------------------------------------------------------------------------------------------

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama without GQA, tied": {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "llama with a head size of its own": {"head_dim": 16, "rope_theta": 500000.0},
    "llama with biases": {"attention_bias": True, "mlp_bias": True},
    "mistral with a window": {"model_type": "mistral", "sliding_window": 64},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "gemma": {"model_type": "gemma"},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gguf_becomes_the_checkpoint_that_it_was_made_from(
    tmp_path: Path, gguf_source: Write, write_gguf: Write, family: str
) -> None:
    folder = gguf_source(**FAMILIES[family])
    window = FAMILIES[family].get("sliding_window")
    path = write_gguf(
        tmp_path / "m.gguf", folder, metadata={"llama.attention.sliding_window": window} if window else {}
    )
    out = import_gguf(path, tmp_path / "out", dtype="float32")
    expected, found = load_file(folder / "model.safetensors"), load_file(out / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=0, atol=2e-7, err_msg=name)
        assert "norm" in name or (found[name] == array).all()  # Gemma's norms were stored as 1 + weight
    assert replace(read_config(out), eos_token_ids=(2,)) == read_config(folder)


def test_biases_on_q_k_and_v_alone_keep_their_values(tmp_path: Path, gguf_source: Write, write_gguf: Write) -> None:
    folder = gguf_source(attention_bias=True)
    biases = {f"blk.{layer}.attn_output.bias": ... for layer in range(3)}
    out = import_gguf(write_gguf(tmp_path / "m.gguf", folder, tensors=biases), tmp_path / "out", dtype="float32")
    expected, found = load_file(folder / "model.safetensors"), load_file(out / "model.safetensors")
    assert found.keys() == {name for name in expected if not name.endswith("o_proj.bias")}
    assert all((found[name] == expected[name]).all() for name in found)
    config = read_config(out)
    assert (config.attention_bias, config.output_bias) == (True, False)


def test_the_imported_order_gives_the_attention_scores_of_llama_cpps_rotation(
    tmp_path: Path, gguf_source: Write, write_gguf: Write
) -> None:
    path = write_gguf(tmp_path / "m.gguf", gguf_source())
    out = import_gguf(path, tmp_path / "out", dtype="float32")
    raw = {tensor.name: np.array(tensor.data) for tensor in gguf.GGUFReader(path).tensors}
    ours = load_file(out / "model.safetensors")
    x = np.random.default_rng(0).normal(size=(2, 32)).astype(np.float32)  # a query's and a key's hidden states
    angles = np.array([7, 3])[:, None] * 10000.0 ** (-np.arange(0, 8, 2) / 8)  # [2, head_dim / 2]

    def score(q: Any, k: Any, halves: tuple[Any, Any]) -> float:
        rotated = []
        for index, rows in enumerate((q[:8], k[:8])):  # the first head of each
            values, (a, b) = rows @ x[index], halves
            cos, sin = np.cos(angles[index]), np.sin(angles[index])
            rotated.append(np.concatenate([values[a] * cos - values[b] * sin, values[b] * cos + values[a] * sin]))
        return float(rotated[0] @ rotated[1])

    adjacent = score(raw["blk.1.attn_q.weight"], raw["blk.1.attn_k.weight"], (slice(0, 8, 2), slice(1, 8, 2)))
    layer = "model.layers.1.self_attn."
    split = score(ours[f"{layer}q_proj.weight"], ours[f"{layer}k_proj.weight"], (slice(0, 4), slice(4, 8)))
    assert split == pytest.approx(adjacent, rel=1e-5)


@pytest.mark.parametrize("quantisation", ["Q8_0", "Q4_1", "F16", "BF16"])
@pytest.mark.parametrize("piece", [1 << 22, 96])
def test_quantised_tensors_are_dequantised_whole_or_in_pieces(
    tmp_path: Path,
    gguf_source: Write,
    write_gguf: Write,
    monkeypatch: pytest.MonkeyPatch,
    quantisation: str,
    piece: int,
) -> None:
    monkeypatch.setattr(gguf_file, "_PIECE_ELEMENTS", piece)
    folder = gguf_source()
    path = write_gguf(tmp_path / "m.gguf", folder, quantisation=quantisation)
    found = load_file(import_gguf(path, tmp_path / "out", dtype="float32") / "model.safetensors")
    expected = load_file(folder / "model.safetensors")
    kind = gguf.GGMLQuantizationType[quantisation]
    for name, array in expected.items():
        if array.ndim == 1:
            np.testing.assert_array_equal(found[name], array)
        else:  # quantisation runs along rows, so that reordering rows changes nothing
            np.testing.assert_array_equal(found[name], gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_weights_are_stored_as_asked(tmp_path: Path, gguf_source: Write, write_gguf: Write, dtype: str) -> None:
    import torch
    from safetensors.torch import load_file as load_torch

    folder = gguf_source()
    out = import_gguf(write_gguf(tmp_path / "m.gguf", folder), tmp_path / "out", dtype=dtype)
    expected, found = load_torch(folder / "model.safetensors"), load_torch(out / "model.safetensors")
    assert all(torch.equal(found[name], expected[name].to(getattr(torch, dtype))) for name in expected)
    assert read_config(out).dtype == dtype
    with pytest.raises(OptionError, match="int8"):
        import_gguf(tmp_path / "m.gguf", tmp_path / "other", dtype="int8")


def test_a_large_tensor_is_never_widened_whole(
    tmp_path: Path, gguf_source: Write, write_gguf: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_file, "_PIECE_ELEMENTS", 1 << 14)
    rows = np.ones((60_000, 32), dtype=np.float32)  # 7.7 MB
    path = write_gguf(
        tmp_path / "m.gguf",
        gguf_source(),
        quantisation="Q8_0",
        tensors={"token_embd.weight": rows, "output.weight": ...},
    )
    tracemalloc.start()
    try:
        import_gguf(path, tmp_path / "out")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < rows.nbytes / 2


# --- broken files, interrupts, targets ------------------------------------------------------------------------------


def test_a_file_that_is_cut_anywhere_is_refused_in_one_line(
    tmp_path: Path, gguf_source: Write, write_gguf: Write
) -> None:
    whole = write_gguf(tmp_path / "m.gguf", gguf_source()).read_bytes()
    for size in [0, 3, 4, 10, 30, 500, 2000, len(whole) // 10, len(whole) // 2, len(whole) * 9 // 10, len(whole) - 40]:
        (tmp_path / "m.gguf").write_bytes(whole[:size])
        with pytest.raises(WeightsError) as caught:
            import_gguf(tmp_path / "m.gguf", tmp_path / "out")
        assert str(tmp_path / "m.gguf") in str(caught.value)
        assert "\n" not in str(caught.value)
    assert _nothing_left(tmp_path)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"\x80\x02not a model", "is not a GGUF file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (b"GGUF" + (1).to_bytes(4, "little") + bytes(16), "version 1"),
        (b"GGUF" + (3).to_bytes(4, "big") + bytes(16), "big-endian"),
        (b"GGUF\x03\0\0\0" + bytes(8) + (1 << 60).to_bytes(8, "little") + bytes(99), "cut short or broken"),
        # one metadata entry: an array of 2^60 numbers
        (
            b"GGUF\x03\0\0\0" + bytes(8) + b"\x01" + bytes(7) + b"\x01" + bytes(7) + b"k"
            + (9).to_bytes(4, "little") + (4).to_bytes(4, "little") + (1 << 60).to_bytes(8, "little") + bytes(64),
            "cut short or broken",
        ),
    ],
)  # fmt: skip
def test_what_is_no_gguf_is_refused_at_once(tmp_path: Path, content: bytes, expected: str) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(WeightsError, match=expected):
        import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    assert _nothing_left(tmp_path)


def test_flipped_bytes_in_the_header_never_escape_as_another_error(
    tmp_path: Path, gguf_source: Write, write_gguf: Write
) -> None:
    whole = bytearray(write_gguf(tmp_path / "m.gguf", gguf_source()).read_bytes())
    generator = np.random.default_rng(1)
    messages = []
    for number in range(60):
        broken = bytearray(whole)
        for at in generator.integers(4, 1200, size=3):
            broken[at] ^= 1 << int(generator.integers(8))
        (tmp_path / "m.gguf").write_bytes(broken)
        try:
            import_gguf(tmp_path / "m.gguf", tmp_path / f"out{number}")
        except CakeError as error:
            messages.append(str(error))
    assert len(messages) > 30
    assert not any("\n" in message for message in messages)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"cannot read .*absent\.gguf"):
        import_gguf(tmp_path / "absent.gguf", tmp_path / "out")
    with pytest.raises(WeightsError, match="is a folder"):
        import_gguf(tmp_path, tmp_path / "out")


def test_an_interrupt_leaves_nothing(tmp_path: Path, gguf_source: Write, write_gguf: Write) -> None:
    path = write_gguf(tmp_path / "m.gguf", gguf_source())
    seen: list[tuple[str, int, int]] = []

    def interrupt(*report: Any) -> None:
        seen.append(report)
        if len(seen) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_gguf(path, tmp_path / "out", on_progress=interrupt)
    assert _nothing_left(tmp_path)
    seen.clear()
    import_gguf(path, tmp_path / "out", on_progress=lambda *report: seen.append(report))
    size = (tmp_path / "out" / "model.safetensors").stat().st_size
    assert seen[-1][0] == "import"
    assert seen[-1][1] == seen[-1][2] <= size
    assert [done for _, done, _ in seen] == sorted({done for _, done, _ in seen})


def test_a_target_that_holds_something_is_refused_and_kept(
    tmp_path: Path, gguf_source: Write, write_gguf: Write
) -> None:
    path = write_gguf(tmp_path / "m.gguf", gguf_source())
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("kept")
    with pytest.raises(CakeError, match="not empty"):
        import_gguf(path, out)
    assert [entry.name for entry in out.iterdir()] == ["mine"]
    (out / "mine").unlink()
    assert import_gguf(path, out) == out
    assert (out / "model.safetensors").is_file()
    with pytest.raises(CakeError, match="not a folder"):
        import_gguf(path, path)


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(
    tmp_path: Path, gguf_source: Write, write_gguf: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "m.gguf", gguf_source())
    monkeypatch.setattr(shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(10, 9, 1))  # type: ignore[attr-defined]
    with pytest.raises(MemoryLimit, match="free"):
        import_gguf(path, tmp_path / "out")
    assert _nothing_left(tmp_path)
