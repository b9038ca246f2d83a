"""A decode step's small operations in one launch each equal the decoder's own arithmetic, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from cake_infer.engine.attention import Sdpa
from cake_infer.engine.attention import rows as plain
from cake_infer.engine.device_sampling import DeviceSampler, Kind
from cake_infer.engine.device_step import DeviceState, DeviceStep
from cake_infer.engine.generation import GenerationConfig, resolve_generation
from cake_infer.engine.sequence import QueryRing, Sequence
from cake_infer.models.config import read_config
from cake_infer.models.weights import load_decoder

pytest.importorskip("triton", reason="triton is not installed")
from cake_infer.cache.layout import ArenaLayout, ArenaSize
from cake_infer.cache.shared import SharedArena
from cake_infer.engine import triton_step
from cake_infer.engine.attention.ragged import RaggedTriton
from cake_infer.engine.device_step import host_tables
from cake_infer.engine.fused import add_norm
from cake_infer.engine.picker import Picker
from cake_infer.models.rope import Rotary

MODELS = {
    "llama": {},
    "qwen2, biases": {"model_type": "qwen2"},
    "qwen3, norms of heads": {"model_type": "qwen3"},
    "gemma, offset of norms": {"model_type": "gemma"},
    "heads of 12, mlp biases": {"head_dim": 12, "attention_bias": True, "mlp_bias": True, "intermediate_size": 1100},
    "heads alike": {"num_key_value_heads": 4},
}


class Ragged(Sdpa):
    """The plain form of ragged attention, whose step is not fused."""

    ragged = True
    store_newcomers = staticmethod(plain.store_newcomers)
    attend_rows = staticmethod(plain.attend_rows)
    exchange_least_attended = staticmethod(plain.exchange_least_attended)


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float16])  # the interpreter cuts bf16 off, unrounded
@pytest.mark.parametrize("model", list(MODELS))
def test_a_fused_step_writes_and_gives_what_a_plain_one_does(tmp_path, write_checkpoint, model, kv_dtype):
    """Three sequences at positions of their own, one empty seat: logits, slots, positions and rings."""
    folder = write_checkpoint(tmp_path / "model", **MODELS[model])
    config = read_config(folder)
    layout = ArenaLayout(config.num_layers, config.num_kv_heads, config.head_dim, kv_dtype, torch.float32)
    found = []
    for attention in (Ragged(), RaggedTriton()):
        decoder = load_decoder(folder, config)
        shared = SharedArena(layout, batch=3)
        size = ArenaSize(0, 0, 20 * config.num_layers * config.num_kv_heads)
        shared.reserve([size] * 3)
        torch.manual_seed(0)
        shared.store.keys.normal_(), shared.store.values.normal_()
        step = DeviceStep(decoder, attention, window=4, hold=False)
        assert bool(step._fused) == isinstance(attention, RaggedTriton)
        with torch.inference_mode():
            sampler = DeviceSampler(4, config.vocab_size, None, None, torch.device("cpu"))
            state = DeviceState(decoder, 4, 4, sampler)
            state.logits = torch.zeros(4, config.vocab_size)
            state.ring.normal_()
            for row, length in zip((3, 0, 2), (0, 7, 13), strict=True):
                arena = shared.admit(size)
                arena.length[:], arena.capacity[:] = length, 20
                arena.offset[:] = arena.first + 20 * torch.arange(arena.length.size).view(arena.length.shape).numpy()
                sequence = Sequence(ids=[5] * (40 + length), rotary=Rotary(config.rope, 100))
                sequence.ring = QueryRing(
                    config.num_layers, 4, config.num_heads, config.head_dim, torch.float32, torch.device("cpu")
                )
                plan = resolve_generation(GenerationConfig(), {})
                picker = Picker(
                    plan, 9, stop_ids=frozenset(), prompt_ids=[], vocab_size=320, valid=None, unused=None, device="cpu"
                )
                state.put(row, host_tables(arena, None), sequence, 11 + row, picker)
            step(state, shared.store, 20, Kind.LOGITS)
        store = shared.store
        found.append([state.logits[[0, 2, 3]], store.keys, store.values, store.position, state.ring[:, [0, 2, 3]]])
    for ours, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=3e-5 if kv_dtype == torch.float32 else 3e-3)


def test_joined_matrices_are_there_once(tmp_path, write_checkpoint):
    folder = write_checkpoint(tmp_path / "model")
    decoder = load_decoder(folder, read_config(folder))
    before = [layer.k_proj.clone() for layer in decoder.layers]
    first = DeviceStep(decoder, RaggedTriton(), window=4, hold=False)
    places = [layer.k_proj.data_ptr() for layer in decoder.layers]
    second = DeviceStep(decoder, RaggedTriton(), window=4, hold=False)
    for layer, copy, place, one, other in zip(decoder.layers, before, places, first._fused, second._fused, strict=True):
        assert torch.equal(layer.k_proj, copy)
        assert layer.k_proj.data_ptr() == place == one._qkv[0].data_ptr() + layer.q_proj.nbytes
        assert layer.up_proj.data_ptr() == one._gate_up[0].data_ptr() + layer.gate_proj.nbytes
        assert other._qkv[0].data_ptr() == one._qkv[0].data_ptr(), "joined twice"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [32, 33, 1500])
def test_norms_and_gates_round_where_the_plain_form_does(tmp_path, write_checkpoint, dtype, width):
    folder = write_checkpoint(tmp_path / "model")
    decoder = load_decoder(folder, read_config(folder))
    decoder.compute_dtype = dtype
    generator = torch.Generator().manual_seed(width)
    hidden, delta, weight, up = (torch.randn(3, width, generator=generator).to(dtype) for _ in range(4))
    step = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    raised = hidden + delta
    expected = raised.double() * torch.rsqrt(raised.double().pow(2).mean(-1, keepdim=True) + 1e-5) * weight[0].double()
    got = add_norm(decoder, hidden, delta, weight[0])
    if dtype == torch.bfloat16:  # which the interpreter cuts off where a GPU rounds
        torch.testing.assert_close(hidden, raised, rtol=step, atol=0)
        raised = hidden
    assert torch.equal(hidden, raised)
    torch.testing.assert_close(got.double(), expected, rtol=3 * step, atol=step / 10)
    assert torch.equal(add_norm(decoder, raised, None, weight[0]), got)
    wide = torch.randn(3, 2 * width, generator=generator).to(dtype)[:, :width]  # rows are strides apart
    out = torch.empty(3, width, dtype=dtype)
    triton_step.silu_kernel[(3, -(-width // 256))](wide, up, out, wide.stride(0), up.stride(0), width, BLOCK=256)
    exact = wide.double() * torch.sigmoid(wide.double()) * up.double()
    torch.testing.assert_close(out.double(), exact, rtol=3 * step, atol=step / 10)
