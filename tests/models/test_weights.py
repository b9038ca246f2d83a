"""Weights: the index decides, broken files are refused with their path, every tensor is used, nothing is copied."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cake_infer.errors import OptionError, WeightsError
from cake_infer.models.config import read_config
from cake_infer.models.decoder import Decoder
from cake_infer.models.parameters import parameter_shapes
from cake_infer.models.weights import load_decoder, random_decoder, tensor_headers, weight_bytes
from safetensors.torch import load_file, save_file

WriteCheckpoint = Callable[..., Path]
FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma"]


def load(folder: Path, **options: Any) -> Decoder:
    return load_decoder(folder, read_config(folder), **options)


def by_name(decoder: Decoder) -> dict[str, torch.Tensor]:
    """The decoder's tensors under their names in the file, found by an own reading of the fields."""
    names = {"q_bias": "q_proj.bias", "k_bias": "k_proj.bias", "v_bias": "v_proj.bias", "o_bias": "o_proj.bias"}
    tensors = {"model.embed_tokens.weight": decoder.embed_tokens, "model.norm.weight": decoder.norm}
    if decoder.lm_head is not decoder.embed_tokens:
        tensors["lm_head.weight"] = decoder.lm_head
    for index, layer in enumerate(decoder.layers):
        for field, tensor in layer.named_tensors():
            group = "mlp." if field.split("_")[0] in ("gate", "up", "down") else "self_attn."
            group = "" if field.endswith("layernorm") else group
            mlp_bias = field.endswith("_bias") and group == "mlp."
            name = field.replace("_bias", "_proj.bias") if mlp_bias else names.get(field, f"{field}.weight")
            tensors[f"model.layers.{index}.{group}{name}"] = tensor
    return tensors


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], None], file: str = "model.safetensors") -> None:
    tensors = load_file(folder / file)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    change(tensors)
    save_file(tensors, folder / file)


def set_config(folder: Path, **keys: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shards", [1, 3])
def test_every_tensor_of_the_file_becomes_the_parameter_of_its_name(
    write_checkpoint: WriteCheckpoint, tmp_path: Path, family: str, shards: int
) -> None:
    folder = write_checkpoint(tmp_path, model_type=family, shards=shards, mlp_bias=True)
    stored: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        stored |= load_file(file)
    decoder = load(folder)
    loaded = by_name(decoder)
    assert loaded.keys() == stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(loaded[name], tensor), name
    assert decoder.nbytes == sum(tensor.nbytes for tensor in stored.values()) == weight_bytes(folder)
    assert set(parameter_shapes(decoder.config)) == set(stored)


class TestMapping:
    def test_tensors_are_views_of_the_file_not_copies(self, write_checkpoint: WriteCheckpoint, tmp_path: Path) -> None:
        folder = write_checkpoint(tmp_path, dtype=torch.bfloat16, shards=2)
        headers = tensor_headers(folder)
        maps = Path("/proc/self/maps")
        decoder = load(folder)
        loaded = by_name(decoder)
        assert len({tensor.untyped_storage().data_ptr() for tensor in loaded.values()}) == 2
        for name, tensor in loaded.items():
            storage = tensor.untyped_storage()
            assert storage.nbytes() == headers[name].file.stat().st_size
            assert tensor.data_ptr() - storage.data_ptr() == headers[name].offset
            if maps.exists():
                line = next(
                    line for line in maps.read_text().splitlines() if line.startswith(f"{storage.data_ptr():x}-")
                )
                assert line.endswith(str(headers[name].file))

    def test_a_write_does_not_reach_the_file(self, write_checkpoint: WriteCheckpoint, tmp_path: Path) -> None:
        folder = write_checkpoint(tmp_path)
        before = (folder / "model.safetensors").read_bytes()
        load(folder).embed_tokens.fill_(7.0)
        assert (folder / "model.safetensors").read_bytes() == before

    def test_a_layout_that_cannot_be_mapped_is_read(self, write_checkpoint: WriteCheckpoint, tmp_path: Path) -> None:
        folder = write_checkpoint(tmp_path, dtype=torch.bfloat16)
        path = folder / "model.safetensors"
        expected = {name: tensor.clone() for name, tensor in load_file(path).items()}
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = data[8 : 8 + length].rstrip()
        header += b" " * ((1 - len(header)) % 8)  # data from an odd byte on
        path.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + length :])
        loaded = by_name(load(folder))
        for name, tensor in expected.items():
            assert torch.equal(loaded[name], tensor), name

    @pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux' resettable peak RSS")
    def test_converting_peaks_at_the_model_and_one_tensor(
        self, tmp_path: Path, write_checkpoint: WriteCheckpoint
    ) -> None:
        size = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6}
        folder = write_checkpoint(tmp_path, **size, num_attention_heads=8, head_dim=64)
        stored, largest = weight_bytes(folder), 4 * 512 * 2048
        assert stored > 80e6

        def memory(field: str) -> int:
            lines = Path("/proc/self/status").read_text().splitlines()
            return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024

        Path("/proc/self/clear_refs").write_text("5")
        before = memory("VmRSS:")
        decoder = load(folder, dtype="bfloat16")
        peak = memory("VmHWM:") - before
        assert decoder.nbytes == stored // 2
        assert peak < stored // 2 + largest + 8e6


class TestWhichFiles:
    def test_the_index_decides(self, write_checkpoint: WriteCheckpoint, tmp_path: Path) -> None:
        folder = write_checkpoint(tmp_path, shards=2)
        expected = by_name(load(folder))
        zeros = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
        save_file(zeros, folder / "model.safetensors")
        save_file({"layers.0.attention.wq.weight": torch.zeros(4, 4)}, folder / "consolidated.safetensors")
        assert all(torch.equal(tensor, expected[name]) for name, tensor in by_name(load(folder)).items())
        # Not even opened: neither is a safetensors file now.
        (folder / "model.safetensors").write_bytes(b"rubbish")
        (folder / "consolidated.safetensors").write_bytes(b"")
        assert all(torch.equal(tensor, expected[name]) for name, tensor in by_name(load(folder)).items())

    def test_of_a_tensor_in_two_shards_the_index_decides(
        self, write_checkpoint: WriteCheckpoint, tmp_path: Path
    ) -> None:
        folder = write_checkpoint(tmp_path, shards=2)
        expected = by_name(load(folder))
        name = "model.embed_tokens.weight"
        second = "model-00002-of-00002.safetensors"
        edit(folder, lambda tensors: tensors.update({name: torch.zeros_like(expected[name])}), second)
        assert torch.equal(load(folder).embed_tokens, expected[name])
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        index["weight_map"][name] = second
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        assert not load(folder).embed_tokens.any()

    def test_without_an_index_model_safetensors_counts(self, write_checkpoint: WriteCheckpoint, tmp_path: Path) -> None:
        folder = write_checkpoint(tmp_path)
        (folder / "consolidated.safetensors").write_bytes(b"rubbish")
        assert load(folder).config.num_layers == 3

    @pytest.mark.parametrize(
        ("present", "hint"),
        [
            ("consolidated.safetensors", "Hugging Face"),
            ("consolidated.00.safetensors", "Hugging Face"),
            ("model-00001-of-00002.safetensors", r"index\.json"),
            ("pytorch_model.bin", "safetensors"),
            ("notes.txt", "no weights"),
        ],
    )
    def test_a_folder_without_them_is_refused_with_a_hint(
        self, write_checkpoint: WriteCheckpoint, tmp_path: Path, present: str, hint: str
    ) -> None:
        folder = write_checkpoint(tmp_path)
        (folder / "model.safetensors").rename(folder / present)
        with pytest.raises(WeightsError, match=hint) as error:
            load(folder)
        assert str(folder) in str(error.value)

    def test_an_index_that_does_not_fit_its_files_is_refused(
        self, write_checkpoint: WriteCheckpoint, tmp_path: Path
    ) -> None:
        folder = write_checkpoint(tmp_path, shards=2)
        path = folder / "model.safetensors.index.json"
        original = json.loads(path.read_text())
        name = "model.norm.weight"

        def refused(weight_map: Any, named: str) -> None:
            path.write_text(json.dumps({"weight_map": weight_map}))
            with pytest.raises(WeightsError, match=named):
                load(folder)

        weights = original["weight_map"]
        refused({**weights, name: "model-00003-of-00003.safetensors"}, "model-00003-of-00003.safetensors is missing")
        refused({**weights, name: "model-00001-of-00002.safetensors"}, "does not hold model.norm.weight")
        refused({key: file for key, file in weights.items() if key != name}, "holds model.norm.weight")
        refused({**weights, name: "../model.safetensors"}, "not a file of the folder")
        refused({}, "weight_map")
        path.write_text('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}')
        with pytest.raises(WeightsError, match="twice"):
            load(folder)
        path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
        with pytest.raises(WeightsError, match="git lfs"):
            load(folder)


class TestBrokenFiles:
    def refused(self, folder: Path, match: str, file: str = "model.safetensors") -> None:
        for read in (lambda: load(folder), lambda: tensor_headers(folder), lambda: weight_bytes(folder)):
            with pytest.raises(WeightsError, match=match) as error:
                read()
            assert str(folder / file) in str(error.value)
            assert "\n" not in str(error.value)

    def test_git_lfs_pointer(self, write_checkpoint: WriteCheckpoint, tmp_path: Path) -> None:
        folder = write_checkpoint(tmp_path, shards=2)
        pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1234\n"
        (folder / "model-00002-of-00002.safetensors").write_bytes(pointer)
        self.refused(folder, "git lfs", "model-00002-of-00002.safetensors")

    @pytest.mark.parametrize("share", [0.9, 0.999, 0.1, 0.01])
    def test_cut_file(self, write_checkpoint: WriteCheckpoint, tmp_path: Path, share: float) -> None:
        folder = write_checkpoint(tmp_path)
        data = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(data[: int(len(data) * share)])
        self.refused(folder, "truncated")

    @pytest.mark.parametrize(("data", "match"), [(b"", "empty"), (b"\x10\0\0", "truncated"), (b"not weights", "trunc")])
    def test_empty_and_tiny_files(
        self, write_checkpoint: WriteCheckpoint, tmp_path: Path, data: bytes, match: str
    ) -> None:
        folder = write_checkpoint(tmp_path)
        (folder / "model.safetensors").write_bytes(data)
        self.refused(folder, match)

    def test_missing_file_behind_a_dangling_link(self, write_checkpoint: WriteCheckpoint, tmp_path: Path) -> None:
        folder = write_checkpoint(tmp_path)
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors").symlink_to(folder / "blobs" / "gone")
        self.refused(folder, "missing")

    def test_a_pipe_is_not_waited_for(self, write_checkpoint: WriteCheckpoint, tmp_path: Path) -> None:
        folder = write_checkpoint(tmp_path / "model")
        (folder / "model.safetensors").unlink()
        os.mkfifo(folder / "model.safetensors")
        self.refused(folder, "no ordinary file")

    @pytest.mark.parametrize(
        ("entry", "match"),
        [
            ({"data_offsets": [0, 1 << 40]}, "cannot take bytes"),
            ({"shape": [1 << 20, 1 << 18], "data_offsets": [0, 1 << 40]}, "truncated"),
            ({"data_offsets": [128, 0]}, "cannot take bytes"),
            ({"data_offsets": [-128, 0]}, "malformed"),
            ({"data_offsets": [0]}, "malformed"),
            ({"shape": [-32]}, "malformed"),
            ({"shape": [True]}, "malformed"),
            ({"dtype": 5}, "malformed"),
        ],
    )
    def test_header_that_lies(
        self, write_checkpoint: WriteCheckpoint, tmp_path: Path, entry: dict[str, Any], match: str
    ) -> None:
        folder = write_checkpoint(tmp_path)
        rewrite_header(folder, lambda header: header["model.norm.weight"].update(entry))
        self.refused(folder, match)

    def test_tensors_that_overlap_or_leave_a_gap(self, write_checkpoint: WriteCheckpoint, tmp_path: Path) -> None:
        folder = write_checkpoint(tmp_path)
        original = (folder / "model.safetensors").read_bytes()
        names = ["model.layers.0.input_layernorm.weight", "model.layers.1.input_layernorm.weight"]

        def overlap(header: dict[str, Any]) -> None:
            header[names[0]]["data_offsets"] = header[names[1]]["data_offsets"]

        rewrite_header(folder, overlap)
        self.refused(folder, "begins at byte")
        (folder / "model.safetensors").write_bytes(original + b"more")
        self.refused(folder, "4 bytes after its last tensor")

    def test_header_that_is_not_an_object_or_repeats_a_name(
        self, write_checkpoint: WriteCheckpoint, tmp_path: Path
    ) -> None:
        folder = write_checkpoint(tmp_path)
        for text, match in [
            (b"[1]", "JSON object"),
            (b"{...", "valid JSON"),
            (b"\xff\xff", "valid JSON"),
            (b'{"model.norm.weight": {}, "model.norm.weight": {}}', "twice"),
            (b'{"model.norm.weight": ' + b"9" * 5000 + b"}", "valid JSON"),
            (b"[" * 100_000, "valid JSON"),
        ]:
            (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
            self.refused(folder, match)


def rewrite_header(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


class TestFit:
    """Tensors and config must fit each other exactly."""

    @pytest.mark.parametrize("shards", [1, 2])
    @pytest.mark.parametrize(
        "name", ["model.layers.3.mlp.up_proj.weight", "model.layers.0.self_attn.g_proj.weight", "score.weight"]
    )
    def test_a_tensor_nobody_reads_is_named(
        self, write_checkpoint: WriteCheckpoint, tmp_path: Path, name: str, shards: int
    ) -> None:
        folder = write_checkpoint(tmp_path, shards=shards)
        file = "model.safetensors" if shards == 1 else "model-00002-of-00002.safetensors"
        edit(folder, lambda tensors: tensors.update({name: torch.zeros(4)}), file)
        if shards == 2:
            index = json.loads((folder / "model.safetensors.index.json").read_text())
            index["weight_map"][name] = file
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(WeightsError, match=name):
            load(folder)

    @pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"])
    def test_a_missing_parameter_is_named(self, write_checkpoint: WriteCheckpoint, tmp_path: Path, name: str) -> None:
        folder = write_checkpoint(tmp_path)
        edit(folder, lambda tensors: tensors.pop(name))
        with pytest.raises(WeightsError, match=name):
            load(folder)

    def test_qwen_biases_are_required_and_llama_does_not_drop_them(
        self, write_checkpoint: WriteCheckpoint, tmp_path: Path
    ) -> None:
        folder = write_checkpoint(tmp_path, model_type="qwen2")
        expected = by_name(load(folder))
        bias = "model.layers.0.self_attn.q_proj.bias"
        assert expected[bias].any()
        # The same file under a llama config: used where attention_bias says so, refused where it does not.
        set_config(folder, model_type="llama", architectures=["LlamaForCausalLM"], attention_bias=True)
        as_llama = load(folder)
        assert torch.equal(by_name(as_llama)[bias], expected[bias])
        assert not as_llama.config.output_bias
        set_config(folder, attention_bias=False)
        with pytest.raises(WeightsError, match=r"layers\.0\.self_attn\.k_proj\.bias.*attention_bias"):
            load(folder)
        set_config(folder, model_type="qwen2", architectures=["Qwen2ForCausalLM"])
        edit(folder, lambda tensors: tensors.pop(bias))
        with pytest.raises(WeightsError, match=bias):
            load(folder)

    def test_qwen3_norms_are_required(self, write_checkpoint: WriteCheckpoint, tmp_path: Path) -> None:
        folder = write_checkpoint(tmp_path, model_type="qwen3")
        edit(folder, lambda tensors: tensors.pop("model.layers.2.self_attn.k_norm.weight"))
        with pytest.raises(WeightsError, match=r"model\.layers\.2\.self_attn\.k_norm\.weight"):
            load(folder)

    def test_rotary_frequencies_are_the_known_exception(
        self, write_checkpoint: WriteCheckpoint, tmp_path: Path
    ) -> None:
        folder = write_checkpoint(tmp_path)
        old = {f"model.layers.{index}.self_attn.rotary_emb.inv_freq": torch.ones(4) for index in range(3)}
        edit(folder, lambda tensors: tensors.update(old))
        assert load(folder).nbytes == weight_bytes(folder)

    @pytest.mark.parametrize("dtype", [None, "bfloat16"])
    def test_a_tied_head_is_one_tensor_counted_once(
        self, write_checkpoint: WriteCheckpoint, tmp_path: Path, dtype: str | None
    ) -> None:
        folder = write_checkpoint(tmp_path, tie_word_embeddings=True)
        plain = load(folder, dtype=dtype)
        assert plain.lm_head is plain.embed_tokens
        embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
        edit(folder, lambda tensors: tensors.update({"lm_head.weight": embedding.clone()}))
        copied = load(folder, dtype=dtype)
        assert copied.lm_head is copied.embed_tokens
        assert copied.nbytes == plain.nbytes == weight_bytes(folder, dtype)
        edit(folder, lambda tensors: tensors.pop("model.embed_tokens.weight"))
        assert torch.equal(load(folder, dtype=dtype).embed_tokens, plain.embed_tokens)

    def test_a_head_that_is_no_copy_is_not_dropped(self, write_checkpoint: WriteCheckpoint, tmp_path: Path) -> None:
        folder = write_checkpoint(tmp_path)  # untied weights
        set_config(folder, tie_word_embeddings=True)
        with pytest.raises(WeightsError, match=r"lm_head\.weight.*tie_word_embeddings"):
            load(folder)

    @pytest.mark.parametrize(
        ("keys", "named"),
        [
            ({"head_dim": 16}, r"q_proj\.weight has shape \[32, 32\]; config.json calls for \[64, 32\]"),
            ({"num_key_value_heads": 4}, r"k_proj\.weight has shape \[16, 32\]; config.json calls for \[32, 32\]"),
            ({"intermediate_size": 48}, r"\[64, 32\]; config.json calls for \[48, 32\]"),
            ({"vocab_size": 300}, r"embed_tokens\.weight has shape \[320, 32\]; config.json calls for \[300, 32\]"),
        ],
    )
    def test_a_shape_that_does_not_fit_is_named_with_both(
        self, write_checkpoint: WriteCheckpoint, tmp_path: Path, keys: dict[str, Any], named: str
    ) -> None:
        folder = write_checkpoint(tmp_path)
        set_config(folder, **keys)
        with pytest.raises(WeightsError, match=named):
            load(folder)

    @pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float8_e4m3fn, torch.float64, torch.bool])
    @pytest.mark.parametrize("wanted", [None, "float32"])
    def test_integers_and_fp8_are_never_cast(
        self, write_checkpoint: WriteCheckpoint, tmp_path: Path, dtype: torch.dtype, wanted: str | None
    ) -> None:
        folder = write_checkpoint(tmp_path)
        name = "model.layers.1.mlp.up_proj.weight"
        edit(folder, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
        with pytest.raises(WeightsError, match=name):
            load(folder, dtype=wanted)

    def test_packed_weights_of_a_quantiser_are_named(self, write_checkpoint: WriteCheckpoint, tmp_path: Path) -> None:
        folder = write_checkpoint(tmp_path)

        def pack(tensors: dict[str, torch.Tensor]) -> None:
            tensors.pop("model.layers.0.mlp.up_proj.weight")
            tensors["model.layers.0.mlp.up_proj.qweight"] = torch.zeros(4, 64, dtype=torch.int32)

        edit(folder, pack)
        with pytest.raises(WeightsError, match=r"up_proj\.(qweight|weight)"):
            load(folder)


class TestDtype:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    @pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
    def test_the_chosen_dtype_wins_over_files_and_config(
        self, write_checkpoint: WriteCheckpoint, tmp_path: Path, stored: torch.dtype, dtype: str
    ) -> None:
        folder = write_checkpoint(tmp_path, dtype=stored, torch_dtype="float32")
        decoder = load(folder, dtype=dtype)
        chosen = getattr(torch, dtype)
        expected = load_file(folder / "model.safetensors")
        for name, tensor in by_name(decoder).items():
            assert tensor.dtype == chosen
            assert torch.equal(tensor, expected[name].to(chosen))
        assert decoder.dtype == chosen
        assert decoder.compute_dtype == torch.float32
        assert decoder.nbytes == weight_bytes(folder, dtype)

    @pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
    def test_without_one_the_files_decide_not_the_config(
        self, write_checkpoint: WriteCheckpoint, tmp_path: Path, stored: torch.dtype
    ) -> None:
        folder = write_checkpoint(tmp_path, dtype=stored, torch_dtype=...)
        assert {tensor.dtype for tensor in by_name(load(folder)).values()} == {stored}

    def test_mixed_files_stay_mixed(self, write_checkpoint: WriteCheckpoint, tmp_path: Path) -> None:
        folder = write_checkpoint(tmp_path, dtype=torch.bfloat16)
        norm = "model.layers.1.input_layernorm.weight"
        edit(folder, lambda tensors: tensors.update({norm: tensors[norm].float()}))
        loaded = by_name(load(folder))
        assert loaded[norm].dtype == torch.float32
        assert loaded["model.layers.0.input_layernorm.weight"].dtype == torch.bfloat16
        assert load(folder).dtype == torch.bfloat16

    def test_another_device_has_one_dtype_for_matrices_and_the_files_own_for_norms(
        self, write_checkpoint: WriteCheckpoint, tmp_path: Path
    ) -> None:
        folder = write_checkpoint(tmp_path, dtype=torch.bfloat16)
        norm, matrix = "model.layers.1.input_layernorm.weight", "model.layers.1.mlp.up_proj.weight"
        edit(folder, lambda tensors: tensors.update({name: tensors[name].float() for name in (norm, matrix)}))
        decoder = load(folder, device="meta")
        loaded = by_name(decoder)
        assert {tensor.device.type for tensor in loaded.values()} == {"meta"}
        assert {name for name, tensor in loaded.items() if tensor.dtype == torch.float32} == {norm}
        assert decoder.compute_dtype == torch.bfloat16
        chosen = load(folder, device="meta", dtype="float16")
        assert {tensor.dtype for tensor in by_name(chosen).values()} == {torch.float16}
        assert chosen.compute_dtype == torch.float16

    def test_an_unknown_dtype_is_refused(self, write_checkpoint: WriteCheckpoint, tmp_path: Path) -> None:
        folder = write_checkpoint(tmp_path)
        for read in (lambda: load(folder, dtype="int4"), lambda: weight_bytes(folder, "int4")):
            with pytest.raises(OptionError, match="int4"):
                read()


def test_progress_counts_the_bytes_of_the_files(write_checkpoint: WriteCheckpoint, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, shards=2)
    seen: list[tuple[int, int]] = []
    load(folder, on_progress=lambda done, total: seen.append((done, total)))
    assert {total for _, total in seen} == {weight_bytes(folder)}
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1][0] == weight_bytes(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights_have_the_right_shapes_and_follow_the_seed(
    write_checkpoint: WriteCheckpoint, tmp_path: Path, family: str
) -> None:
    config = read_config(write_checkpoint(tmp_path, model_type=family))
    decoder = random_decoder(config, dtype="bfloat16", seed=3)
    tensors = by_name(decoder)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == parameter_shapes(config)
    assert decoder.nbytes == weight_bytes(config, "bfloat16")
    again, other = random_decoder(config, dtype="bfloat16", seed=3), random_decoder(config, dtype="bfloat16", seed=4)
    assert all(torch.equal(tensor, by_name(again)[name]) for name, tensor in tensors.items())
    assert not torch.equal(decoder.layers[2].down_proj, by_name(other)["model.layers.2.mlp.down_proj.weight"])
    rows = decoder.layers[0].gate_proj
    assert len({tuple(row.tolist()) for row in rows}) == rows.shape[0]
    assert 0.7 < float(rows.float().std()) * config.hidden_size**0.5 < 1.3
