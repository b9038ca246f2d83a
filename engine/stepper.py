"""Which runner makes the decode steps: compiled on a CPU and a graph on a GPU where it can, plain torch else."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ..cache.arena import Arena
from ..cache.config import CacheConfig
from ..cache.holds.base import HoldRule
from ..cache.policies import make_hold
from ..cache.shared import SharedArena
from ..errors import BackendError
from ..models.decoder import Decoder
from . import decode
from .attention import Attention, Sdpa
from .graph import Ahead
from .kernels import NO_NUMBA, ON_CPU
from .sequence import Sequence

if TYPE_CHECKING:
    from .compiled import CompiledStep
    from .interval_step import IntervalStep

log = logging.getLogger(__name__)

ONLY_ATTENTION = "holds by attention, or at intervals by most rules"

OnWait = Callable[[], None]  # called about ten times a second while something is waited for; it may raise


class Step(Protocol):
    """Feeds one token to the sequence in the arena and gives the next token's logits fp32 `[vocab]`."""

    @property
    def at_hand(self) -> bool:
        """Whether `prepare` has less than a second to do, so that a reply's first token need not wait for it."""

    def __call__(self, arena: Arena, sequence: Sequence, token: int, *, window: int) -> Tensor: ...

    def prepare(self, arena: Arena, sequence: Sequence, *, window: int, on_wait: OnWait | None = None) -> None:
        """Do what the first call would have to do before it can begin, so that no reply stops after its first token."""


class EagerStep:
    """`decode.step` of one decoder: plain torch, with nothing to prepare."""

    at_hand = True

    def __init__(self, decoder: Decoder, attention: Attention, rule: HoldRule | None = None) -> None:
        self._decoder, self.attention, self.rule = decoder, attention, rule

    def __call__(self, arena: Arena, sequence: Sequence, token: int, *, window: int) -> Tensor:
        return decode.step(
            self._decoder, arena, sequence, token, window=window, attention=self.attention, rule=self.rule
        )

    def prepare(self, arena: Arena, sequence: Sequence, *, window: int, on_wait: OnWait | None = None) -> None:
        pass


class GraphStep(EagerStep):
    """Replies are decoded ahead, see `Ahead`; a step that somebody wants the logits of is an eager one."""

    at_hand = False

    def __init__(self, decoder: Decoder, attention: Attention, ahead: Ahead, rule: HoldRule | None = None) -> None:
        super().__init__(decoder, attention, rule)
        self.ahead = ahead


def check_step(wanted: str, device: torch.device, cache: CacheConfig | None = None) -> None:
    """Raise BackendError if a step is wanted where it cannot run whatever the model: before weights are read."""
    rule = None if cache is None else make_hold(cache)
    packed = cache is not None and cache.kv_bits is not None  # whose rules are asked between steps
    if rule is not None and not packed and wanted in ("compiled", "graph"):
        from .interval_step import is_cut_between

        if wanted == "graph" or not is_cut_between(rule):
            has = "holds by attention only" if wanted == "graph" else ONLY_ATTENTION
            raise BackendError(f"step {wanted} {has}: leave the option step out, or the option hold_by")
    if wanted == "graph" and device.type != "cuda":
        raise BackendError(f"step graph needs a CUDA device, this is {device.type}: leave the option step out")
    if wanted == "compiled":
        if device.type != "cpu":
            raise BackendError(ON_CPU)
        if importlib.util.find_spec("numba") is None:
            raise BackendError(NO_NUMBA)


def make_graph_step(
    decoder: Decoder,
    attention: Attention,
    wanted: str,
    make_ahead: Callable[[], Ahead],
    rule: HoldRule | None = None,
) -> GraphStep | None:
    """The step "graph", which "auto" takes on a CUDA device; None where another one is to be made.

    Raises BackendError where "graph" is wanted and cannot be; "auto" says once why it takes another one.
    """
    if wanted != "graph" and (wanted != "auto" or decoder.device.type != "cuda"):
        return None
    check_step("graph", decoder.device)
    try:
        if not attention.ragged:
            raise BackendError(f"a graph's attention reads lengths on the device, {attention.name} does not")
        return GraphStep(decoder, attention, make_ahead(), rule)
    except BackendError as error:
        if wanted == "graph":
            raise
        log.warning("decoding is launched kernel by kernel, slower than as a graph: %s", error)
    return None


def make_step(
    decoder: Decoder,
    kv_dtype: torch.dtype,
    wanted: str,
    threads: int,
    attention: Attention | None = None,
    rule: HoldRule | None = None,
    kv_bits: int | None = None,
) -> Step:
    """The step of a name: "compiled", which raises BackendError where it cannot run, "eager" (plain torch), or "auto",
    which says once why it falls back to torch. The compiled step has an attention of its own: with another backend than
    sdpa it is not taken, or refused. So with a hold rule `rule` (None: grow, or hold by attention) that looks at every
    step, which only plain torch has. kv_bits: of packed rows, None where nothing is packed."""
    attention = attention or Sdpa()
    if wanted == "auto" and attention.name != Sdpa.name:
        wanted = "eager"
    if wanted != "eager":
        from .compiled import CompiledStep
        from .interval_step import IntervalStep, is_cut_between

        try:
            if rule is not None and not is_cut_between(rule):
                raise BackendError(f"the compiled step {ONLY_ATTENTION}")
            if attention.name != Sdpa.name:
                raise BackendError(f"the compiled step has its own attention: leave {attention.name} out, or step")
            step = CompiledStep(decoder, kv_dtype, threads, kv_bits=kv_bits)
            return step if rule is None else IntervalStep(step, decoder, rule)
        except BackendError as error:
            if wanted == "compiled":
                raise
            if decoder.device.type == "cpu":
                log.warning("decoding runs in plain torch, several times slower: %s", error)
    return EagerStep(decoder, attention, rule)


class BatchStep(Protocol):
    """Feeds a token to each of n sequences that share a store and gives their next logits, fp32 `[n, vocab]`.

    `arenas` are members of `shared`: their rows stand in its tables `[batch, layers, kv_heads]`, in absolute slots.
    """

    def __call__(
        self, shared: SharedArena, arenas: list[Arena], sequences: list[Sequence], tokens: list[int], *, window: int
    ) -> Tensor: ...


class EagerBatchStep:
    """`decode.batch_step` of one decoder: every matrix meets all tokens together."""

    def __init__(self, decoder: Decoder, attention: Attention, rule: HoldRule | None = None) -> None:
        self._decoder, self._attention, self._rule = decoder, attention, rule

    def __call__(
        self, shared: SharedArena, arenas: list[Arena], sequences: list[Sequence], tokens: list[int], *, window: int
    ) -> Tensor:
        return decode.batch_step(
            self._decoder,
            arenas,
            sequences,
            tokens,
            window=window,
            attention=self._attention,
            rules=[self._rule] * len(tokens),
        )


class CompiledBatchStep:
    """The compiled step for all at once: what it gives is bit for bit what each would get alone."""

    def __init__(self, step: CompiledStep | IntervalStep) -> None:
        self._step = step

    def __call__(
        self, shared: SharedArena, arenas: list[Arena], sequences: list[Sequence], tokens: list[int], *, window: int
    ) -> Tensor:
        return self._step.batch(arenas, sequences, tokens, window=window)


def make_batch_step(decoder: Decoder, step: Step) -> BatchStep:
    """The batch's counterpart of the step that one sequence would have."""
    if isinstance(step, EagerStep):
        return EagerBatchStep(decoder, step.attention, step.rule)
    from .compiled import CompiledStep
    from .interval_step import IntervalStep

    assert isinstance(step, (CompiledStep, IntervalStep))
    return CompiledBatchStep(step)
