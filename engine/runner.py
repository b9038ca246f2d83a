"""The runner: token ids in, token ids out. It owns the decoder, the arena, and which sequence's rows are in it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ..cache.arena import Arena
from ..cache.budget import check_budget
from ..cache.config import CacheConfig
from ..cache.layout import ArenaLayout, ArenaSize
from ..cache.policies import make_hold, make_policy
from ..cache.policies.base import Policy, PolicyModel
from ..cache.tuned import Tuned
from ..cache.view import WindowPass
from ..errors import BackendError, CakeError, OptionError, PromptError
from ..models.decoder import Decoder
from ..models.rope import Rotary
from . import precision, prefill
from .attention import choose_attention
from .attention.choose import Setting
from .generation import GenerationConfig
from .graph import Ahead, Seat
from .holding import start_rule
from .memory import first_budget
from .picker import Picker, Token
from .sequence import Checkpoint, QueryRing, Sequence
from .stepper import BatchStep, GraphStep, OnWait, Step, make_batch_step, make_graph_step, make_step
from .tenancy import Tenancy
from .window import make_window_pass

log = logging.getLogger(__name__)

__all__ = ["Fit", "OnChunk", "Runner", "Timing", "Token", "room_for_reply"]

OnChunk = Callable[[int, int, int], None]


@dataclass
class Timing:
    """What one reply took, filled in while it runs."""

    prompt_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    decode_steps: int = 0
    lengths: tuple[tuple[int, ...], ...] = ()  # kept tokens per layer and KV head after the prefill
    total: int = 0  # true tokens after the prefill
    finished_by: int | None = None  # the end token that the reply ended with, if it did


@dataclass(frozen=True)
class Fit:
    """What a piece and its reply will have: new tokens at most, budget, frequencies, and the arena they need."""

    new_tokens: int
    budget: int | None
    rotary: Rotary
    size: ArenaSize


class Runner:
    """Runs sequences over one decoder and one arena. The rows of one sequence, the active one, are in the arena."""

    def __init__(
        self,
        decoder: Decoder,
        cache: CacheConfig,
        *,
        context: int,
        chunk: int,
        valid_ids: int | None = None,
        unused_ids: tuple[int, ...] = (),
        kv_dtype: torch.dtype | None = None,
        step: str = "auto",
        threads: int = 1,
        attention: str = "auto",
        tuned: tuple[Tuned, ...] = (),
        separators: Callable[[], frozenset[int]] | None = None,
    ) -> None:
        config = decoder.config
        self.decoder, self.cache, self.context, self.chunk, self.valid_ids = decoder, cache, context, chunk, valid_ids
        self.layout = ArenaLayout(
            config.num_layers,
            config.num_kv_heads,
            config.head_dim,
            kv_dtype or precision.kv_dtype(cache, decoder.dtype, decoder.compute_dtype),
            decoder.product_dtype,
        )
        # rows of the head below `valid_ids` that no token has: like the padding behind them, never to be chosen
        self.unused = torch.tensor(unused_ids, device=decoder.device) if unused_ids else None
        self._wanted_step, self._threads = step, threads
        # what torch is set to for a prefill; a thread that looks while another one samples would see 1
        self._cpu_threads = torch.get_num_threads() if decoder.device.type == "cpu" else None
        self.model = PolicyModel(config.model_type, config.num_layers, config.hidden_size, config.vocab_size, tuned)
        self._policies: dict[int | None, Policy] = {}
        self._find_separators = separators
        self.tenancy = Tenancy(
            self.layout, decoder.device, hold=cache.spare, late=cache.late, kv_memory=cache.kv_memory
        )
        self.rule = make_hold(cache)
        dtypes = {decoder.compute_dtype, self.layout.kv_dtype, self.layout.staging_dtype}
        self.attention = choose_attention(attention, Setting.of(config, cache, decoder.device, dtypes))
        self._lock = threading.RLock()  # steps of concurrent callers queue, each on its own sequence
        self._busy = False
        self._flyer: object = None  # who decodes ahead at the moment, if anybody does

    # -- sequences ----------------------------------------------------------------------------------------------------

    def policy(self, budget: int | None) -> Policy:
        """The policy for a budget in tokens, made once: one may read a file."""
        if budget not in self._policies:
            self._policies[budget] = make_policy(self.cache, self.model, budget or 0)
        return self._policies[budget]

    @cached_property
    def separators(self) -> frozenset[int]:
        """Ids of tokens that end a clause or a line; asked for by few policies. Raises OptionError without a text."""
        if self._find_separators is None:
            raise OptionError(
                "this policy reads punctuation, and the model came without a tokenizer: choose another one"
            )
        return self._find_separators()

    @property
    def hold(self) -> bool:
        return self.cache.decode_policy == "hold"

    def prepare(self, sequence: Sequence, tokens: int, new_tokens: int, *, conversation: bool = False) -> int:
        """Check that a piece and its reply fit, fix budget and frequencies, and make room. Returns the new-token limit.

        conversation: further pieces will follow. Raises PromptError with both numbers if the text is too long, before
        anything is changed.
        """
        limit = self.tenancy.allowed
        fit = self.fit(sequence, tokens, new_tokens, conversation=conversation, limit=limit)
        if not self.tenancy.is_active(sequence):  # made once, in its final size
            self.tenancy.set_aside()
            self.tenancy.make(fit.size)
        self.tenancy.activate(sequence)
        self.tenancy.reserve(sequence, fit.budget, tokens, fit.new_tokens)
        self.accept(sequence, fit)
        return fit.new_tokens

    def fit(
        self,
        sequence: Sequence,
        tokens: int,
        new_tokens: int,
        *,
        conversation: bool = False,
        limit: int | None = None,
    ) -> Fit:
        """What feeding a piece and writing its reply would settle; changes nothing.

        limit: bytes of KV memory that it may take, None for any. Raises PromptError with both numbers if the text is
        empty, too long or would need other frequencies than those it was begun with.
        """
        if sequence.spoilt:
            raise CakeError("this sequence is being read, or was broken off: its rows mean nothing")
        first, total = sequence.total, sequence.total + tokens
        new_tokens = room_for_reply(total if tokens else 0, new_tokens, self.context)
        budget = sequence.budget
        if first == 0 and budget is None:
            context = self.context if conversation else None
            budget = first_budget(self.decoder.config, self.cache, self.layout, total, new_tokens, context=context)
        rotary = self.rotary(total + new_tokens)
        if sequence.rotary is not None and rotary.key != sequence.rotary.key:
            raise PromptError(
                f"with {total + new_tokens:,} tokens this model turns its keys by other frequencies than those in the "
                "cache: read the whole text anew"
            )
        if budget is not None:
            window = self.cache.window
            check_budget(budget, window)
            budget = self.tenancy.affordable(sequence, budget, tokens, new_tokens, window=window, limit=limit)
        return Fit(new_tokens, budget, rotary, self.tenancy.size_for(sequence, budget, tokens, new_tokens))

    def accept(self, sequence: Sequence, fit: Fit) -> None:
        """Give a sequence what was found to fit it."""
        sequence.budget, sequence.rotary = fit.budget, sequence.rotary or fit.rotary
        if sequence.ring is None and fit.budget is not None:
            config = self.decoder.config
            sequence.ring = QueryRing(
                config.num_layers,
                self.cache.window,
                config.num_heads,
                config.head_dim,
                self.decoder.compute_dtype,
                self.decoder.device,
            )

    def rotary(self, length: int) -> Rotary:
        """The frequencies for a text that will have `length` tokens (dynamic and longrope choose by it, once)."""
        return Rotary(self.decoder.config.rope, length, self.decoder.device)

    @cached_property
    def _window_pass(self) -> WindowPass | None:
        """The compiled pass over the window's attention, where decode steps are compiled too."""
        if self.decoder.device.type != "cpu" or self._wanted_step == "eager":
            return None
        return make_window_pass(self._threads)

    @cached_property
    def step(self) -> Step:
        """What makes the decode steps; looked for when the first one is due."""
        graph = make_graph_step(self.decoder, self.attention, self._wanted_step, self.make_ahead)
        return graph or make_step(
            self.decoder, self.layout.kv_dtype, self._wanted_step, self._threads, self.attention, self.rule
        )

    def make_ahead(self) -> Ahead:
        """What decodes ahead with this model and cache. Raises BackendError where it cannot."""
        if self.rule is not None:
            raise BackendError("a graph has no form of hold_by but for attention")
        return Ahead(
            self.decoder,
            self.attention,
            window=self.cache.window,
            hold=self.hold,
            valid=self.valid_ids,
            unused=self.unused,
        )

    @property
    def ahead(self) -> Ahead | None:
        """What decodes ahead, where the step is a graph."""
        return self.step.ahead if isinstance(self.step, GraphStep) else None

    @cached_property
    def batch_step(self) -> BatchStep:
        """What makes the decode steps of several sequences together."""
        return make_batch_step(self.decoder, self.step)

    def _without_unused(self, logits: Tensor) -> Tensor:
        return logits if self.unused is None else logits.index_fill(-1, self.unused, float("-inf"))

    @contextmanager
    def one_thread(self) -> Iterator[None]:
        """torch works in the calling thread alone: a row of logits needs no other, and torch's would spin on beside
        those of the next step. `feed` asks for all of them again."""
        if self._cpu_threads is None:
            yield
            return
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(self._cpu_threads)

    @contextmanager
    def _whole(self, sequence: Sequence) -> Iterator[None]:
        """Mark the sequence as spoilt if what runs inside does not come to its end."""
        assert not sequence.spoilt, "a spoilt sequence was continued"
        sequence.spoilt = True
        with self.busy():
            yield
        sequence.spoilt = False

    @contextmanager
    def busy(self) -> Iterator[None]:
        """What runs inside may call back to a caller, who cannot have the engine meanwhile."""
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    @contextmanager
    def alone(self, flyer: object = None) -> Iterator[None]:
        """Wait until no other thread has the arena. A callback of a piece that is being read cannot have it either.

        What decodes ahead is landed first, so that rows and tables agree, unless it is the `flyer` itself who asks.
        """
        with self._lock:
            if self._busy:
                raise CakeError("the engine is reading a text: call it again when on_progress has returned")
            if self._flyer is not None and self._flyer is not flyer:
                self.land()
            yield

    def fly(self, flyer: object) -> Ahead:
        """What decodes ahead, for a flyer that is `alone`: until somebody else is, it need not be landed."""
        assert self.ahead is not None
        self._flyer = flyer
        return self.ahead

    def land(self) -> None:
        """Undo what has been decoded ahead, if anything was."""
        if self._flyer is not None and self.ahead is not None:
            self.ahead.land()
        self._flyer = None

    # -- running ------------------------------------------------------------------------------------------------------

    def generate(
        self,
        sequence: Sequence,
        ids: list[int],
        generation: GenerationConfig,
        *,
        stop_ids: frozenset[int] = frozenset(),
        on_chunk: OnChunk | None = None,
        on_wait: OnWait | None = None,
        timing: Timing | None = None,
        conversation: bool = False,
    ) -> Generator[Token, None, None]:
        """Feed `ids` to a sequence and yield the reply's tokens one by one; `generation` is resolved.

        The last token that is yielded has not been fed. The reply ends with a stop token ("stop"), with max_new_tokens,
        or where the model's context ends ("length"). The repetition penalty counts all of the sequence's ids as prompt.
        """
        timing = timing or Timing()
        with self.alone():
            limit = self.prepare(sequence, len(ids), generation.max_new_tokens or 0, conversation=conversation)
            started = time.perf_counter()
            with self._whole(sequence):
                logits = self.feed(sequence, ids, limit, on_chunk=on_chunk)
            timing.prompt_tokens, timing.prefill_s = len(ids), time.perf_counter() - started
            timing.total = sequence.total
            timing.lengths = tuple(tuple(int(n) for n in row) for row in self.tenancy.arena.length)
            picker = self.picker(sequence, generation, limit, stop_ids)
            if limit > 1:
                self.step.prepare(self.tenancy.arena, sequence, window=self.cache.window, on_wait=on_wait)
                if self.ahead is not None:
                    self._prepare_ahead(sequence, picker)
        for _ in range(limit):
            started = time.perf_counter()
            with self.one_thread():
                token = picker.pick(logits)
            timing.decode_s += time.perf_counter() - started
            if token.finish_reason == "stop":
                timing.finished_by = token.id
            yield token
            if token.finish_reason:
                return
            if self.ahead is not None:
                yield from self._ahead_of(Seat(sequence, picker, token.id), timing)
                return
            started = time.perf_counter()
            with self.alone():
                self.tenancy.activate(sequence)
                with self._whole(sequence), torch.inference_mode():
                    logits = self.step(self.tenancy.arena, sequence, token.id, window=self.cache.window)
            timing.decode_s += time.perf_counter() - started
            timing.decode_steps += 1

    def _prepare_ahead(self, sequence: Sequence, picker: Picker) -> None:
        """Capture the step before the reply begins; the token is not fed."""
        assert self.ahead is not None
        seat = Seat(sequence, picker, 0, self.tenancy.arena)
        self.ahead.prepare(seat)
        self.ahead.leave(seat)

    def _ahead_of(self, seat: Seat, timing: Timing) -> Generator[Token, None, None]:
        """The reply's further tokens, each while the device is at work on the next one. See `Ahead`."""
        sequence, picker = seat.sequence, seat.picker
        try:
            while True:
                started = time.perf_counter()
                with self.alone(seat):
                    self.tenancy.activate(sequence)
                    seat.arena = self.tenancy.arena
                    with self._whole(sequence):
                        (chosen,) = self.fly(seat).advance([seat])
                    token = picker.accept(chosen.token, chosen.logits)
                timing.decode_s += time.perf_counter() - started
                timing.decode_steps += 1
                if token.finish_reason == "stop":
                    timing.finished_by = token.id
                yield token
                if token.finish_reason:
                    return
        finally:
            with self._lock:
                if self._flyer is seat:
                    self._flyer = None
                    self._end_flight(sequence)

    def _end_flight(self, sequence: Sequence) -> None:
        assert self.ahead is not None
        if sequence.spoilt:
            self.ahead.abandon()
        else:
            self.ahead.land()

    def picker(self, sequence: Sequence, generation: GenerationConfig, limit: int, stop_ids: frozenset[int]) -> Picker:
        """What chooses a reply's tokens; all of the sequence's ids so far count as its prompt."""
        return Picker(
            generation,
            limit,
            stop_ids=stop_ids,
            prompt_ids=sequence.ids,
            vocab_size=self.decoder.config.vocab_size,
            valid=self.valid_ids,
            unused=self.unused,
            device=self.decoder.device,
        )

    @torch.inference_mode()
    def feed(self, sequence: Sequence, ids: list[int], new_tokens: int, *, on_chunk: OnChunk | None = None) -> Tensor:
        """Read a piece and make room for a reply. Returns the next token's logits fp32 `[vocab]`. See `prepare`."""
        self.all_threads()
        return prefill.read_through(self.reading(self.tenancy.arena, sequence, ids, new_tokens), on_chunk)

    def all_threads(self) -> None:
        """Let torch use all the threads that a prefill should."""
        if self._cpu_threads is not None:
            torch.set_num_threads(self._cpu_threads)

    def reading(
        self,
        arena: Arena,
        sequence: Sequence,
        ids: list[int],
        new_tokens: int,
        *,
        observer: prefill.Observer | None = None,
    ) -> prefill.Reading[Tensor]:
        """Read a piece into an arena, pausing after each (layer, chunk), and make room for a reply there.

        Returns the next token's logits fp32 `[vocab]`. Goes on under `torch.inference_mode` only.
        """
        policy = self.policy(sequence.budget)
        needs = policy.needs if observer is None else policy.needs | observer.needs
        hidden = yield from prefill.reading(
            self.decoder,
            arena,
            sequence,
            torch.tensor(ids, device=self.decoder.device),
            policy=policy,
            window=self.cache.window,
            chunk=self.chunk,
            attention=self.attention,
            separators=self.separators if "separators" in needs else None,
            window_pass=self._window_pass,
            observer=observer,
        )
        length = arena.length
        headroom = np.full_like(length, new_tokens)
        sequence.limit = None
        if self.hold and (sequence.fixed or sequence.budget is not None):
            whole = sequence.budget is not None and sequence.total <= sequence.budget
            sequence.limit = np.full_like(length, sequence.budget) if whole else length.copy()
            headroom = np.minimum(sequence.limit - length + self.cache.spare, new_tokens + 1)
        arena.finish(headroom)
        if self.rule is not None and sequence.limit is not None:
            start_rule(arena, self.rule, goes_on="carried" in policy.needs)
        return self.decoder.logits(hidden)[0]

    def checkpoint(self, sequence: Sequence) -> Checkpoint:
        """A copy of everything that feeding the sequence may change."""
        with self.alone():
            return self.tenancy.checkpoint(sequence)

    def copy(self, sequence: Sequence) -> Sequence:
        """Another sequence of the same text, with rows of its own; the two can be continued in different ways."""
        with self.alone():
            return self.tenancy.copy(sequence)

    def restore(self, sequence: Sequence, saved: Checkpoint) -> None:
        """Bring a sequence back to a checkpoint of it, also one that is spoilt."""
        with self.alone():
            self.tenancy.restore(sequence, saved)

    def score(self, ids: list[int]) -> list[float]:
        """Log-likelihood of every token after the first, given those before; logits exist for one chunk at a time."""
        if len(ids) > self.context:
            raise PromptError(f"the text has {len(ids):,} tokens, but the model's context is {self.context:,}")
        never = set(range(self.valid_ids or self.decoder.config.vocab_size, self.decoder.config.vocab_size))
        never.update(self.unused.tolist() if self.unused is not None else ())
        if not never.isdisjoint(ids):
            raise PromptError(f"token id {min(never & {*ids})} is padding of the model's vocabulary: no text has it")
        with self.alone(), torch.inference_mode():
            return self._score(ids)

    def _score(self, ids: list[int]) -> list[float]:
        sequence = Sequence(rotary=self.rotary(len(ids)))
        self.tenancy.activate(sequence)
        self.tenancy.make(ArenaSize(0, len(ids) * self.layout.num_kv_heads, 0))
        tokens = torch.tensor(ids, device=self.decoder.device)
        hidden = prefill.read_all(
            self.decoder, self.tenancy.arena, sequence, tokens, chunk=self.chunk, attention=self.attention
        )
        result: list[float] = []
        rows = max(1, min(self.chunk, 64))
        for start in range(0, len(ids) - 1, rows):
            end = min(start + rows, len(ids) - 1)
            logits = self._without_unused(self.decoder.logits(hidden[start:end])[:, : self.valid_ids])
            chosen = logits.gather(1, tokens[start + 1 : end + 1, None])[:, 0]
            result += (chosen - torch.logsumexp(logits, dim=-1)).tolist()
        self.tenancy.arena.clear()
        return result


def room_for_reply(total: int, new_tokens: int, context: int) -> int:
    """How many of `new_tokens` fit behind a text of `total` tokens. Raises PromptError if it is empty or too long."""
    if total < 1:
        raise PromptError("the prompt is empty: there is no token to read")
    if total >= context:
        raise PromptError(
            f"the prompt has {total:,} tokens, but the model's context is {context:,} and a reply needs at least 1: "
            "shorten the prompt, or stretch the context with the option rope_scaling (KIND:FACTOR)"
        )
    return min(new_tokens, context - total)
