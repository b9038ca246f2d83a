"""What a policy asked to know of a layer, gathered chunk by chunk while the layer is read.

Nothing here exists unless it was asked for, and nothing has a row per token and a column per token: the attention of
all queries is worked again from its saved log-sum-exp, in tiles, and only its sums by column stay.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..cache.inputs import INPUTS
from ..cache.staged import Staged
from .attention import log_sum_exp

ALL_QUERIES = frozenset(name for name, one in INPUTS.items() if one.all_queries)
COLUMNS = frozenset({"column_sums", "column_squares"})
BETWEEN = frozenset({"hidden_states", "hidden_similarity"})  # hidden states between norm, attention and MLP
TILE_FLOATS = 1 << 18  # of one tile of attention, all query heads of a KV head
_SINKS = 4  # the first tokens of a text, whose queries are like no other's: not in the moments


class LayerInputs:
    """The inputs of one layer in the making: `observe` each chunk of queries, then read the fields (None: not asked).

    scale and sliding are the layer's; `first` is the position of the piece's first token.
    """

    def __init__(
        self, needs: frozenset[str], staged: Staged, *, first: int, scale: float, sliding: int | None, heads: int
    ) -> None:
        self._needs, self._staged, self._first, self._scale, self._sliding = needs, staged, first, scale, sliding
        kv_heads, columns, head_dim = staged.keys.shape
        device = staged.keys.device
        self.column_sums = torch.zeros(heads, columns, device=device) if "column_sums" in needs else None
        self.column_squares = torch.zeros(kv_heads, columns, device=device) if "column_squares" in needs else None
        self.hidden_states: Tensor | None = None
        self._sum = self._products = None
        if needs & {"query_mean", "query_covariance"}:
            self._sum = torch.zeros(heads, head_dim, dtype=torch.float64, device=device)
        if "query_covariance" in needs:
            self._products = torch.zeros(heads, head_dim, head_dim, dtype=torch.float64, device=device)
        self._similarity = torch.zeros((), dtype=torch.float64, device=device)
        self._queries = 0

    @property
    def wants_log_sum_exp(self) -> bool:
        return bool(self._needs & COLUMNS)

    def hidden(self, start: int, normed: Tensor) -> None:
        """Take the input of attention `[chunk, hidden]` of the tokens from `start` on."""
        if "hidden_states" not in self._needs:
            return
        if self.hidden_states is None:
            self.hidden_states = normed.new_empty(self._staged.tokens, normed.shape[1])
        self.hidden_states[start : start + normed.shape[0]] = normed

    def before(self, span: Tensor) -> Tensor | None:
        """A copy of the hidden states before attention, where `after` will compare."""
        return span.clone() if "hidden_similarity" in self._needs else None

    def after(self, before: Tensor | None, span: Tensor) -> None:
        """Compare hidden states `[chunk, hidden]` with those before attention."""
        if before is not None:
            cosine = torch.nn.functional.cosine_similarity(before.float(), span.float(), dim=-1)
            self._similarity += cosine.sum(dtype=torch.float64)

    def queries(self, queries: Tensor, cos: Tensor, sin: Tensor, start: int, lse: Tensor | None) -> None:
        """Take a chunk's rotated queries `[heads, chunk, head_dim]`, the angles they were turned by, and the
        log-sum-exp `[heads, chunk]` of their attention, where the layer's attention gave one."""
        skip = min(max(0, _SINKS - self._first - start), queries.shape[1])
        self._queries += queries.shape[1] - skip
        if self._sum is not None:
            plain = unrotated(queries[:, skip:], cos[skip:], sin[skip:])
            self._sum += plain.sum(1, dtype=torch.float64)
            if self._products is not None:
                self._products += plain.transpose(1, 2) @ plain
        if self.wants_log_sum_exp:
            for head in range(self._staged.keys.shape[0]):
                self._columns(head, queries, start, lse)

    def _columns(self, head: int, queries: Tensor, start: int, lse: Tensor | None) -> None:
        """Add the attention of a chunk's queries to the columns of one KV head."""
        staged, chunk = self._staged, queries.shape[1]
        group = queries.shape[0] // staged.keys.shape[0]
        span = slice(head * group, (head + 1) * group)
        own = queries[span].float() * self._scale  # [group, chunk, head_dim]
        end = staged.held[head] + start + chunk
        keys, positions = staged.keys[head, :end], staged.position[head, :end]
        at = torch.arange(self._first + start, self._first + start + chunk, device=queries.device)
        total = lse[span] if lse is not None else log_sum_exp(own, keys, positions, at, self._sliding)
        step = max(64, TILE_FLOATS // (group * chunk))
        for left in range(0, end, step):
            right = min(left + step, end)
            attention = torch.matmul(own, keys[left:right].float().t()).sub_(total[..., None]).exp_()
            hidden = positions[None, left:right] > at[:, None]
            if self._sliding is not None:
                hidden |= positions[None, left:right] <= at[:, None] - self._sliding
            attention.masked_fill_(hidden, 0.0)
            if self.column_sums is not None:
                self.column_sums[span, left:right] += attention.sum(1)
            if self.column_squares is not None:
                self.column_squares[head, left:right] += attention.mean(0).square_().sum(0)

    @property
    def query_mean(self) -> Tensor | None:
        """fp32 `[heads, head_dim]`."""
        if self._sum is None or "query_mean" not in self._needs:
            return None
        return (self._sum / max(self._queries, 1)).float()

    @property
    def query_covariance(self) -> Tensor | None:
        """fp32 `[heads, head_dim, head_dim]`, divided by the number of queries."""
        if self._sum is None or self._products is None:
            return None
        mean = self._sum / max(self._queries, 1)
        return (self._products / max(self._queries, 1) - mean[:, :, None] * mean[:, None, :]).float()

    @property
    def hidden_similarity(self) -> float | None:
        """Mean over the piece's tokens."""
        if "hidden_similarity" not in self._needs:
            return None
        return float(self._similarity) / max(self._staged.tokens, 1)


def unrotated(queries: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotated queries `[heads, n, head_dim]` as they were before, fp32.

    cos, sin: `[n, head_dim / 2]`, as they were turned by; some rope kinds scale both by a factor, which goes out too.
    """
    first, second = queries.float().chunk(2, dim=-1)
    square = cos[:1, :1].square() + sin[:1, :1].square()
    cos, sin = cos / square, sin / square
    return torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1)
