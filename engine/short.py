"""Short pieces of text with narrow weights: their products in compiled code, which reads a weight where it lies.

torch multiplies int8 weights that have been widened, and for few tokens the widening takes most of the time.
"""

from __future__ import annotations

import importlib.util
import os
import threading
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from ..errors import BackendError
from ..models.config import ModelConfig
from ..models.decoder import Decoder
from .background import Background
from .compiling import Compiling
from .kernels import kernels_cached, load_short
from .stepper import OnWait
from .team import Team
from .weight_tables import WeightTables, in_lines

MOST_TOKENS = {torch.int8: 192}  # of a piece that is faster here, by how weights are stored; see bench/NOTES.md
MOST_BYTES = 1 << 20  # of what a product takes of all tokens: it is read again for every 16 rows of a matrix
PARTS = ("before_attention", "after_attention", "head")
ROWS, LINE, PLANES = 16, 64, 3  # of a tile, bytes of one of its rows, and what a number is written as


class ShortPieces:
    """Works what is not attention in a layer, for pieces of up to `most` tokens: the twin of the methods of `Decoder`.

    Products are exact to the rounding of fp32. The results of a token do not depend on the others, nor on the number of
    threads, bit for bit. Used where `ready`. Not for two callers at a time.
    """

    def __init__(self, decoder: Decoder, threads: int, staging: torch.dtype) -> None:
        config = decoder.config
        self.most, self._decoder = most_tokens(config, decoder.dtype), decoder
        self._threads = max(1, min(threads, os.cpu_count() or 1))
        self._team = Team(self._threads)
        self._tables = WeightTables(decoder)
        self._staging = staging
        self._like_staging = np.zeros(0, np.float32 if staging == torch.float32 else np.uint16)
        self._kind = f"short-{self._tables.like.dtype.name}-{self._like_staging.dtype.name}"
        self._compiling = Compiling()
        self._module: ModuleType | None = None
        self._failed = False
        self._preparing = threading.Lock()
        self._tokens = 0  # that there is work space for

    @property
    def at_hand(self) -> bool:
        """Whether the kernels have been compiled on this machine before."""
        return not self._failed and kernels_cached(self._kind)

    @property
    def ready(self) -> bool:
        """Whether the kernels can be called at once."""
        return self._module is not None

    def takes(self, tokens: int, chunk: int) -> bool:
        """Whether a piece of so many tokens, read in chunks of so many, is worked here."""
        return self.ready and tokens <= min(self.most, chunk)

    def prepare(self, on_wait: OnWait | None = None) -> None:
        """Load the kernels, compiled once for this machine. Where numba cannot be loaded, torch stays in charge."""
        with self._preparing:
            if self._module is None and not self._failed:
                try:
                    self._module = self._prepared(on_wait)
                except BackendError:  # of which the decode step warns
                    self._failed = True

    def load_ahead(self) -> None:
        """Load kernels that have been compiled before, behind whoever is not reading yet."""
        if self.at_hand and not self.ready:
            Background(self.prepare, name="cake-infer-short")

    def _prepared(self, on_wait: OnWait | None) -> ModuleType:
        module = load_short()
        self._make_room(1)
        config = self._decoder.config
        hidden = torch.zeros(1, config.hidden_size)
        cos = torch.zeros(1, config.head_dim // 2)
        kept = torch.zeros(config.num_kv_heads, 1, config.head_dim, dtype=self._staging)
        queries = torch.zeros(config.num_heads, 1, config.head_dim, dtype=self._staging)
        calls = {
            "before_attention": self._before(0, hidden, cos, cos, queries, kept, kept),
            "after_attention": self._after(0, queries, hidden),
            "head": self._head(hidden, torch.zeros(1, 1)),
        }
        what = f"the products of short texts for {self._tables.format} weights"
        for part in PARTS:
            kind = self._kind if part == PARTS[-1] else f"{self._kind}-{part}"  # it is the last that says it is done
            arguments = calls[part]
            self._compiling.ensure(kind, getattr(module, part), arguments, what=what, seconds=2, on_wait=on_wait)
        return module

    def before_attention(
        self, index: int, hidden: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Rotated queries `[heads, n, head_dim]` of hidden states fp32 `[n, hidden]`.

        keys, values: `[kv_heads, n, head_dim]`, strided alike, are written. cos, sin: fp32 `[n, head_dim / 2]`.
        """
        config = self._decoder.config
        queries = torch.empty(config.num_heads, hidden.shape[0], config.head_dim, dtype=self._staging)
        self._run("before_attention", *self._before(index, hidden, cos, sin, queries, keys, values))
        return queries

    def after_attention(self, index: int, attended: Tensor, hidden: Tensor) -> None:
        """Add output projection and MLP to hidden states fp32 `[n, hidden]`, of attention `[heads, n, head_dim]`."""
        attended = attended.contiguous()
        self._run("after_attention", *self._after(index, attended, hidden))

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Decoder.logits`."""
        out = torch.empty(hidden.shape[0], self._decoder.config.vocab_size)
        self._run("head", *self._head(hidden, out))
        return out

    def _run(self, part: str, *arguments: object) -> None:
        assert self._module is not None, "prepare loads the kernels"
        self._team.run(getattr(self._module, part), *arguments)

    # -- arguments ----------------------------------------------------------------------------------------------------

    def _before(
        self, index: int, hidden: Tensor, cos: Tensor, sin: Tensor, queries: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[object, ...]:
        tables = self._tables
        self._make_room(hidden.shape[0])
        assert keys.dtype == values.dtype == self._staging
        assert keys.stride() == values.stride()
        assert keys.stride()[1:] == (keys.shape[2], 1)
        places = [queries.data_ptr(), keys.data_ptr(), values.data_ptr(), keys.stride(0)]
        return (
            self._threads,
            index,
            tables.shape,
            tables.constants,
            tables.matrices,
            tables.norms,
            tables.head_norms,
            tables.qkv_bias,
            hidden.numpy(),
            cos.numpy(),
            sin.numpy(),
            np.array(places, dtype=np.int64),
            *self._space,
            self._products[: hidden.shape[0]],
            self._like_staging,
            tables.like,
        )

    def _after(self, index: int, attended: Tensor, hidden: Tensor) -> tuple[object, ...]:
        tables, n = self._tables, hidden.shape[0]
        self._make_room(n)
        assert attended.dtype == self._staging
        return (
            self._threads,
            index,
            tables.shape,
            tables.constants,
            tables.matrices,
            tables.norms,
            tables.o_bias,
            tables.mlp_bias,
            attended.data_ptr(),
            hidden.numpy(),
            *self._space,
            self._products[:n],
            self._gate[:n],
            self._up[:n],
            self._like_staging,
            tables.like,
        )

    def _head(self, hidden: Tensor, out: Tensor) -> tuple[object, ...]:
        tables = self._tables
        self._make_room(hidden.shape[0])
        return (
            self._threads,
            tables.shape,
            tables.constants,
            tables.ends,
            tables.norms,
            hidden.numpy(),
            *self._space,
            out.numpy(),
            tables.like,
        )

    def _make_room(self, n: int) -> None:
        """Work space for n tokens."""
        if n <= self._tokens:
            return
        from .kernels.digits import scratch_bytes
        from .kernels.tile_rows import SPREAD

        config, threads, item = self._decoder.config, self._threads, self._tables.like.itemsize
        width = widest_input(config)
        self._space = (
            np.zeros((threads, ROWS, width + 64), np.float32),  # apart in memory: no two threads share a cache line
            np.zeros((threads, ROWS, scratch_bytes(width * item)), np.int8),
            in_lines(threads, SPREAD),
            in_lines(plane_bytes(config, n, item)),
        )
        self._products = np.zeros((n, widest_output(config)), np.float32)
        self._gate, self._up = (np.zeros((n, config.intermediate_size), np.float32) for _ in range(2))
        self._tokens = n


def make_short_pieces(decoder: Decoder, threads: int, staging: torch.dtype) -> ShortPieces | None:
    """What works short pieces of a decoder; None where there is nothing that is faster than torch."""
    if decoder.device.type != "cpu" or not most_tokens(decoder.config, decoder.dtype):
        return None
    if importlib.util.find_spec("numba") is None:
        return None
    from .kernels.processor import has_tiles

    if not has_tiles():
        return None
    try:
        return ShortPieces(decoder, threads, staging)
    except BackendError:  # weights of several formats: the step says so
        return None


def most_tokens(config: ModelConfig, stored: torch.dtype) -> int:
    """Tokens of the longest piece whose products are worked here; 0 where the tiles do not fit the matrices."""
    if stored not in MOST_TOKENS:
        return 0
    item = stored.itemsize
    inputs = (config.hidden_size, config.num_heads * config.head_dim, config.intermediate_size)
    outputs = (config.num_kv_heads * config.head_dim, *inputs, config.vocab_size)
    if any(columns * item % LINE for columns in inputs) or min(outputs) < ROWS:
        return 0
    return min(MOST_TOKENS[stored], MOST_BYTES // plane_bytes(config, ROWS, item) * ROWS)


def widest_input(config: ModelConfig) -> int:
    """Numbers of a token that meet a row of the widest matrix."""
    return max(config.hidden_size, config.num_heads * config.head_dim, config.intermediate_size)


def widest_output(config: ModelConfig) -> int:
    """Numbers of a token's queries, keys and values together, or of its hidden state."""
    return max(config.hidden_size, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim)


def plane_bytes(config: ModelConfig, tokens: int, item: int) -> int:
    """Bytes of so many tokens' planes, see kernels/tile_rows.py, for weights of `item` bytes."""
    return -(-tokens // ROWS) * (LINE + PLANES * ROWS * widest_input(config) * item)
