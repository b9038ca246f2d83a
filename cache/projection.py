"""How large a value is once the output projection has brought it into the hidden state."""

from __future__ import annotations

import torch
from torch import Tensor

from .view import LayerView

TILE_FLOATS = 1 << 20  # of one tile of projected values


def projections(view: LayerView, head: int) -> Tensor:
    """The output projection's columns of a KV head's query heads, fp32 `[group, head_dim, hidden]`."""
    assert view.output_projection is not None
    head_dim = view.keys.shape[2]
    columns = slice(head * view.group * head_dim, (head + 1) * view.group * head_dim)
    matrix = view.output_projection[:, columns].float()  # [hidden, group * head_dim]
    return matrix.t().reshape(view.group, head_dim, -1)


def value_sizes(view: LayerView, norm: str) -> Tensor:
    """`projected_norms` (norm l1) or `projected_lengths` (l2) of all heads: fp32 `[kv_heads, n]`, 0 for columns that a
    head has not. Lengths by the compiled pass where the view has one that fits."""
    if norm == "l2" and view.window_pass is not None and view.window_pass.fits(view):
        found = view.window_pass.lengths(view)
        if found is not None:
            return found
    sizes = torch.zeros(view.keys.shape[:2], device=view.keys.device)
    measure = projected_lengths if norm == "l2" else projected_norms
    for head, length in enumerate(view.columns):
        sizes[head, :length] = measure(view, head)
    return sizes


def projected_norms(view: LayerView, head: int) -> Tensor:
    """The L1 norm of `W_o v`, mean over the query heads of a KV head: fp32 `[length]`, in tiles of tokens."""
    assert view.values is not None
    length = view.columns[head]
    matrices = projections(view, head)
    norms = torch.zeros(length, device=view.values.device)
    step = max(1, TILE_FLOATS // matrices.shape[2])
    for start in range(0, length, step):
        values = view.values[head, start : min(start + step, length)].float()
        for matrix in matrices:
            norms[start : start + len(values)] += (values @ matrix).abs().sum(1)
    return norms.div_(view.group)


def projected_lengths(view: LayerView, head: int) -> Tensor:
    """The L2 norm of `W_o v`, mean over the query heads of a KV head: fp32 `[length]`.

    `|W v|^2 = v (W^T W) v`, so that no value is projected: a product with `D x D` for each query head.
    """
    assert view.values is not None
    values = view.values[head, : view.columns[head]].float()
    norms = torch.zeros(len(values), device=values.device)
    for matrix in projections(view, head):
        norms += (values @ (matrix @ matrix.t())).mul_(values).sum(1).clamp_min_(0).sqrt_()
    return norms.div_(view.group)
