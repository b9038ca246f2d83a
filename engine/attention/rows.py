"""The rows of one layer, as every attention backend is given them in a decode step; and the plain torch form of it.

A row is a (sequence, KV head) with an offset and a length of its own in flat stores. The tables are on the device: a
kernel that reads them there serves every length. The functions here read them on the host: they are the reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """One layer's rows of a batch of sequences, a newcomer of each in the slot behind its length.

    keys, values: `[slots, head_dim]`; position: int32 `[slots]`. offset, length: int32 `[batch, kv_heads]`, contiguous,
    in slots; a negative length marks a row that does nothing: it is neither read nor written, its output is 0.
    query_position: int32 `[batch]`, true positions of the new tokens. longest: no row is or becomes longer than this,
    newcomer included (the arena's largest capacity): it sizes work space and grids, which must not depend on lengths.
    """

    keys: Tensor
    values: Tensor
    position: Tensor
    offset: Tensor
    length: Tensor
    query_position: Tensor
    longest: int

    @property
    def tables(self) -> tuple[Tensor, ...]:
        """What kernels take of rows, in the order in which they take it."""
        return self.keys, self.values, self.position, self.offset, self.length, self.query_position

    @property
    def batch(self) -> int:
        return self.offset.shape[0]

    @property
    def kv_heads(self) -> int:
        return self.offset.shape[1]

    def spans(self, newcomers: int = 1) -> list[tuple[int, int, int, slice]]:
        """Of each row that does something: sequence, KV head, offset, and the slots of its columns. Waits for a GPU."""
        found = []
        offsets, lengths = self.offset.tolist(), self.length.tolist()
        for sequence in range(self.batch):
            for head in range(self.kv_heads):
                start, length = offsets[sequence][head], lengths[sequence][head]
                if length >= 0:
                    found.append((sequence, head, start, slice(start, start + length + newcomers)))
        return found


def store_newcomers(rows: Rows, new_keys: Tensor, new_values: Tensor) -> None:
    """Write each sequence's new key and value, `[batch, kv_heads, head_dim]`, behind its rows."""
    for sequence, head, _, span in rows.spans():
        rows.keys[span.stop - 1] = new_keys[sequence, head]
        rows.values[span.stop - 1] = new_values[sequence, head]
        rows.position[span.stop - 1] = rows.query_position[sequence]


def attend_rows(
    queries: Tensor, rows: Rows, *, scale: float, sliding: int | None = None, newcomers: int = 1, weights: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Attention of new queries `[batch, heads, head_dim]` over their rows, row by row.

    Returns the output in the dtype of the queries, and with `weights` fp32 `[batch, kv_heads, longest]`: the attention
    to each column, the mean over the query heads of a row; what lies behind a row's columns is undefined. With
    `sliding` a column is seen if its position is above the query's less `sliding`.
    """
    group = queries.shape[1] // rows.kv_heads
    out = torch.zeros_like(queries)
    means = queries.new_zeros(rows.batch, rows.kv_heads, rows.longest, dtype=torch.float32) if weights else None
    for sequence, head, start, span in rows.spans(newcomers):
        if span.stop == start:
            continue
        mine = slice(head * group, (head + 1) * group)
        query = queries[sequence, mine]
        logits = (query @ rows.keys[span].to(query.dtype).t()).float() * scale  # [group, columns]
        if sliding is not None:
            logits.masked_fill_(rows.position[span] <= rows.query_position[sequence] - sliding, float("-inf"))
        attention = torch.softmax(logits, -1).nan_to_num_(0.0)  # a row that shows nothing gives 0
        out[sequence, mine] = attention.to(query.dtype) @ rows.values[span].to(query.dtype)
        if means is not None:
            means[sequence, head, : span.stop - start] = attention.mean(0)
    return out, means


def exchange_least_attended(rows: Rows, weights: Tensor, limit: Tensor, *, window: int) -> None:
    """Let full rows give up a slot for their newcomer, and let the others grow by it: `length` is raised in place.

    limit: int32 `[batch, kv_heads]`. In a row as long as its limit, or longer, the newcomer changes places with the
    slot of least `weights` outside the last `window` tokens, of equals the oldest; the loser stays behind the row until
    the next newcomer is written over it.
    """
    limits = limit.tolist()
    for sequence, head, start, span in rows.spans():
        length = span.stop - 1 - start
        if length < limits[sequence][head]:
            rows.length[sequence, head] += 1
            continue
        position = rows.position[span]
        scores = weights[sequence, head, : length + 1].masked_fill(
            position > rows.query_position[sequence] - window, float("inf")
        )
        lowest = scores == scores.amin()
        loser = start + int(torch.where(lowest, position, torch.iinfo(position.dtype).max).argmin())
        for table in (rows.keys, rows.values, rows.position):
            old = table[loser].clone()
            table[loser] = table[span.stop - 1]
            table[span.stop - 1] = old
