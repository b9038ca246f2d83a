"""A trained gate: the scores of a linear map of the hidden states, read from a safetensors file.

The hook for methods that learn which tokens matter (Attention-Gate, arXiv 2410.12876; the token scores of LKV, arXiv
2605.06676; KVzap): none of them publishes weights for the models of this engine, so the file is the user's.
`layers.L.weight` `[kv_heads, hidden]` and, if there is one, `layers.L.bias` `[kv_heads]` give `s = W x + b` of the
normed input of layer L's attention. A row keeps its score for later turns. Gates that act inside the layer's own
attention while it is read change its output; this one chooses afterwards.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from safetensors import SafetensorError, safe_open

from ...errors import OptionError
from ..attention import empty_scores
from ..policies.base import PolicyModel

if TYPE_CHECKING:
    from torch import Tensor

    from ..view import LayerView


@dataclass(frozen=True)
class GateIndicator:
    """`weights` `[kv_heads, hidden]` and `biases` `[kv_heads]` of every layer."""

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor | None, ...]

    needs: ClassVar[frozenset[str]] = frozenset({"hidden_states", "carried"})

    @classmethod
    def create(cls, model: PolicyModel, budget: int, *, file: str) -> GateIndicator:
        """Raises OptionError if the file is broken, or made for another model."""
        weights: list[Tensor] = []
        biases: list[Tensor | None] = []
        try:
            with safe_open(os.path.expanduser(file), framework="pt") as tensors:
                names = set(tensors.keys())
                for layer in range(model.num_layers):
                    name = f"layers.{layer}.weight"
                    if name not in names:
                        raise OptionError(f"{file} has no tensor {name}: it is no gate of {model.num_layers} layers")
                    weights.append(tensors.get_tensor(name).float())
                    if weights[-1].ndim != 2 or weights[-1].shape[1] != model.hidden_size:
                        raise OptionError(
                            f"{name} of {file} is {list(weights[-1].shape)}, not [KV heads, {model.hidden_size}]"
                        )
                    bias = f"layers.{layer}.bias"
                    biases.append(tensors.get_tensor(bias).float() if bias in names else None)
        except (OSError, SafetensorError) as error:
            raise OptionError(f"cannot read the gates of {file}: {error}") from None
        return cls(tuple(weights), tuple(biases))

    def score(self, view: LayerView) -> Tensor:
        """fp32 `[kv_heads, n]`. Raises OptionError if the gates are for another number of KV heads."""
        assert view.hidden_states is not None
        assert view.carried is not None
        weight, bias = self.weights[view.layer], self.biases[view.layer]
        kv_heads = view.keys.shape[0]
        if weight.shape[0] != kv_heads:
            raise OptionError(f"the gates are for {weight.shape[0]} KV heads, but the model has {kv_heads}")
        fresh = view.hidden_states.float() @ weight.to(view.hidden_states.device).t()  # [new, kv_heads]
        if bias is not None:
            fresh += bias.to(fresh.device)
        scores = empty_scores(view)
        for head, length in enumerate(view.columns):
            new = (view.positions[head, :length] - view.first).long()
            gated = fresh[new.clamp_min(0), head]
            scores[head, :length] = torch.where(new >= 0, gated, view.carried[head, :length])
        return scores
