"""The runner: token ids in, token ids out. It owns the decoder, the arena, and which sequence's rows are in it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from functools import cached_property

import torch
from torch import Tensor

from ..cache.arena import Arena
from ..cache.config import CacheConfig
from ..cache.policies import make_hold, make_policy
from ..cache.policies.base import Policy
from ..cache.tuned import Tuned
from ..cache.view import WindowPass
from ..errors import BackendError, OptionError
from ..models.decoder import Decoder
from ..models.rope import Rotary
from . import precision, prefill
from .access import Access
from .attention import Sdpa, choose_attention
from .attention.choose import Setting
from .fitting import Fit, fit_piece
from .generation import GenerationConfig
from .graph import Ahead
from .headroom import make_room
from .picker import Picker, Token
from .piece_reading import reading_of
from .pieces import Pieces
from .piecewise import OnTokens
from .recascade import RecascadingStep
from .scoring import score_tokens
from .seat import Seat
from .sequence import Checkpoint, QueryRing, Sequence
from .short import ShortPieces, make_short_pieces
from .stepper import BatchStep, GraphStep, OnWait, Step, make_batch_step, make_graph_step, make_step
from .tenancy import Tenancy
from .timing import Timing
from .token_stream import OnChunk, stream_tokens
from .torch_threads import TorchThreads
from .tuning import policy_model
from .window import make_window_pass

log = logging.getLogger(__name__)


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
        one_prompt: bool = False,
    ) -> None:
        config = decoder.config
        self.decoder, self.cache, self.context, self.chunk, self.valid_ids = decoder, cache, context, chunk, valid_ids
        kept = kv_dtype or precision.kv_dtype(cache, decoder.dtype, decoder.compute_dtype)
        self.layout = precision.arena_layout(config, cache, kept, decoder.product_dtype)
        # rows of the head below `valid_ids` that no token has: like the padding behind them, never to be chosen
        self.unused = torch.tensor(unused_ids, device=decoder.device) if unused_ids else None
        self._wanted_step, self._threads = step, threads
        self._one_prompt = one_prompt  # nothing is loaded to read others faster
        self.torch_threads = TorchThreads(decoder.device)
        self.model = policy_model(config, tuned)
        self._policies: dict[int | None, Policy] = {}
        self._find_separators = separators
        self.tenancy = Tenancy(
            self.layout, decoder.device, hold=cache.spare, late=cache.late, kv_memory=cache.kv_memory
        )
        self.rule = make_hold(cache)
        dtypes = {decoder.compute_dtype, self.layout.kv_dtype, self.layout.staging_dtype}
        self.attention = choose_attention(attention, Setting.of(config, cache, decoder.device, dtypes))
        self.access = Access(self._end_flight)  # steps of concurrent callers queue, each on its own sequence

    # -- sequences ----------------------------------------------------------------------------------------------------

    def policy(self, budget: int | None) -> Policy:
        """The policy for a budget in tokens, made once: one may read a file."""
        if budget not in self._policies:
            self._policies[budget] = make_policy(self.cache, self.model, budget or 0)
        return self._policies[budget]

    def policy_of(self, sequence: Sequence) -> Policy:
        """What evicts of a sequence: its own policy, or the engine's for its budget."""
        return sequence.policy or self.policy(sequence.budget)

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
        """What feeding a piece and writing its reply would settle, see `fit_piece`."""
        return fit_piece(self, sequence, tokens, new_tokens, conversation=conversation, limit=limit)

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
    def window_pass(self) -> WindowPass | None:
        """The compiled pass over the window's attention, where decode steps are compiled too."""
        if self.decoder.device.type != "cpu" or self._wanted_step == "eager":
            return None
        return make_window_pass(self._threads)

    @cached_property
    def short(self) -> ShortPieces | None:
        """What works short pieces in compiled code, where decode steps are compiled too."""
        if self._one_prompt or self._wanted_step == "eager" or self.attention.name != Sdpa.name:
            return None
        return make_short_pieces(self.decoder, self._threads, self.layout.staging_dtype)

    @cached_property
    def step(self) -> Step:
        """What makes the decode steps; looked for when the first one is due."""
        graph = make_graph_step(self.decoder, self.attention, self._wanted_step, self.make_ahead, self.rule)
        if graph is not None:
            return graph
        step = make_step(
            self.decoder,
            self.layout.kv_dtype,
            self._wanted_step,
            self._threads,
            self.attention,
            self.rule,
            self.layout.kv_bits,
        )
        every = self.cache.recascade
        return step if every is None else RecascadingStep(step, self.decoder, self.policy, every, self.cache.spare)

    def make_ahead(self) -> Ahead:
        """What decodes ahead with this model and cache. Raises BackendError where it cannot."""
        packed = self.layout.kv_bits is not None
        if (self.rule is not None and not packed) or self.cache.recascade is not None:
            raise BackendError(
                "a graph has no form of hold but by attention at every step, nor of the option recascade"
            )
        return Ahead(
            self.decoder,
            self.attention,
            window=self.cache.window,
            hold=self.hold and not packed,
            valid=self.valid_ids,
            unused=self.unused,
            rule=self.rule,
        )

    @property
    def ahead(self) -> Ahead | None:
        """What decodes ahead, where the step is a graph."""
        return self.step.ahead if isinstance(self.step, GraphStep) else None

    @cached_property
    def batch_step(self) -> BatchStep:
        """What makes the decode steps of several sequences together."""
        return make_batch_step(self.decoder, self.step)

    def without_unused(self, logits: Tensor) -> Tensor:
        return logits if self.unused is None else logits.index_fill(-1, self.unused, float("-inf"))

    def fly(self, flyer: object) -> Ahead:
        """What decodes ahead, for a flyer that is `alone`: until somebody else is, it need not be landed."""
        assert self.ahead is not None
        self.access.flyer = flyer
        return self.ahead

    def _end_flight(self, flyer: object) -> None:
        if self.ahead is None:
            return
        if isinstance(flyer, Seat) and flyer.sequence.spoilt:
            self.ahead.abandon()
        else:
            self.ahead.land()

    # -- running ------------------------------------------------------------------------------------------------------

    def generate(
        self,
        sequence: Sequence,
        ids: list[int] | Pieces,
        generation: GenerationConfig,
        *,
        stop_ids: frozenset[int] = frozenset(),
        on_chunk: OnChunk | None = None,
        on_tokens: OnTokens | None = None,
        on_wait: OnWait | None = None,
        timing: Timing | None = None,
        conversation: bool = False,
    ) -> Generator[Token, None, None]:
        """Feed `ids` to a sequence and yield the reply's tokens one by one, see `stream_tokens`."""
        return stream_tokens(
            self,
            sequence,
            ids,
            generation,
            stop_ids=stop_ids,
            on_chunk=on_chunk,
            on_tokens=on_tokens,
            on_wait=on_wait,
            timing=timing or Timing(),
            conversation=conversation,
        )

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
        self.torch_threads.all()
        return prefill.read_through(self.reading(self.tenancy.arena, sequence, ids, new_tokens), on_chunk)

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
        return reading_of(self, arena, sequence, ids, new_tokens, observer)

    def make_room(self, arena: Arena, sequence: Sequence, new_tokens: int) -> None:
        """Room for a reply behind a text that has been read, see `headroom`."""
        carried = "carried" in self.policy_of(sequence).needs
        make_room(arena, sequence, new_tokens, self.cache, self.rule, carried=carried)

    def checkpoint(self, sequence: Sequence) -> Checkpoint:
        """A copy of everything that feeding the sequence may change."""
        with self.access.alone():
            return self.tenancy.checkpoint(sequence)

    def copy(self, sequence: Sequence) -> Sequence:
        """Another sequence of the same text, with rows of its own; the two can be continued in different ways."""
        with self.access.alone():
            return self.tenancy.copy(sequence)

    def restore(self, sequence: Sequence, saved: Checkpoint) -> None:
        """Bring a sequence back to a checkpoint of it, also one that is spoilt."""
        with self.access.alone():
            self.tenancy.restore(sequence, saved)

    def score(self, ids: list[int]) -> list[float]:
        """Log-likelihood of every token after the first, given those before. Raises PromptError, see `score_tokens`."""
        return score_tokens(self, ids)
