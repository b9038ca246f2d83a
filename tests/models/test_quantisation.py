"""int8 and int4 matrices are the nearest of their levels, and are packed once into a file of the checkpoint's own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from cake_infer.errors import OptionError, WeightsError
from cake_infer.models.config import read_config
from cake_infer.models.packed import FILE, as_quantised, load_quantised, packed_folder, quantised_bytes
from cake_infer.models.quantisation import Int4Matrix, Int8Matrix, embedded, quantise, widen_into
from cake_infer.models.weights import load_decoder


def matrix(rows: int = 40, columns: int = 96) -> torch.Tensor:
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    values[3] = 0.0
    values[5] *= 1000.0
    return values


def test_int8_is_the_nearest_of_255_levels_of_its_row() -> None:
    values = matrix()
    packed = quantise(values, "int8")
    assert torch.equal(values, matrix()), "the matrix itself was changed"
    assert isinstance(packed, Int8Matrix)
    step = values.abs().amax(1, keepdim=True) / 127
    found = widen_into(torch.empty(values.shape), packed)
    assert ((found - values).abs() <= step / 2 * (1 + 1e-5)).all()
    assert (packed.data.abs().amax(1) == torch.where(step[:, 0] > 0, 127, 0)).all()
    assert packed.nbytes == 40 * 96 + 4 * 40


def test_int4_is_the_nearest_of_16_levels_of_its_group() -> None:
    values = matrix()
    packed = quantise(values, "int4")
    assert torch.equal(values, matrix()), "the matrix itself was changed"
    assert isinstance(packed, Int4Matrix)
    assert packed.nbytes == 40 * 48 + 40 * 3 * 4
    groups = values.view(40, 3, 32)
    step = (groups.amax(2) - groups.amin(2)) / 15
    size = groups.abs().amax(2)
    # half a step, and what rounding the two factors to bf16 moves: 15 steps and the lowest value, each by 2^-9
    bound = step / 2 + 15 * step * 2**-8 + size * 2**-8
    found = widen_into(torch.empty(values.shape), packed).view(groups.shape)
    assert ((found - groups).abs() <= bound[..., None]).all()
    assert (found[3] == 0).all()


def test_numbers_that_are_on_the_levels_come_back_exactly() -> None:
    generator = torch.Generator().manual_seed(1)
    levels = torch.randint(0, 16, (8, 2, 32), generator=generator)
    levels[..., 0], levels[..., 1] = 0, 15
    scale = 2.0 ** torch.randint(-6, 0, (8, 2, 1), generator=generator)
    values = (levels * scale - 3 * scale).view(8, 64)
    assert torch.equal(widen_into(torch.empty(8, 64), quantise(values, "int4")), values)


@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_rows_and_tiles_are_those_of_the_whole(quant: str) -> None:
    packed = quantise(matrix(2100, 64), quant)
    whole = widen_into(torch.empty(2100, 64), packed)
    assert torch.equal(embedded(packed, torch.tensor([7, 2099, 7])), whole[[7, 2099, 7]])
    assert torch.equal(widen_into(torch.empty(5, 64), packed, 1021), whole[1021:1026])
    assert packed.shape == (2100, 64)
    assert packed.numel() == 2100 * 64


def test_int4_refuses_rows_without_whole_groups() -> None:
    with pytest.raises(OptionError, match="groups of 32"):
        quantise(torch.zeros(4, 40), "int4")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CAKE_INFER_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.parametrize("quant", ["int8", "int4"])
@pytest.mark.parametrize("options", [{}, {"tie_word_embeddings": True}, {"model_type": "qwen2"}])
def test_a_packed_model_is_made_once_and_mapped(home: Path, tmp_path: Path, write_checkpoint, quant, options) -> None:
    folder = write_checkpoint(tmp_path / "model", dtype=torch.bfloat16, **options)
    config = read_config(folder)
    first = load_quantised(folder, config, quant)
    file = packed_folder(folder, quant) / FILE
    made = file.stat().st_mtime_ns
    second = load_quantised(folder, config, quant)
    assert file.stat().st_mtime_ns == made
    assert str(file) in Path("/proc/self/maps").read_text()
    direct = as_quantised(load_decoder(folder, config), quant)
    hidden = direct.embed(torch.arange(20))
    for decoder in (first, second):
        assert torch.equal(decoder.embed(torch.arange(20)), hidden)
        assert torch.equal(decoder.logits(hidden), direct.logits(hidden))
        assert torch.equal(decoder.widened(1).down_proj, direct.widened(1).down_proj)
    # norms and biases are counted as fp32 and stored as bf16
    assert second.nbytes <= quantised_bytes(second.config, quant) <= second.nbytes + 5000


def test_another_checkpoint_gets_another_file(home: Path, tmp_path: Path, write_checkpoint) -> None:
    folder = write_checkpoint(tmp_path / "model")
    before = packed_folder(folder, "int8")
    assert before != packed_folder(folder, "int4")
    load_quantised(folder, read_config(folder), "int8")
    write_checkpoint(tmp_path / "model", seed=1)
    os.utime(folder / "model.safetensors", ns=(1, 1))
    assert packed_folder(folder, "int8") != before
    other = load_quantised(folder, read_config(folder), "int8")
    assert torch.equal(
        other.embed(torch.arange(9)), as_quantised(load_decoder(folder, other.config), "int8").embed(torch.arange(9))
    )


def test_a_damaged_file_is_refused_and_nothing_is_needed_where_nothing_can_be_written(
    home: Path, tmp_path: Path, write_checkpoint, caplog
) -> None:
    folder = write_checkpoint(tmp_path / "model")
    config = read_config(folder)
    load_quantised(folder, config, "int8")
    file = packed_folder(folder, "int8") / FILE
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(WeightsError, match=r"weights\.safetensors"):
        load_quantised(folder, config, "int8")
    home.joinpath("packed").rename(home / "old")
    home.joinpath("packed").write_text("a file where a folder is wanted")
    with caplog.at_level("WARNING"):
        decoder = load_quantised(folder, config, "int8")
    assert "packed anew" in caplog.text
    assert decoder.dtype == torch.int8
