"""The network: embedding, the pieces of a layer, and the head, as plain functions over plain tensors.

Attention itself is not here: it reads a cache, and belongs to whoever runs the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .config import ModelConfig
from .products import INT8_TOKENS, linear, product_dtype, shape_of
from .quantisation import Int8Matrix, Matrix, embedded, widen_into
from .rope import rotate_into
from .workspace import Workspace

_EMBED_TILE = 256  # tokens
_HEAD_TILE = 1 << 20  # elements of the head that are widened at once: 4 MiB of fp32


@dataclass(slots=True)
class Layer:
    """The tensors of one layer under their Hugging Face names; None where the model has none. Matrices [out, in].

    A stored layer's matrices may be `Int8Matrix`; those that `Decoder.widened` gives are tensors.
    """

    input_layernorm: Tensor
    q_proj: Tensor
    k_proj: Tensor
    v_proj: Tensor
    o_proj: Tensor
    post_attention_layernorm: Tensor
    gate_proj: Tensor
    up_proj: Tensor
    down_proj: Tensor
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    o_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    def named_tensors(self) -> Iterator[tuple[str, Matrix]]:
        """Field name and tensor of everything that is there."""
        for field in fields(self):
            tensor = getattr(self, field.name)
            if tensor is not None:
                yield field.name, tensor


class Decoder:
    """A model's weights and the arithmetic on them. Hidden states are [tokens, hidden_size] in `compute_dtype`.

    Weights stay in the dtype they are stored in, mixed ones as they are. A layer is used through `widened`, or through
    `for_products` where many tokens meet it at once: the stored layer where its dtype is the one that is wanted, and a
    copy in one reused buffer otherwise. `product_dtype` can be set. A tied head is
    given as `lm_head=embed_tokens`, and `norm` is the final norm. Norms are computed in fp32 and rounded once.
    Nothing here mutates a weight, and every method works inside and outside `torch.inference_mode`. With a workspace
    `work` what a method returns lies in it, until the next method is called; without one it is a tensor of its own.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: Sequence[Layer],
        embed_tokens: Matrix,
        norm: Tensor,
        lm_head: Matrix,
        compute_dtype: torch.dtype,
    ) -> None:
        assert len(layers) == config.num_layers
        self.config = config
        self.layers = tuple(layers)
        self.embed_tokens = embed_tokens  # [vocab_size, hidden_size]
        self.norm = norm  # [hidden_size]
        self.lm_head = lm_head  # [vocab_size, hidden_size]
        self.compute_dtype = compute_dtype
        self.scale = config.head_dim**-0.5
        self.product_dtype = product_dtype(self.dtype, self.device) if self.device.type == "cpu" else compute_dtype
        # whether few tokens meet an int8 matrix as it is, without a widened copy; can be set
        self.int8_products = self.dtype == torch.int8 and self.device.type == "cuda"
        self._buffer: Tensor | None = None  # bytes of one layer's converted matrices
        self._in_buffer: tuple[int, torch.dtype, Layer] | None = None

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype the matrices are stored in (norms may differ)."""
        return self.layers[0].q_proj.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all weights; a tied head counts once, the widening buffer not at all."""
        tensors = [self.embed_tokens, self.norm, *(t for layer in self.layers for _, t in layer.named_tensors())]
        if self.lm_head is not self.embed_tokens:
            tensors.append(self.lm_head)
        return sum(tensor.nbytes for tensor in tensors)

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings [n, hidden_size] of token ids, int64 [n]; the scale is rounded to the compute dtype first, as
        in transformers."""
        hidden = torch.empty(ids.shape[0], self.config.hidden_size, dtype=self.compute_dtype, device=self.device)
        for start in range(0, ids.shape[0], _EMBED_TILE):  # a narrow copy of the whole would leave a hole in the heap
            hidden[start : start + _EMBED_TILE] = embedded(self.embed_tokens, ids[start : start + _EMBED_TILE])
        if self.config.embedding_scale != 1.0:
            # not torch.tensor, a copy from the host, which the capture of a CUDA graph forbids
            hidden.mul_(torch.full((), self.config.embedding_scale, dtype=self.compute_dtype, device=self.device))
        return hidden

    def widened(self, index: int) -> Layer:
        """Layer `index` in the compute dtype: itself, or a copy that is valid until another layer is asked for."""
        return self._converted(index, self.compute_dtype, norms=True)

    def for_step(self, index: int, tokens: int) -> Layer:
        """Layer `index` for so many tokens of a decode step: as it is stored where there are int8 products for it, else
        `widened`."""
        return self.layers[index] if self._few(tokens) else self.widened(index)

    def _few(self, tokens: int) -> bool:
        return self.int8_products and tokens <= INT8_TOKENS

    def for_products(self, index: int) -> Layer:
        """Layer `index` for the products of many tokens: its matrices in `product_dtype`, norms as they are stored.

        Itself, or a copy that is valid until another layer is asked for.
        """
        if self.product_dtype == self.compute_dtype:
            return self.widened(index)
        return self._converted(index, self.product_dtype, norms=False)

    def _converted(self, index: int, dtype: torch.dtype, *, norms: bool) -> Layer:
        stored = self.layers[index]
        needed = self._converted_bytes(stored, dtype, norms=norms)
        if not needed:
            return stored
        if self._in_buffer is not None and self._in_buffer[:2] == (index, dtype):
            return self._in_buffer[2]
        self._in_buffer = None
        if self._buffer is None or self._buffer.numel() < needed:
            self._buffer = None
            size = max(self._converted_bytes(layer, dtype, norms=norms) for layer in self.layers)
            with torch.inference_mode(False):  # an inference tensor could not be written to outside that mode
                self._buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
        room = self._buffer[: self._buffer.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        offset = 0
        wide: dict[str, Any] = {}
        for name, tensor in stored.named_tensors():
            if tensor.dtype != dtype and (norms or not name.endswith("norm")):
                place = room[offset : offset + tensor.numel()].view(tensor.shape)
                offset += tensor.numel()
                tensor = widen_into(place, tensor)
            wide[name] = tensor
        layer = Layer(**wide)
        self._in_buffer = (index, dtype, layer)
        return layer

    @staticmethod
    def _converted_bytes(layer: Layer, dtype: torch.dtype, *, norms: bool) -> int:
        """Bytes of what has to be converted to have a layer in `dtype`."""
        found = (t for name, t in layer.named_tensors() if t.dtype != dtype and (norms or not name.endswith("norm")))
        return sum(tensor.numel() for tensor in found) * dtype.itemsize

    def attention_norm(self, layer: Layer, hidden: Tensor, work: Workspace | None = None) -> Tensor:
        """The input of attention, [n, hidden_size]; in a workspace it stays until `attention_output`."""
        place = work.normed(hidden.shape[0]) if work else None
        return self._rms_norm(hidden, layer.input_layernorm, place, self._dtype_for(layer.q_proj))

    def mlp_norm(self, layer: Layer, hidden: Tensor, work: Workspace | None = None) -> Tensor:
        """The input of the MLP, [n, hidden_size]."""
        place = work.normed(hidden.shape[0]) if work else None
        return self._rms_norm(hidden, layer.post_attention_layernorm, place, self._dtype_for(layer.q_proj))

    def queries(self, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, work: Workspace | None = None) -> Tensor:
        """Rotated queries, contiguous [num_heads, n, head_dim], of normed hidden states `x` [n, hidden_size].

        `cos` and `sin`: fp32 [n, head_dim / 2] from `Rotary.cos_sin`.
        """
        projected = linear(x, layer.q_proj, layer.q_bias, work.left(*shape_of(x, layer.q_proj)) if work else None)
        heads = self._heads(projected, layer.q_norm)
        out = (
            work.right(*projected.shape).view(heads.shape)
            if work
            else torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
        )
        rotate_into(out, heads, cos, sin)
        return out

    def keys_values(
        self,
        layer: Layer,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        out_keys: Tensor,
        out_values: Tensor,
        work: Workspace | None = None,
    ) -> None:
        """Write rotated keys and values of normed hidden states `x` [n, hidden_size] into two views, each
        [num_kv_heads, n, head_dim], strided as they may be."""
        place = work.left(*shape_of(x, layer.k_proj)) if work else None
        keys = linear(x, layer.k_proj, layer.k_bias, place)
        rotate_into(out_keys, self._heads(keys, layer.k_norm), cos, sin)
        out_values.copy_(self._heads(linear(x, layer.v_proj, layer.v_bias, place), None))

    def attention_output(self, layer: Layer, attention: Tensor, work: Workspace | None = None) -> Tensor:
        """Output projection, [n, hidden_size], of the heads' results [num_heads, n, head_dim]."""
        heads, n, head_dim = attention.shape
        if work is None:
            flat = attention.transpose(0, 1).flatten(1).to(self._dtype_for(layer.o_proj))
            return linear(flat, layer.o_proj, layer.o_bias, None)
        flat = work.left(n, heads * head_dim)
        flat.view(n, heads, head_dim).copy_(attention.transpose(0, 1))
        return linear(flat, layer.o_proj, layer.o_bias, work.normed(n))

    def mlp(self, layer: Layer, x: Tensor, work: Workspace | None = None) -> Tensor:
        """The gated MLP, [n, hidden_size]; holds two arrays of [n, intermediate_size], no third."""
        shape = shape_of(x, layer.gate_proj)
        gate = linear(x, layer.gate_proj, layer.gate_bias, work.left(*shape) if work else None)
        self._activate_(gate)
        gate.mul_(linear(x, layer.up_proj, layer.up_bias, work.right(*shape) if work else None))
        return linear(gate, layer.down_proj, layer.down_bias, work.normed(shape[0]) if work else None)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits, fp32 [n, vocab_size], of hidden states [n, hidden_size] after the last layer.

        A head of another dtype than the compute dtype is widened by tiles of rows, never as a whole.
        """
        x = self._rms_norm(hidden, self.norm)
        if isinstance(self.lm_head, Tensor) and self.lm_head.dtype == self.compute_dtype:
            return F.linear(x, self.lm_head).float()
        if isinstance(self.lm_head, Int8Matrix) and self._few(x.shape[0]):
            return linear(x, self.lm_head, None, None, torch.float32)
        vocab_size, hidden_size = self.lm_head.shape
        rows = max(1, min(vocab_size, _HEAD_TILE // hidden_size))
        tile = torch.empty(rows, hidden_size, dtype=self.compute_dtype, device=self.device)
        logits = torch.empty(x.shape[0], vocab_size, dtype=torch.float32, device=self.device)
        for start in range(0, vocab_size, rows):
            part = tile[: min(rows, vocab_size - start)]
            logits[:, start : start + rows] = F.linear(x, widen_into(part, self.lm_head, start))
        return logits

    def _dtype_for(self, matrix: Matrix) -> torch.dtype:
        """What a matrix is multiplied in: its own dtype, but for quantised ones."""
        return matrix.dtype if isinstance(matrix, Tensor) else self.compute_dtype

    def _heads(self, projected: Tensor, norm: Tensor | None) -> Tensor:
        """A view [heads, n, head_dim] of a projection [n, heads * head_dim], normed per head, in place, where a norm is
        given."""
        heads = projected.view(projected.shape[0], -1, self.config.head_dim)
        if norm is not None:
            heads = self._rms_norm(heads, norm, heads)
        return heads.transpose(0, 1)

    def _rms_norm(
        self, x: Tensor, weight: Tensor, out: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """x / rms(x) * (norm_offset + weight) over the last dimension, in fp32, rounded to `dtype` (the compute dtype).

        Written to `out` where given, which may be `x` itself.
        """
        wide = x.float()
        # The 2-norm needs no array of squares.
        square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(wide.shape[-1])
        scale = weight.float()
        if self.config.norm_offset:
            scale = scale + self.config.norm_offset
        place = out if out is not None and out.dtype == torch.float32 else None
        normed = torch.mul(wide, square.add_(self.config.rms_norm_eps).rsqrt_(), out=place).mul_(scale)
        return normed.to(dtype or self.compute_dtype) if out is None or place is not None else out.copy_(normed)

    def _activate_(self, gate: Tensor) -> None:
        if self.config.hidden_act == "silu":
            F.silu(gate, inplace=True)
        else:
            approximate = "tanh" if self.config.hidden_act == "gelu_tanh" else "none"
            torch.ops.aten.gelu_(gate, approximate=approximate)
