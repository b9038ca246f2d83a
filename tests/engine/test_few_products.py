"""Products of a few tokens with norm, gate and residual in one pass, against float64, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
from cake_infer.engine.few_products import MOST, logits, product, takes
from cake_infer.models.config import ModelConfig
from cake_infer.models.weights import random_decoder

EPS = 1e-5


def wanted(x, weight, bias=None, *, norm=None, offset=0.0, gated=False, add_to=None):
    x, weight = x.double(), weight.double()
    if norm is not None:
        x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * (norm.double() + offset)
    out = x @ weight.T if bias is None else x @ weight.T + bias.double()
    if gated:
        gate, up = out.chunk(2, 1)
        out = gate / (1 + torch.exp(-gate)) * up
    return out if add_to is None else add_to.double() + out


def small_decoder():
    keys = {
        "model_type": "llama",
        "vocab_size": 8,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 16,
        "rms_norm_eps": EPS,
        "rope_theta": 1e4,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return random_decoder(ModelConfig.from_dict(keys, where="test"), dtype="float32")


@pytest.mark.parametrize(("tokens", "columns", "outputs"), [(1, 700, 37), (2, 130, 64), (5, 64, 33), (16, 257, 8)])
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_is_that_of_the_formula(tokens, columns, outputs, biased):
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    x, weight, up = normal(tokens, columns) * 3 + 1, normal(outputs, columns), normal(2 * outputs, columns)
    norm, bias, more = normal(columns), normal(outputs), normal(2 * outputs)
    bias, more = (bias, more) if biased else (None, None)
    residual = normal(tokens, outputs)
    kept = residual.clone()

    def close(found, expected):
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))

    close(product(x, weight, bias), wanted(x, weight, bias))
    close(
        product(x, weight, bias, norm=(norm, EPS, 1.0)),
        wanted(x, weight, bias, norm=norm, offset=1.0),
    )
    close(
        product(x, up / columns**0.5, more, norm=(norm, EPS, 0.0), gated=True),
        wanted(x, up / columns**0.5, more, norm=norm, gated=True),
    )
    assert product(x, weight, bias, add_to=residual) is residual
    close(residual, wanted(x, weight, bias, add_to=kept))


def test_a_token_with_others_gets_what_it_gets_among_other_others():
    """Up to MOST tokens are one tile, whoever they are."""
    x, weight, norm = torch.randn(7, 100), torch.randn(40, 100), torch.randn(100)
    among = product(x, weight, norm=(norm, EPS, 0.0))
    assert torch.equal(product(x[2:5].clone(), weight, norm=(norm, EPS, 0.0)), among[2:5])


def test_a_product_that_is_rounded_is_rounded_once():
    x, weight = torch.randn(3, 90).half(), torch.randn(20, 90).half()
    exact = wanted(x, weight)
    assert (product(x, weight).double() - exact).abs().max() <= exact.abs().max() * 2**-11 + 1e-4


def test_logits_are_the_decoders():
    decoder = small_decoder()
    hidden = torch.randn(3, 8)
    torch.testing.assert_close(logits(decoder, hidden), decoder.logits(hidden), rtol=1e-5, atol=1e-5)


def test_more_tokens_and_other_dtypes_are_left_to_the_library(monkeypatch):
    import triton

    decoder = small_decoder()
    assert takes(decoder, MOST)
    assert not takes(decoder, MOST + 1)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    assert not takes(decoder, 1), "in fp32 a batch and a sequence alone share the library's sums"
