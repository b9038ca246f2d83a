"""The decoder's pieces: what they compute, in which dtype, in which memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from cake_infer.models import decoder as decoder_module
from cake_infer.models.config import read_config
from cake_infer.models.decoder import Decoder, Layer
from cake_infer.models.rope import Rotary
from cake_infer.models.weights import load_decoder, random_decoder
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

WriteCheckpoint = Callable[..., Path]


def load(folder: Path, **options: Any) -> Decoder:
    return load_decoder(folder, read_config(folder), **options)


def with_compute_dtype(decoder: Decoder, dtype: torch.dtype) -> Decoder:
    """The same weights as a device with native low precision would use them."""
    return Decoder(decoder.config, decoder.layers, decoder.embed_tokens, decoder.norm, decoder.lm_head, dtype)


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors that operations made and something still holds; `peak` is the largest sum seen."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[torch.Tensor]] = []
        self.peak = 0
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {tensor.untyped_storage().data_ptr() for tensor in flat_tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in flat_tensors(result):
            if tensor.untyped_storage().data_ptr() not in known:
                self.made.append(weakref.ref(tensor))
                self.largest = max(self.largest, tensor.nbytes)
        alive = [tensor for ref in self.made if (tensor := ref()) is not None]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in alive}
        self.peak = max(self.peak, sum(storages.values()))
        return result


def flat_tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from flat_tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from flat_tensors(item)


class TestWidening:
    def test_a_layer_already_in_the_compute_dtype_is_itself(
        self, write_checkpoint: WriteCheckpoint, tmp_path: Path
    ) -> None:
        decoder = load(write_checkpoint(tmp_path))
        assert all(decoder.widened(index) is layer for index, layer in enumerate(decoder.layers))

    @pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma"])
    def test_another_layer_is_the_same_values_in_one_buffer(
        self, write_checkpoint: WriteCheckpoint, tmp_path: Path, family: str
    ) -> None:
        decoder = load(write_checkpoint(tmp_path, model_type=family, dtype=torch.bfloat16))
        numel = sum(tensor.numel() for _, tensor in decoder.layers[0].named_tensors())
        storages = set()
        for index in (0, 1, 2, 1):
            wide, stored = decoder.widened(index), dict(decoder.layers[index].named_tensors())
            assert dict(wide.named_tensors()).keys() == stored.keys()
            ends = []
            for name, tensor in wide.named_tensors():
                assert tensor.dtype == torch.float32
                assert torch.equal(tensor, stored[name].float()), name
                storages.add(tensor.untyped_storage().data_ptr())
                ends.append((tensor.storage_offset(), tensor.storage_offset() + tensor.numel()))
            assert sorted(ends)[0][0] == 0
            assert all(end <= start for (_, end), (start, _) in zip(sorted(ends), sorted(ends)[1:], strict=False))
            assert wide.q_proj.untyped_storage().nbytes() == 4 * numel
        assert len(storages) == 1

    def test_only_what_differs_is_copied(self, write_checkpoint: WriteCheckpoint, tmp_path: Path) -> None:
        folder = write_checkpoint(tmp_path, dtype=torch.bfloat16)
        tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
        norm = "model.layers.1.input_layernorm.weight"
        tensors[norm] = tensors[norm].float() + 1e-4  # not a bf16 number
        save_file(tensors, folder / "model.safetensors")
        decoder = load(folder)
        assert decoder.widened(1).input_layernorm is decoder.layers[1].input_layernorm
        assert torch.equal(decoder.widened(1).input_layernorm, tensors[norm])
        assert decoder.widened(0).input_layernorm.dtype == torch.float32

    def test_a_buffer_made_in_inference_mode_serves_outside_it(
        self, write_checkpoint: WriteCheckpoint, tmp_path: Path
    ) -> None:
        decoder = load(write_checkpoint(tmp_path, dtype=torch.float16))
        with torch.inference_mode():
            first = decoder.mlp(decoder.widened(0), torch.ones(1, 32))
        decoder.widened(1)
        assert torch.equal(decoder.mlp(decoder.widened(0), torch.ones(1, 32)), first)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_checkpoints_compute_exactly_as_their_fp32_copy(
    write_checkpoint: WriteCheckpoint, tmp_path: Path, dtype: torch.dtype
) -> None:
    folder = write_checkpoint(tmp_path, dtype=dtype)
    stored, copied = load(folder), load(folder, dtype="float32")
    assert (stored.dtype, copied.dtype) == (dtype, torch.float32)
    ids = torch.tensor([3, 319, 0, 3])
    cos, sin = Rotary(stored.config.rope, 4).cos_sin(torch.arange(4))
    results = []
    for decoder in (stored, copied):
        assert decoder.compute_dtype == torch.float32
        hidden = decoder.embed(ids)
        layer = decoder.widened(2)
        x = decoder.attention_norm(layer, hidden)
        queries = decoder.queries(layer, x, cos, sin)
        keys, values = torch.empty(2, 4, 8), torch.empty(2, 4, 8)
        decoder.keys_values(layer, x, cos, sin, keys, values)
        hidden = hidden + decoder.attention_output(layer, queries)
        hidden = hidden + decoder.mlp(layer, decoder.mlp_norm(layer, hidden))
        results.append((queries, keys, values, hidden, decoder.logits(hidden)))
    for ours, expected in zip(*results, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)


def test_queries_and_keys_are_rotated_per_head_after_their_norm(
    write_checkpoint: WriteCheckpoint, tmp_path: Path
) -> None:
    decoder = load(write_checkpoint(tmp_path, model_type="qwen3", attention_bias=True, head_dim=16))
    layer, eps = decoder.layers[1], decoder.config.rms_norm_eps
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    cos, sin = Rotary(decoder.config.rope, 99).cos_sin(torch.tensor([9, 3, 4, 90, 5]))
    store = torch.full((2, 9, 3, 16), float("nan"))
    keys, values = store[:, 2:7, 0], store[:, 2:7, 2]
    decoder.keys_values(layer, x, cos, sin, keys, values)
    queries = decoder.queries(layer, x, cos, sin)
    assert queries.shape == (4, 5, 16)
    assert queries.is_contiguous()
    assert store[:, :2].isnan().all()
    assert store[:, 7:].isnan().all()
    assert store[:, :, 1].isnan().all()
    for weight, bias, norm, heads, got in (
        (layer.q_proj, layer.q_bias, layer.q_norm, 4, queries),
        (layer.k_proj, layer.k_bias, layer.k_norm, 2, keys),
    ):
        assert bias is not None
        assert norm is not None
        projected = (x.double() @ weight.double().T + bias.double()).view(5, heads, 16)
        normed = projected / (projected.square().mean(-1, keepdim=True) + eps).sqrt() * norm.double()
        first, second = normed[..., :8], normed[..., 8:]
        c, s = cos.double()[:, None], sin.double()[:, None]
        expected = torch.cat((first * c - second * s, second * c + first * s), dim=-1).transpose(0, 1)
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)
    expected_values = (x @ layer.v_proj.T + layer.v_bias).view(5, 2, 16).transpose(0, 1)
    torch.testing.assert_close(values, expected_values)


def test_attention_output_reads_heads_side_by_side(write_checkpoint: WriteCheckpoint, tmp_path: Path) -> None:
    decoder = load(write_checkpoint(tmp_path, attention_bias=True))
    layer = decoder.layers[0]
    attention = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(2))
    side_by_side = torch.cat(list(attention), dim=-1)  # [6, 32]
    expected = side_by_side @ layer.o_proj.T + layer.o_bias
    torch.testing.assert_close(decoder.attention_output(layer, attention), expected)
    strided = attention.transpose(0, 1).contiguous().transpose(0, 1)
    torch.testing.assert_close(decoder.attention_output(layer, strided), expected)


def test_scale_is_that_of_the_head_not_of_hidden_over_heads(write_checkpoint: WriteCheckpoint, tmp_path: Path) -> None:
    assert load(write_checkpoint(tmp_path, head_dim=16)).scale == 0.25


class TestNorms:
    def test_norms_are_fp32_inside_and_rounded_once(self, write_checkpoint: WriteCheckpoint, tmp_path: Path) -> None:
        decoder = with_compute_dtype(load(write_checkpoint(tmp_path, dtype=torch.float16)), torch.float16)
        hidden = torch.full((2, 32), 300.0, dtype=torch.float16)  # its square is beyond fp16
        hidden[1] = 1e-4  # its square is below fp16
        normed = decoder.attention_norm(decoder.layers[0], hidden)
        wide = hidden.double()
        expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * decoder.layers[0].input_layernorm
        assert normed.dtype == torch.float16
        torch.testing.assert_close(normed.double(), expected, rtol=1e-3, atol=1e-6)

    def test_gemma_adds_one_to_the_weight_in_fp32(self, write_checkpoint: WriteCheckpoint, tmp_path: Path) -> None:
        stored = load(write_checkpoint(tmp_path, model_type="gemma", dtype=torch.bfloat16))
        decoder = with_compute_dtype(stored, torch.bfloat16)
        layer = decoder.layers[0]
        layer.input_layernorm = torch.full((32,), 2.0**-9, dtype=torch.bfloat16)  # 1 + w is not a bf16 number
        hidden = torch.full((1, 32), 1.5, dtype=torch.bfloat16)
        expected = (torch.tensor(1.5 / (1.5**2 + 1e-5) ** 0.5) * (1 + 2.0**-9)).to(torch.bfloat16)
        assert torch.equal(decoder.attention_norm(layer, hidden), expected.expand(1, 32))

    def test_both_norms_of_a_layer_are_their_own(self, write_checkpoint: WriteCheckpoint, tmp_path: Path) -> None:
        decoder = load(write_checkpoint(tmp_path))
        layer, hidden = decoder.layers[0], torch.ones(1, 32)
        torch.testing.assert_close(decoder.attention_norm(layer, hidden)[0], layer.input_layernorm, rtol=1e-4, atol=0)
        torch.testing.assert_close(
            decoder.mlp_norm(layer, hidden)[0], layer.post_attention_layernorm, rtol=1e-4, atol=0
        )


@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.float32, 48**0.5), (torch.bfloat16, 6.9375), (torch.float16, 6.9296875)]
)
def test_gemmas_embedding_scale_is_rounded_to_the_compute_dtype(
    write_checkpoint: WriteCheckpoint, tmp_path: Path, dtype: torch.dtype, scale: float
) -> None:
    from transformers.models.gemma.modeling_gemma import GemmaTextScaledWordEmbedding

    stored = load(write_checkpoint(tmp_path, model_type="gemma", hidden_size=48, dtype=dtype))
    decoder = with_compute_dtype(stored, dtype)
    ids = torch.tensor([0, 5, 319, 5])
    embedded = decoder.embed(ids)
    assert embedded.dtype == dtype
    assert torch.equal(embedded, stored.embed_tokens[ids] * torch.tensor(scale, dtype=dtype))
    theirs = GemmaTextScaledWordEmbedding(320, 48, 0, embed_scale=48**0.5).to(dtype)
    theirs.weight.data = stored.embed_tokens
    assert torch.equal(embedded, theirs(ids))


class TestMlp:
    @pytest.mark.parametrize(
        ("act", "function"),
        [
            ("silu", lambda x: x * torch.sigmoid(x)),
            ("gelu", lambda x: x * 0.5 * (1 + torch.erf(x / 2**0.5))),
            (
                "gelu_pytorch_tanh",
                lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
            ),
        ],
    )
    def test_it_is_gated_and_has_its_biases(
        self,
        write_checkpoint: WriteCheckpoint,
        tmp_path: Path,
        act: str,
        function: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        decoder = load(write_checkpoint(tmp_path, hidden_act=act, mlp_bias=True))
        layer = decoder.layers[1]
        assert layer.gate_bias is not None
        assert layer.up_bias is not None
        assert layer.down_bias is not None
        x = torch.randn(7, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) * 3
        gate = function(x @ layer.gate_proj.double().T + layer.gate_bias)
        up = x @ layer.up_proj.double().T + layer.up_bias
        expected = (gate * up) @ layer.down_proj.double().T + layer.down_bias
        kept = x.float()
        torch.testing.assert_close(decoder.mlp(layer, kept).double(), expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(kept, x.float())  # its input is the caller's

    @pytest.mark.parametrize("act", ["silu", "gelu", "gelu_pytorch_tanh"])
    def test_it_holds_two_wide_arrays_at_most(
        self, write_checkpoint: WriteCheckpoint, tmp_path: Path, act: str
    ) -> None:
        decoder = load(write_checkpoint(tmp_path, hidden_act=act, intermediate_size=512))
        x = torch.randn(16, 32)
        with LiveBytes() as live:
            decoder.mlp(decoder.layers[0], x)
        wide = 4 * 16 * 512
        assert 2 * wide <= live.peak <= 2 * wide + 4 * 16 * 32


class TestLogits:
    def test_logits_are_the_normed_hidden_states_times_the_head(
        self, write_checkpoint: WriteCheckpoint, tmp_path: Path
    ) -> None:
        for tied in (False, True):
            decoder = load(write_checkpoint(tmp_path / str(tied), tie_word_embeddings=tied))
            hidden = torch.randn(3, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
            head = (decoder.embed_tokens if tied else decoder.lm_head).double()
            normed = hidden / (hidden.square().mean(-1, keepdim=True) + 1e-5).sqrt() * decoder.norm
            torch.testing.assert_close(decoder.logits(hidden.float()).double(), normed @ head.T, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("tile", [1, 1000, 320 * 32])
    def test_a_narrow_head_is_widened_by_tiles_of_rows(
        self,
        write_checkpoint: WriteCheckpoint,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        dtype: torch.dtype,
        tile: int,
    ) -> None:
        folder = write_checkpoint(tmp_path, dtype=dtype, tie_word_embeddings=True)
        decoder, whole = load(folder), load(folder, dtype="float32")
        monkeypatch.setattr(decoder_module, "_HEAD_TILE", tile)
        hidden = torch.randn(3, 32, generator=torch.Generator().manual_seed(5))
        with LiveBytes() as live:
            logits = decoder.logits(hidden)
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits, whole.logits(hidden), rtol=1e-5, atol=1e-5)
        assert live.largest <= max(4 * tile, 4 * 32, logits.nbytes)

    def test_logits_of_a_low_precision_device_are_fp32(self, write_checkpoint: WriteCheckpoint, tmp_path: Path) -> None:
        decoder = with_compute_dtype(load(write_checkpoint(tmp_path, dtype=torch.bfloat16)), torch.bfloat16)
        hidden = decoder.embed(torch.tensor([1, 2]))
        assert hidden.dtype == torch.bfloat16
        assert decoder.logits(hidden).dtype == torch.float32


def test_a_low_precision_device_computes_a_layer_in_its_dtype(
    write_checkpoint: WriteCheckpoint, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path, model_type="qwen3", dtype=torch.bfloat16)
    exact, decoder = load(folder), with_compute_dtype(load(folder), torch.bfloat16)
    assert decoder.widened(0) is decoder.layers[0]
    hidden = decoder.embed(torch.arange(8))
    cos, sin = Rotary(decoder.config.rope, 8).cos_sin(torch.arange(8))
    keys, values = torch.empty(2, 2, 8, 8, dtype=torch.bfloat16)
    x = decoder.attention_norm(decoder.layers[0], hidden)
    decoder.keys_values(decoder.layers[0], x, cos, sin, keys, values)
    queries = decoder.queries(decoder.layers[0], x, cos, sin)
    assert queries.dtype == decoder.mlp(decoder.layers[0], x).dtype == torch.bfloat16
    layer = exact.widened(0)
    expected = exact.queries(layer, exact.attention_norm(layer, hidden.float()), cos, sin)
    torch.testing.assert_close(queries.float(), expected, rtol=0.05, atol=0.05)


def test_layers_name_what_they_hold() -> None:
    tensors = {name: torch.zeros(1) for name in Layer.__dataclass_fields__ if not name.endswith(("bias", "q_norm"))}
    assert dict(Layer(**tensors).named_tensors()) == tensors


def test_nothing_needs_gradients_or_inference_mode(write_checkpoint: WriteCheckpoint, tmp_path: Path) -> None:
    decoder = random_decoder(read_config(write_checkpoint(tmp_path)), seed=1)
    hidden = decoder.embed(torch.tensor([1]))
    outside = decoder.logits(hidden + decoder.mlp(decoder.widened(0), hidden))
    with torch.inference_mode():
        hidden = decoder.embed(torch.tensor([1]))
        inside = decoder.logits(hidden + decoder.mlp(decoder.widened(0), hidden))
    assert torch.equal(inside, outside)
    assert not outside.requires_grad
