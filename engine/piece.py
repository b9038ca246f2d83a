"""One piece of text while it is read, and a layer of it as a policy sees it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..cache.staged import Staged
from ..cache.view import LayerView
from ..models.decoder import Decoder
from ..models.workspace import Workspace
from .attention import Attention
from .inputs import LayerInputs
from .sequence import Sequence
from .short import ShortPieces


@dataclass(frozen=True)
class Piece:
    """What stays the same while one piece is read."""

    ids: Tensor  # int64 [tokens]
    tokens: int
    first: int  # true position of the first token
    cos: Tensor  # fp32 [tokens, head_dim / 2]
    sin: Tensor
    chunk: int
    work: Workspace | None  # of one chunk; None on a GPU, where torch keeps what is freed
    attention: Attention
    needs: frozenset[str] = frozenset()  # what the policy asks to know of every layer, if it evicts
    short: ShortPieces | None = None  # what works the products of this piece, if not torch

    @property
    def total(self) -> int:
        return self.first + self.tokens

    def chunks(self) -> list[tuple[int, int]]:
        return [(start, min(start + self.chunk, self.tokens)) for start in range(0, self.tokens, self.chunk)]


def layer_view(
    decoder: Decoder,
    sequence: Sequence,
    staged: Staged,
    index: int,
    piece: Piece,
    window: int,
    inputs: LayerInputs,
    separators: frozenset[int] | None,
) -> LayerView:
    """The layer as the policy sees it: what it did not ask for is not there."""
    assert sequence.ring is not None
    assert sequence.rotary is not None
    needs = piece.needs
    queries, query_position = sequence.ring.read(index, piece.total)
    device = staged.keys.device
    return LayerView(
        layer=index,
        keys=staged.keys,
        positions=staged.position,
        queries=queries,
        query_positions=query_position,
        window=window,
        scale=decoder.scale,
        sliding_window=decoder.config.sliding_windows[index],
        total=piece.total,
        lengths=None if staged.agree else staged.lengths,
        first=piece.first,
        ordered=piece.first == 0 and not any(staged.held),
        values=staged.values if "values" in needs else None,
        # a reply's tokens were written without a score, and may lie where another token's score still is
        carried=staged.score.masked_fill(staged.position >= sequence.read, 0.0) if "carried" in needs else None,
        output_projection=decoder.for_products(index).o_proj if "output_projection" in needs else None,
        column_sums=inputs.column_sums,
        column_squares=inputs.column_squares,
        query_mean=inputs.query_mean,
        query_covariance=inputs.query_covariance,
        rotation=sequence.rotary.cos_sin if "rotation" in needs else None,
        hidden_states=inputs.hidden_states,
        hidden_similarity=inputs.hidden_similarity,
        token_ids=torch.cat([torch.tensor(sequence.ids, dtype=torch.int64, device=device), piece.ids])
        if "token_ids" in needs
        else None,
        separators=separators if "separators" in needs else None,
    )
