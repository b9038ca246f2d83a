"""A decoder's weights as compiled kernels take them: tables of addresses, norms and biases in fp32."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..errors import BackendError
from ..models.decoder import Decoder, Layer
from ..models.quantisation import Matrix

ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FORMATS = {"float32": "float32", "uint16": "bfloat16", "int8": "int8", "uint8": "int4"}  # as people call them
LIKE = {torch.float32: np.float32, torch.bfloat16: np.uint16, torch.int8: np.int8, torch.uint8: np.uint8}


class WeightTables:
    """Where a decoder's matrices lie, and small tensors; empty tables where the model has none. See kernels/step.py.

    Raises BackendError where there are no kernels for how the weights are stored. Valid while the decoder is.
    """

    def __init__(self, decoder: Decoder) -> None:
        config, layers = decoder.config, decoder.layers
        matrices = [getattr(layer, name) for layer in layers for name in MATRICES]
        stored = {matrix.dtype for matrix in (*matrices, decoder.embed_tokens, decoder.lm_head)}
        if len(stored) > 1 or not stored <= set(LIKE):
            names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in stored))
            raise BackendError(f"the compiled step has no form for weights stored as {names}")
        self.like = np.zeros(0, dtype=LIKE[stored.pop()])
        self.matrices = np.array([_address(matrix) for matrix in matrices], dtype=np.int64).reshape(-1, 7, 2)
        self.ends = np.array([_address(decoder.embed_tokens), _address(decoder.lm_head)], dtype=np.int64)
        self.shape = np.array(
            [
                config.hidden_size,
                config.intermediate_size,
                config.num_heads,
                config.num_kv_heads,
                config.head_dim,
                config.vocab_size,
                config.num_layers,
                ACTIVATIONS[config.hidden_act],
                0,
            ],
            dtype=np.int64,
        )
        self.constants = np.array([config.rms_norm_eps, decoder.scale, config.embedding_scale], dtype=np.float32)
        final = torch.stack([decoder.norm, decoder.norm]).float()
        pairs = [torch.stack([layer.input_layernorm, layer.post_attention_layernorm]).float() for layer in layers]
        self.norms = (torch.stack([*pairs, final]) + config.norm_offset).numpy()
        self.head_norms = np.zeros((len(layers), 2, 0), dtype=np.float32)
        if layers[0].q_norm is not None:
            heads = [torch.stack([_some(layer.q_norm), _some(layer.k_norm)]).float() for layer in layers]
            self.head_norms = (torch.stack(heads) + config.norm_offset).numpy()

        def table(*names: str) -> np.ndarray:
            if all(getattr(layer, name) is None for layer in layers for name in names):
                return np.zeros((len(layers), 0), dtype=np.float32)
            return torch.stack([torch.cat([_bias(layer, name) for name in names]) for layer in layers]).numpy()

        self.qkv_bias = table("q_bias", "k_bias", "v_bias")
        self.o_bias = table("o_bias")
        self.mlp_bias = table("gate_bias", "up_bias", "down_bias")

    @property
    def format(self) -> str:
        """Of the weights, as people call it."""
        return FORMATS[self.like.dtype.name]


def in_lines(*shape: int) -> np.ndarray:
    """int8 zeros that begin with a cache line."""
    line, size = 64, int(np.prod(shape))
    memory = np.zeros(size + line, dtype=np.int8)
    start = -memory.ctypes.data % line
    return memory[start : start + size].reshape(shape)


def _address(matrix: Matrix) -> tuple[int, int]:
    """Where a matrix and its scales lie; 0 without scales."""
    if isinstance(matrix, Tensor):
        assert matrix.is_contiguous()
        return matrix.data_ptr(), 0
    assert matrix.data.is_contiguous()
    return matrix.data.data_ptr(), matrix.factors.data_ptr()


def _some(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def _bias(layer: Layer, name: str) -> Tensor:
    """A bias, zeros where only this layer or this projection has none."""
    bias: Tensor | None = getattr(layer, name)
    if bias is not None:
        return bias.float()
    matrix = getattr(layer, name.replace("_bias", "_proj"))
    return torch.zeros(matrix.shape[0])
