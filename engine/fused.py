"""The small operations of a decode step in one launch each, and projections that share an input in one product.

Fixed configurations and no host reads, fit for a CUDA graph. The slow twin is `Decoder`'s own arithmetic.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.decoder import Decoder, Layer
from ..models.products import linear
from ..models.quantisation import Matrix
from . import few_products
from . import triton_step as kernels
from .attention.ragged import next_power
from .attention.rows import Rows

_COLUMNS = 1024  # of the MLP in a block


class FusedLayer:
    """One layer of a decoder for a few tokens. Its q, k, v and its gate, up matrices become views of joined ones.

    stored: the decoder's own layer, of which `layer` may be a copy with other vectors; its matrices become views too.
    """

    def __init__(self, decoder: Decoder, layer: Layer, stored: Layer) -> None:
        self._decoder, self._layer = decoder, layer
        self._qkv = _joined(layer, stored, ("q", "k", "v"))
        self._gate_up = _joined(layer, stored, ("gate", "up"))
        if decoder.device.type == "cuda":
            torch.cuda.empty_cache()  # the parts are too small to be used for the next layer's whole

    @property
    def few(self) -> bool:
        """Whether the products of few tokens can be worked here with what lies around them, see `few_products`."""
        return self._qkv is not None and self._gate_up is not None and self._decoder.config.hidden_act == "silu"

    def place_few(self, hidden: Tensor, cos: Tensor, sin: Tensor, rows: Rows, ring: Tensor | None) -> Tensor:
        """`place` of hidden states that are still to be normed."""
        assert self._qkv is not None
        norm = self._norm(self._layer.input_layernorm)
        return self._place(few_products.product(hidden, *self._qkv, norm=norm), cos, sin, rows, ring)

    def add_few(self, hidden: Tensor, attended: Tensor) -> None:
        """Raise `hidden` by the output projection of `attended` `[n, heads * head_dim]`, and by the MLP of that."""
        assert self._gate_up is not None
        layer, norm = self._layer, self._norm(self._layer.post_attention_layernorm)
        few_products.product(attended, _plain(layer.o_proj), layer.o_bias, add_to=hidden)
        gated = few_products.product(hidden, *self._gate_up, norm=norm, gated=True)
        few_products.product(gated, _plain(layer.down_proj), layer.down_bias, add_to=hidden)

    def _norm(self, weight: Tensor) -> tuple[Tensor, float, float]:
        config = self._decoder.config
        return weight, config.rms_norm_eps, config.norm_offset

    def add_norm(self, hidden: Tensor, delta: Tensor | None, *, mlp: bool) -> Tensor:
        """Add `delta` to `hidden`, in place, and give the norm that the MLP (or attention) reads: `[n, hidden]`."""
        weight = self._layer.post_attention_layernorm if mlp else self._layer.input_layernorm
        return add_norm(self._decoder, hidden, delta, weight)

    def place(self, normed: Tensor, cos: Tensor, sin: Tensor, rows: Rows, ring: Tensor | None) -> Tensor:
        """Write the newcomers' keys, values and positions behind their rows, and the queries into the ring
        `[n, slots, heads, head_dim]`. Returns the rotated queries `[n, heads, head_dim]`."""
        layer = self._layer
        if self._qkv is not None:
            return self._place(F.linear(normed, *self._qkv), cos, sin, rows, ring)
        q = linear(normed, layer.q_proj, layer.q_bias, None)
        k = linear(normed, layer.k_proj, layer.k_bias, None)
        v = linear(normed, layer.v_proj, layer.v_bias, None)
        return self._place((q, k, v), cos, sin, rows, ring)

    def _place(
        self,
        projected: Tensor | tuple[Tensor, Tensor, Tensor],
        cos: Tensor,
        sin: Tensor,
        rows: Rows,
        ring: Tensor | None,
    ) -> Tensor:
        """`place` of what has been projected: q, k and v, apart or side by side."""
        config, layer = self._decoder.config, self._layer
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        widths = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
        q, k, v = torch.split(projected, widths, 1) if isinstance(projected, Tensor) else projected
        n = q.shape[0]
        queries = torch.empty(n, heads, head_dim, dtype=q.dtype, device=q.device)
        normal = layer.q_norm is not None and layer.k_norm is not None
        kernels.place_kernel[(n, heads + kv_heads)](
            q,
            k,
            v,
            layer.q_norm if normal else cos,
            layer.k_norm if normal else cos,
            cos,
            sin,
            queries,
            queries if ring is None else ring,
            *rows.tables,
            q.stride(0),
            k.stride(0),
            v.stride(0),
            1 if ring is None else ring.shape[1],
            config.rms_norm_eps,
            config.norm_offset,
            HEADS=heads,
            KV_HEADS=kv_heads,
            HALF=head_dim // 2,
            HALF_PAD=next_power(head_dim // 2),
            NORM=normal,
            RING=ring is not None,
            num_warps=1,
        )
        return queries

    def mlp(self, normed: Tensor) -> Tensor:
        """The gated MLP, `[n, hidden]`."""
        layer = self._layer
        if self._decoder.config.hidden_act != "silu":
            return self._decoder.mlp(layer, normed)
        width = layer.gate_proj.shape[0]
        if self._gate_up is not None:
            gate, up = torch.split(F.linear(normed, *self._gate_up), width, 1)
        else:
            gate = linear(normed, layer.gate_proj, layer.gate_bias, None)
            up = linear(normed, layer.up_proj, layer.up_bias, None)
        out = torch.empty(normed.shape[0], width, dtype=gate.dtype, device=gate.device)
        kernels.silu_kernel[(normed.shape[0], -(-width // _COLUMNS))](
            gate, up, out, gate.stride(0), up.stride(0), width, BLOCK=_COLUMNS, num_warps=4
        )
        return linear(out, layer.down_proj, layer.down_bias, None)


def add_norm(decoder: Decoder, hidden: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
    """See `FusedLayer.add_norm`."""
    assert hidden.is_contiguous()
    assert delta is None or delta.is_contiguous()
    out = torch.empty(hidden.shape, dtype=decoder.compute_dtype, device=hidden.device)
    width = hidden.shape[1]
    kernels.add_norm_kernel[(hidden.shape[0],)](
        hidden,
        hidden if delta is None else delta,
        weight,
        out,
        decoder.config.rms_norm_eps,
        decoder.config.norm_offset,
        HIDDEN=width,
        BLOCK=next_power(width),
        ADD=delta is not None,
        num_warps=8,
    )
    return out


def _plain(matrix: Matrix) -> Tensor:
    assert isinstance(matrix, Tensor)
    return matrix


def _joined(layer: Layer, stored: Layer, names: tuple[str, ...]) -> tuple[Tensor, Tensor | None] | None:
    """The matrices of these projections as one, `[sum of out, in]`, and their biases; None for packed ones.

    The layers' own become views of it, so that they are there once.
    """
    matrices = [getattr(layer, f"{name}_proj") for name in names]
    biases = [getattr(layer, f"{name}_bias") for name in names]
    plain = all(isinstance(matrix, Tensor) for matrix in matrices)
    if not plain or any((bias is None) != (biases[0] is None) for bias in biases):
        return None
    widths = [matrix.shape[0] for matrix in matrices]
    with torch.inference_mode(False):
        joined = _whole(matrices)
        parts = torch.split(joined, widths)
        bias = None if biases[0] is None else torch.cat(biases)
    for name, matrix, part in zip(names, matrices, parts, strict=True):
        for one in (layer, stored):
            if getattr(one, f"{name}_proj") is matrix:
                setattr(one, f"{name}_proj", part)
    del matrices, matrix
    return joined, bias


def _whole(matrices: list[Tensor]) -> Tensor:
    """The matrices on top of one another: as they lie where they have been joined before, else a copy."""
    first, end = matrices[0], matrices[0].data_ptr()
    for matrix in matrices:
        if matrix.data_ptr() != end or not matrix.is_contiguous():
            return torch.cat(matrices)
        end += matrix.nbytes
    rows = sum(matrix.shape[0] for matrix in matrices)
    if first.untyped_storage().nbytes() < (first.storage_offset() + rows * first.shape[1]) * first.itemsize:
        return torch.cat(matrices)
    return first.as_strided((rows, first.shape[1]), (first.shape[1], 1))
