"""A few tokens meet an int8 matrix as it is stored: the kernels equal float64, in Triton's interpreter on a CPU."""

from __future__ import annotations

import pytest
import torch
from cake_infer.errors import BackendError
from cake_infer.models.config import read_config
from cake_infer.models.packed import as_quantised
from cake_infer.models.quantisation import Int8Matrix, quantise
from cake_infer.models.weights import load_decoder

pytest.importorskip("triton", reason="triton is not installed")
from cake_infer.models.int8_products import int8_linear

STEP = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def packed(outputs: int, columns: int) -> Int8Matrix:
    matrix = quantise(torch.randn(outputs, columns, generator=torch.Generator().manual_seed(outputs)), "int8")
    assert isinstance(matrix, Int8Matrix)
    return matrix


@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 16, 17, 40])
@pytest.mark.parametrize("dtype", STEP)
def test_products_equal_float64(tokens, dtype):
    matrix = packed(37, 700)
    generator = torch.Generator().manual_seed(tokens)
    x, bias = torch.randn(tokens, 700, generator=generator).to(dtype), torch.randn(37, generator=generator).to(dtype)
    exact = x.double() @ (matrix.data.double() * matrix.factors.double()[:, None]).T
    scale = float(exact.abs().max())
    for given in (None, bias):
        expected = exact if given is None else exact + given.double()
        out = int8_linear(x, matrix, given)
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), expected, rtol=STEP[dtype], atol=STEP[dtype] * scale / 8)


@pytest.mark.parametrize("shape", [(1, 1), (8, 512), (9, 513), (64, 16), (33, 1025)])
@pytest.mark.parametrize("tokens", [1, 5])
def test_odd_shapes(shape, tokens):
    matrix = packed(*shape)
    x = torch.randn(tokens, 2 * shape[1], generator=torch.Generator().manual_seed(1))[:, ::2]  # strided
    expected = x.double() @ (matrix.data.double() * matrix.factors.double()[:, None]).T
    torch.testing.assert_close(int8_linear(x, matrix).double(), expected, rtol=1e-5, atol=1e-4)


def test_the_result_may_be_wider_than_the_input():
    matrix, x = packed(20, 64), torch.randn(1, 64).bfloat16()
    out = int8_linear(x, matrix, dtype=torch.float32)
    exact = x.double() @ (matrix.data.double() * matrix.factors.double()[:, None]).T
    torch.testing.assert_close(out.double(), exact, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("biases", [False, True])
def test_a_decode_step_over_stored_matrices_equals_one_over_widened_ones(tmp_path, write_checkpoint, biases):
    from cake_infer.cache.config import CacheConfig
    from cake_infer.engine import decode
    from cake_infer.engine.runner import Runner
    from cake_infer.engine.sequence import Sequence

    folder = write_checkpoint(tmp_path / "model", attention_bias=biases, mlp_bias=biases)
    decoder = as_quantised(load_decoder(folder, read_config(folder)), "int8")
    runner = Runner(decoder, CacheConfig(budget=16, window=4), context=200, chunk=64)
    sequence = Sequence()
    runner.feed(sequence, list(range(5, 35)), runner.prepare(sequence, 30, 10))
    widened = 0

    def count(index):
        nonlocal widened
        widened += 1
        return type(decoder).widened(decoder, index)

    with torch.inference_mode():
        saved = runner.checkpoint(sequence)
        expected = decode.step(decoder, runner.tenancy.arena, sequence, 7, window=4)
        runner.restore(sequence, saved)
        runner.tenancy.activate(sequence)
        decoder.int8_products, decoder.widened = True, count
        found = decode.step(decoder, runner.tenancy.arena, sequence, 7, window=4)
    assert widened == 0
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_quantised_weights_on_a_gpu_are_int8_and_need_triton(monkeypatch):
    import importlib.util

    from cake_infer.engine.loading import check_quant

    cuda = torch.device("cuda")
    check_quant("int8", cuda)
    check_quant("int4", torch.device("cpu"))
    with pytest.raises(BackendError, match="int4 weights run on a CPU only"):
        check_quant("int4", cuda)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BackendError, match="need the package triton"):
        check_quant("int8", cuda)


def test_quantised_weights_are_computed_in_a_narrow_dtype_elsewhere(tmp_path, write_checkpoint):
    # The meta device stands for a GPU: it has dtypes, and no numbers.
    folder = write_checkpoint(tmp_path / "model")
    for stored, expected in (("float32", torch.bfloat16), ("float16", torch.float16), ("bfloat16", torch.bfloat16)):
        source = load_decoder(folder, read_config(folder), dtype=stored)
        from cake_infer.models import packed as packing

        decoder = packing._assembled(source.config, "int8", packing._quantised(source, "int8"), torch.device("meta"))
        assert (decoder.dtype, decoder.compute_dtype, decoder.product_dtype) == (torch.int8, expected, expected)
