"""The compiled decode step: the model's weights and the arena's rows as tables of addresses, one call per token."""

from __future__ import annotations

import importlib.util
import logging
from functools import cached_property
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from ..cache.arena import Arena
from ..cache.packed_arena import PackedArena
from ..cache.packed_store import PackedStore
from ..errors import BackendError
from ..models.decoder import Decoder
from .compiling import Compiling
from .kernels import NO_NUMBA, ON_CPU, kernels_cached, load_step
from .sequence import Sequence
from .stepper import OnWait
from .team import Team, team_size
from .weight_tables import FORMATS, WeightTables, in_lines

log = logging.getLogger(__name__)

NO_LIMIT = np.iinfo(np.int64).max
ANGLES_AHEAD, MOST_ANGLES = 64, 256  # positions in a block, blocks that are remembered


class CompiledStep:
    """Runs decode steps of one decoder on a CPU; the same arithmetic as `decode.step`, to 1e-4 in fp32.

    Weights are read where they are (mapped files too). Threads: how many the kernel uses; the result does not depend
    on it, bit for bit. Raises BackendError with the reason where the kernel cannot run.
    """

    def __init__(self, decoder: Decoder, kv_dtype: torch.dtype, threads: int, *, kv_bits: int | None = None) -> None:
        if decoder.device.type != "cpu":
            raise BackendError(ON_CPU)
        if importlib.util.find_spec("numba") is None:
            raise BackendError(NO_NUMBA)
        if kv_dtype not in (torch.float32, torch.bfloat16):
            raise BackendError(f"the compiled step has no form for keys and values stored as {kv_dtype}")
        config = decoder.config
        if kv_bits is not None and config.head_dim % 16:
            raise BackendError(f"the compiled step has no form for packed rows of heads of {config.head_dim} numbers")
        self._tables = WeightTables(decoder)
        self.decoder = decoder
        self.threads = team_size(threads)
        if threads > self.threads:
            what = "decoding uses %d threads, one for each core: %d would wait for each other"
            log.warning(what, self.threads, threads)
        self._team = Team(self.threads)
        whole = config.head_dim % 16 == 0
        self._lanes = (0,) * (config.head_dim // 16 if whole else 0)
        self._group = (0,) * (config.num_heads // config.num_kv_heads)
        self._bits = (0,) * (kv_bits or 0)
        rows = "float32" if kv_dtype == torch.float32 else "uint16"
        self._weights = self._tables.like
        self._kind = f"{self._weights.dtype.name}-{rows}-{len(self._lanes)}-{len(self._group)}-{len(self._bits)}"
        if not self.at_hand:
            _ = self._step  # it is found out now whether numba can be loaded, as it could when a kernel was kept
        self._sliding = np.array([window or 0 for window in config.sliding_windows], dtype=np.int64)
        self._room: tuple[int, int, int] = (0, 0, 0)
        self._angles: dict[tuple[object, int], tuple[np.ndarray, np.ndarray]] = {}
        self._compiling = Compiling()
        shape = (config.num_layers, config.num_kv_heads)
        self._unlimited, self._none = np.full(shape, NO_LIMIT, dtype=np.int64), np.zeros(shape, dtype=np.int64)

    @cached_property
    def _step(self) -> ModuleType:
        return load_step()

    @property
    def at_hand(self) -> bool:
        """Whether the kernel has been compiled on this machine before; see `Step`."""
        return kernels_cached(self._kind)

    def _make_room(self, n: int, columns: int, packed: int) -> None:
        """Work space for n sequences with rows of so many columns, and packed ones of so many besides."""
        if n == self._room[0] and columns <= self._room[1] and packed <= self._room[2]:
            return
        from .kernels.attention import PIECES
        from .kernels.digits import scratch_bytes
        from .kernels.packed_rows import share_lines
        from .kernels.tile_rows import tile_bytes

        config, threads = self.decoder.config, self.threads
        kv_heads, pieces = config.num_kv_heads, -(-columns // PIECES[0]) + -(-packed // PIECES[0])
        group = config.num_heads // kv_heads
        wide = max(config.hidden_size, config.num_heads * config.head_dim)
        widest = max(wide, config.intermediate_size)

        def floats(*shape: int) -> np.ndarray:
            return np.zeros(shape, dtype=np.float32)

        self._space = (
            floats(n, config.hidden_size),
            floats(threads, n, wide + 64),  # apart in memory: no two threads share a cache line
            np.zeros((threads, n, scratch_bytes(widest * min(self._weights.itemsize, 2))), dtype=np.int8),
            in_lines(threads, tile_bytes(widest, n)),
            floats(threads, group, config.head_dim),
            floats(threads, group, PIECES[-1]),
            floats(threads, share_lines(group, config.head_dim) if self._bits else 0, PIECES[-1]),
            floats(n, (config.num_heads + 2 * kv_heads) * config.head_dim),
            floats(n, kv_heads, group, columns),
            floats(n, kv_heads, pieces, group),
            floats(n, kv_heads, pieces, group),
            floats(n, kv_heads, pieces, group, config.head_dim),
            floats(n, 2, kv_heads, group),
            floats(2, n, max(config.hidden_size, config.intermediate_size)),
            floats(n, config.vocab_size),
        )
        self._room = (n, columns, packed)

    def _cos_sin(self, sequence: Sequence) -> tuple[np.ndarray, np.ndarray]:
        """The angles of a sequence's next position, worked out for some positions at a time."""
        rotary = sequence.rotary
        assert rotary is not None, "decoding follows a prefill"
        block, index = divmod(sequence.total, ANGLES_AHEAD)
        key = (rotary.key, block)
        if key not in self._angles:
            if len(self._angles) >= MOST_ANGLES:
                self._angles.clear()
            first = block * ANGLES_AHEAD
            cos, sin = rotary.cos_sin(torch.arange(first, first + ANGLES_AHEAD))
            self._angles[key] = (cos.numpy(), sin.numpy())
        cosines, sines = self._angles[key]
        return cosines[index], sines[index]

    def __call__(self, arena: Arena, sequence: Sequence, token: int, *, window: int) -> Tensor:
        """Feed one token. Returns the next token's logits fp32 `[vocab]`; see `decode.step`."""
        return self.batch([arena], [sequence], [token], window=window)[0]

    def batch(self, arenas: list[Arena], sequences: list[Sequence], tokens: list[int], *, window: int) -> Tensor:
        """Feed one token to each of n sequences whose arenas share a store. Returns logits fp32 `[n, vocab]`.

        Every weight is read once; what a sequence gets is bit for bit what it would get alone.
        """
        for arena in arenas:
            if isinstance(arena, PackedArena):
                arena.flush()
        lengths = np.stack([arena.length for arena in arenas])
        self._team.run(self._step.decode_step, *self._arguments(arenas, sequences, tokens, lengths, window))
        for arena, sequence, token, length in zip(arenas, sequences, tokens, lengths, strict=True):
            arena.length[:] = length
            sequence.ids.append(token)
        return torch.from_numpy(self._space[-1].copy())

    def prepare(self, arena: Arena, sequence: Sequence, *, window: int, on_wait: OnWait | None = None) -> None:
        """Compile what the next step needs, so that no reply stops after its first token."""
        self._arguments([arena], [sequence], [0], arena.length[None], window, on_wait)

    def _arguments(
        self,
        arenas: list[Arena],
        sequences: list[Sequence],
        tokens: list[int],
        lengths: np.ndarray,
        window: int,
        on_wait: OnWait | None = None,
    ) -> tuple[object, ...]:
        """What the compiled step is called with."""
        arena = arenas[0]
        assert all(other.store is arena.store for other in arenas), "a batch lives in one store"
        packed = [one.packed for one in arenas if isinstance(one, PackedArena)]
        columns = max(int(one.capacity.max()) for one in arenas) + 1
        self._make_room(len(arenas), columns, max((int(rows.capacity.max()) for rows in packed), default=0))
        tables = self._tables
        tables.shape[8] = window
        angles = [self._cos_sin(sequence) for sequence in sequences]
        rings = [sequence.ring.as_numpy() if sequence.ring is not None else None for sequence in sequences]
        keys, values = _as_stored(arena.keys), _as_stored(arena.values)
        arguments = (
            np.array(tokens, dtype=np.int64),
            np.array([sequence.total for sequence in sequences], dtype=np.int64),
            self.threads,
            tables.shape,
            tables.constants,
            tables.matrices,
            tables.ends,
            tables.norms,
            tables.head_norms,
            tables.qkv_bias,
            tables.o_bias,
            tables.mlp_bias,
            np.stack([cos for cos, _ in angles]),
            np.stack([sin for _, sin in angles]),
            keys,
            values,
            arena.position.numpy(),
            np.stack([one.offset for one in arenas]),
            lengths,
            np.stack([self._unlimited if one.limit is None else one.limit for one in sequences]),
            _packed_tables(packed[0].store if packed else None),
            np.stack([rows.offset for rows in packed] or [self._none] * len(arenas)),
            np.stack([rows.length for rows in packed] or [self._none] * len(arenas)),
            self._sliding,
            np.array([0 if ring is None else ring.ctypes.data for ring in rings], dtype=np.int64),
            *self._space,
            self._weights,
            self._lanes,
            self._group,
            self._bits,
        )
        weights, rows = self._tables.format, FORMATS[keys.dtype.name]
        if self._bits:
            rows = f"{len(self._bits)}-bit and {rows}"
        what = f"the decode step for {weights} weights, {rows} keys and values"
        self._compiling.ensure(self._kind, self._step.decode_step, arguments, what=what, seconds=10, on_wait=on_wait)
        return arguments


def _as_stored(store: Tensor) -> np.ndarray:
    """An arena store as numpy sees it: bf16, which numpy lacks, as the uint16 of its bits."""
    return store.view(torch.uint16).numpy() if store.dtype == torch.bfloat16 else store.numpy()


def _packed_tables(store: PackedStore | None) -> tuple[np.ndarray, ...]:
    """What the kernel reads of a store of packed rows, fp16 as the uint16 of its bits; empty tables without one."""
    if store is None:
        codes, factors = np.zeros((0, 0), dtype=np.uint8), np.zeros((0, 0), dtype=np.uint16)
        return codes, codes, factors, factors, factors, factors, np.zeros(0, dtype=np.int32)
    *tables, position, _ = store.tables
    return *(t.view(torch.uint16).numpy() if t.dtype == torch.float16 else t.numpy() for t in tables), position.numpy()
