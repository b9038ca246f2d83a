"""Short pieces of text with narrow weights: their products in compiled code, which reads a weight where it lies.

torch multiplies int8 weights that have been widened, and for few tokens the widening takes most of the time.
"""

from __future__ import annotations

import importlib.util
import threading
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from ..cache.staged import Staged
from ..errors import BackendError
from ..models.config import ModelConfig
from ..models.decoder import Decoder
from .background import Background
from .compiling import Compiling
from .kernels import kernels_cached, load_short
from .stepper import OnWait
from .team import Team, team_size
from .weight_tables import WeightTables, in_lines

MOST_TOKENS = {torch.int8: 192}  # of a piece that is faster here, by how weights are stored; see bench/NOTES.md
MOST_BYTES = 1 << 20  # of what a product takes of all tokens: it is read again for every 16 rows of a matrix
MOST_PRODUCTS = 40_000  # of a query and a key, a head on average, that attention of a token at a time is faster for
FEW_TOKENS = 32  # that one thread of two works as fast alone
ALL, BEFORE, AFTER = range(3)  # see kernels/short.py
PARTS = ("read_layer", "head")
ROWS, LINE, PLANES = 16, 64, 3  # of a tile, bytes of one of its rows, and what a number is written as


class ShortPieces:
    """Works what is not attention in a layer, for pieces of up to `most` tokens: the twin of the methods of `Decoder`.

    Products are exact to the rounding of fp32. The results of a token do not depend on the others, nor on the number of
    threads, bit for bit. Used where `ready`. Not for two callers at a time.
    """

    def __init__(self, decoder: Decoder, threads: int, staging: torch.dtype) -> None:
        config = decoder.config
        self.most, self._decoder = most_tokens(config, decoder.dtype), decoder
        self._threads = team_size(threads)
        self._team, self._alone = Team(self._threads), Team(1)
        self._tables = WeightTables(decoder)
        self._staging = staging
        self._like_staging = np.zeros(0, np.float32 if staging == torch.float32 else np.uint16)
        self._kind = f"short-{self._tables.like.dtype.name}-{self._like_staging.dtype.name}"
        self._compiling = Compiling()
        self._module: ModuleType | None = None
        self._failed = False
        self._preparing = threading.Lock()
        self._lanes = (0,) * (config.head_dim // ROWS if config.head_dim % ROWS == 0 else 0)
        self._group = (0,) * (config.num_heads // config.num_kv_heads)
        self._kind += f"-{len(self._lanes)}-{len(self._group)}"
        self._free()

    @property
    def at_hand(self) -> bool:
        """Whether the kernels have been compiled on this machine before."""
        return not self._failed and kernels_cached(self._kind)

    @property
    def ready(self) -> bool:
        """Whether the kernels can be called at once."""
        return self._module is not None

    def attends(self, tokens: int, held: tuple[int, ...]) -> bool:
        """Whether attention of so many tokens over themselves and the rows that each KV head has held is faster in
        `layer` than in torch. Here a row costs its own length; in torch all cost that of the longest."""
        return tokens * (sum(held) // len(held) + tokens // 2) <= MOST_PRODUCTS

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
        config = self._decoder.config
        hidden, cos = torch.zeros(1, config.hidden_size), torch.zeros(1, config.head_dim // 2)
        shape = (config.num_kv_heads, 1)
        kept = torch.zeros(*shape, config.head_dim, dtype=self._staging)
        held = (0,) * config.num_kv_heads
        staged = Staged(kept, kept, torch.zeros(shape, dtype=torch.int32), torch.zeros(shape), held, 1)
        calls = {
            "read_layer": self._layer(0, hidden, cos, cos, staged, 0)[0],
            "head": self._head(hidden, torch.zeros(1, 1)),
        }
        what = {
            "read_layer": (f"a layer of short texts for {self._tables.format} weights", 10),
            "head": (f"the head of short texts for {self._tables.format} weights", 1),
        }
        for part in PARTS:
            kind = self._kind if part == PARTS[-1] else f"{self._kind}-{part}"  # it is the last that says it is done
            arguments, (name, seconds) = calls[part], what[part]
            self._compiling.ensure(kind, getattr(module, part), arguments, what=name, seconds=seconds, on_wait=on_wait)
        return module

    def layer(
        self, index: int, hidden: Tensor, cos: Tensor, sin: Tensor, staged: Staged, first: int, *, last: bool = False
    ) -> tuple[Tensor, Tensor]:
        """One layer over hidden states fp32 `[n, hidden]`, in place; with `last` only the last token's are changed.

        Writes the keys and values of the new tokens, the first of which is at position `first`. cos, sin: fp32
        `[n, head_dim / 2]`. Returns rotated queries fp32 `[heads, n, head_dim]`, and the log-sum-exps `[heads, n]` of
        their attention, with `last` of the last token alone.
        """
        arguments, queries, lse = self._layer(index, hidden, cos, sin, staged, first, last=last)
        self._run("read_layer", *arguments)
        return queries, lse

    def before_attention(
        self, index: int, hidden: Tensor, cos: Tensor, sin: Tensor, staged: Staged, first: int
    ) -> Tensor:
        """`layer` as far as attention: writes keys and values, and returns queries as they are staged."""
        arguments, queries, _ = self._layer(index, hidden, cos, sin, staged, first, BEFORE)
        self._run("read_layer", *arguments)
        return queries.to(self._staging)

    def after_attention(self, index: int, attended: Tensor, hidden: Tensor, staged: Staged) -> None:
        """The rest of `layer`, of attention's results `[heads, n, head_dim]`."""
        heads, n, head_dim = attended.shape
        angles = torch.empty(n, head_dim // 2)
        arguments, _, _ = self._layer(index, hidden, angles, angles, staged, 0, AFTER)
        torch.from_numpy(self._tokens_space[-1][:n]).view(n, heads, head_dim).copy_(attended.transpose(0, 1))
        self._run("read_layer", *arguments)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Decoder.logits`."""
        out = torch.empty(hidden.shape[0], self._decoder.config.vocab_size)
        self._run("head", *self._head(hidden, out))
        return out

    def _run(self, part: str, threads: object, *arguments: object) -> None:
        assert self._module is not None, "prepare loads the kernels"
        team = self._alone if threads == 1 else self._team
        team.run(getattr(self._module, part), threads, *arguments)

    # -- arguments ----------------------------------------------------------------------------------------------------

    def _layer(
        self,
        index: int,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        staged: Staged,
        first: int,
        part: int = ALL,
        *,
        last: bool = False,
    ) -> tuple[tuple[object, ...], Tensor, Tensor]:
        tables, config, n = self._tables, self._decoder.config, hidden.shape[0]
        self._make_room(n, staged.keys.shape[1])
        assert staged.keys.dtype == self._staging
        assert staged.keys.is_contiguous()
        assert staged.values.is_contiguous()
        queries, lse = torch.empty(config.num_heads, n, config.head_dim), torch.empty(config.num_heads, n)
        places = [
            (staged.keys[head].data_ptr(), staged.values[head].data_ptr(), held)
            for head, held in enumerate(staged.held)
        ]
        arguments = (
            1 if self._threads == 2 and n <= FEW_TOKENS else self._threads,
            index,
            part,
            1 if last else n,
            tables.shape,
            tables.constants,
            tables.matrices,
            tables.norms,
            tables.head_norms,
            tables.qkv_bias,
            tables.o_bias,
            tables.mlp_bias,
            np.array(places, dtype=np.int64),
            staged.position.numpy(),
            config.sliding_windows[index] or 0,
            first,
            hidden.numpy(),
            cos.numpy(),
            sin.numpy(),
            queries.numpy(),
            lse.numpy(),
            *self._space,
            *(table[:n] for table in self._tokens_space),
            *self._attention_space,
            self._like_staging,
            tables.like,
            self._lanes,
            self._group,
        )
        return arguments, queries, lse

    def _head(self, hidden: Tensor, out: Tensor) -> tuple[object, ...]:
        tables = self._tables
        self._make_room(hidden.shape[0], 0)
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

    def release(self) -> None:
        """Give the work space back, where a long text is read: its plan counts the whole of the memory anew."""
        if self.ready:
            self._free()

    def _free(self) -> None:
        self._space: tuple[np.ndarray, ...] = ()
        self._tokens_space: tuple[np.ndarray, ...] = ()
        self._attention_space: tuple[np.ndarray, ...] = ()
        self._room = (0, 0)

    def _make_room(self, n: int, columns: int) -> None:
        """Work space for n tokens, over rows of so many columns with theirs."""
        if n <= self._room[0] and columns <= self._room[1]:
            return
        from .kernels.attention import PIECES
        from .kernels.digits import scratch_bytes
        from .kernels.tile_rows import SPREAD

        config, threads, item = self._decoder.config, self._threads, self._tables.like.itemsize
        width, group, dim = widest_input(config), len(self._group), config.head_dim
        n, columns = max(n, self._room[0]), max(columns, self._room[1])
        pieces = -(-columns // PIECES[0])

        def floats(*shape: int) -> np.ndarray:
            return np.zeros(shape, dtype=np.float32)

        self._space = (
            floats(threads, ROWS, width + 64),  # apart in memory: no two threads share a cache line
            np.zeros((threads, ROWS, scratch_bytes(width * item)), np.int8),
            in_lines(threads, SPREAD),
            in_lines(plane_bytes(config, n, item)),
        )
        self._tokens_space = (
            floats(n, widest_output(config)),
            floats(n, config.intermediate_size),
            floats(n, config.intermediate_size),
            floats(n, config.num_heads * dim),
        )
        self._attention_space = (
            floats(threads, group, dim),
            floats(threads, group, columns),
            floats(threads, pieces, group),
            floats(threads, pieces, group),
            floats(threads, pieces, group, dim),
            floats(threads, group, PIECES[-1]),
        )
        self._room = (n, columns)


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
