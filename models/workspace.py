"""The arrays of one chunk of tokens, in one buffer that every chunk and layer uses again."""

from __future__ import annotations

import torch
from torch import Tensor

from .config import ModelConfig


class Workspace:
    """Room for `rows` tokens on their way through a layer: a normed input, and two arrays as wide as queries or MLP.

    Arrays of some MB that come and go with every chunk leave holes in malloc's heap, which count as the process's
    memory (13 MB of 66 at 2,048 tokens of SmolLM2-135M), and give pages back only to fault them in again. The views
    share their bytes: a new one may be asked for only when what was in its place is used up.
    """

    def __init__(self, config: ModelConfig, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self.rows, self._hidden = rows, config.hidden_size
        self._wide = widest(config)
        self._buffer = torch.empty(workspace_elements(config, rows), dtype=dtype, device=device)

    def normed(self, count: int) -> Tensor:
        """`[count, hidden_size]`: the input of a projection, and afterwards the output of the last one."""
        return self._buffer[: count * self._hidden].view(count, self._hidden)

    def left(self, count: int, width: int) -> Tensor:
        """`[count, width]`, beside `right`."""
        return self._view(self.rows * self._hidden, count, width)

    def right(self, count: int, width: int) -> Tensor:
        """`[count, width]`, beside `left`."""
        return self._view(self.rows * (self._hidden + self._wide), count, width)

    def _view(self, start: int, count: int, width: int) -> Tensor:
        assert count <= self.rows, "a workspace was made for fewer tokens"
        assert width <= self._wide, "a workspace was made for a narrower model"
        return self._buffer[start : start + count * width].view(count, width)


def widest(config: ModelConfig) -> int:
    """Numbers that a token's queries or its MLP need, whichever is more."""
    return max(config.num_heads * config.head_dim, config.intermediate_size)


def workspace_elements(config: ModelConfig, rows: int) -> int:
    """Numbers in a workspace for `rows` tokens."""
    return rows * (config.hidden_size + 2 * widest(config))
