"""`Engine`: the facade that knows text. Below it, `runner.py` takes and yields token ids."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast, overload

import torch

from ..cache.config import CacheConfig
from ..errors import CakeError, OptionError, PromptError, TokenizerError
from ..models.chat_template import ChatTemplate
from ..models.config import ModelConfig
from ..models.tokenizer import Tokenizer
from ..ranges import COUNT
from .available import available_memory
from .chat import Chat
from .document import Document, compress, load_document, open_document, question_ids
from .encoding import prompt_ids
from .fitting import room_for_reply
from .generation import GenerationConfig, resolve_generation, with_options
from .loading import (
    cache_config,
    load_engine,
)
from .memory_limit import check_memory
from .options import EngineOptions
from .piece_memory import plan_reply
from .pieces import piece_size, prompt_pieces
from .piecewise import check_pieces
from .reply import OnProgress, reply
from .results import Piece, Result, collect
from .runner import Runner
from .saving import model_fingerprint
from .sequence import Sequence as TextSequence
from .together import generate_list

log = logging.getLogger(__name__)

Message = dict[str, str]
Prompt = str | list[Message] | list[int]  # of a list of prompts


class Engine:
    """One loaded model and one KV arena. Use `Engine.load`, and `close` it (or use it as a context manager).

    tokenizer: None for random weights without tokenizer files; template: None if the model has no chat template.
    config: the model's shape; model_path: the folder with the safetensors; context: the most tokens of a text.
    """

    def __init__(
        self,
        model_path: Path,
        config: ModelConfig,
        tokenizer: Tokenizer | None,
        template: ChatTemplate | None,
        *,
        cache: CacheConfig,
        context: int,
        chunk: int,
        device: torch.device,
        dtype: str | None,
        quant: str | None,
        defaults: dict[str, object],
        random_weights: bool = False,
        weights_seed: int = 0,
        step: str = "auto",
    ) -> None:
        self.model_path, self.config, self.tokenizer, self.template = model_path, config, tokenizer, template
        self.cache, self.context, self.chunk, self.device, self.dtype = cache, context, chunk, device, dtype
        self.quant, self.defaults, self.random_weights = quant, defaults, random_weights
        self.weights_seed, self.step = weights_seed, step
        self.load_s = 0.0
        self.one_prompt = False  # set by `before_weights` where no second one will follow
        self._runner: Runner | None = None

    # -- loading ------------------------------------------------------------------------------------------------------

    @classmethod
    def load(
        cls,
        model: str | Path,
        *,
        revision: str | None = None,
        cache: CacheConfig | None = None,
        dtype: str | None = None,
        device: str | None = None,
        threads: int | None = None,
        context: int | None = None,
        rope_scaling: str | None = None,
        chunk: int = 512,
        attention: str = "auto",
        step: str = "auto",
        quant: str | None = None,
        tuning: str = "auto",
        random_weights: bool = False,
        weights_seed: int = 0,
        on_progress: OnProgress | None = None,
        before_weights: Callable[[Engine], None] | None = None,
        **cache_options: Any,
    ) -> Engine:
        """Load a model from a folder, an alias or a hub id.

        cache: a CacheConfig, or give its fields as keywords (budget=1024, policy="cake", decode_policy="hold", ...).
        dtype: storage of the weights, default the checkpoint's; on a CPU they are multiplied in fp32.
        quant: "int8" or "int4" (CPU only) packs the weights, once, into the user's cache folder.
        threads: CPU threads, default one per core; set for the whole process's torch. step: what decodes, see
        `engine/stepper.py`. context: the most tokens of a text, default the model's own.
        tuning: "auto" uses the constants that `cake-infer tune` found for the model, "off" does not.
        random_weights: `model` is a config.json or its folder, and the values are random (for benchmarks).
        before_weights: called once config and tokenizer are there and before a weight is read; may raise.
        Raises CakeError's family, each with what to do.
        """
        return load_engine(
            cls,
            model,
            revision=revision,
            cache=cache_config(cache, cache_options),
            options=EngineOptions(dtype, device, threads, context, rope_scaling, chunk, attention, step, quant, tuning),
            random_weights=random_weights,
            weights_seed=weights_seed,
            on_progress=on_progress,
            before_weights=before_weights,
        )

    def check_room(
        self,
        prompt_tokens: int | None,
        config: GenerationConfig | None = None,
        *,
        conversation: bool = False,
        stream_prefill: int | None = None,
    ) -> None:
        """Compare what a one-shot run, or a conversation's second turn, needs with what there is.

        It needs no weights, only their headers.

        With `stream_prefill` for a prompt that is read in such pieces, of any length if that is None.

        Raises PromptError if the prompt does not fit the context and MemoryLimit if the run does not fit the memory;
        near the limit a warning is logged.
        """
        if prompt_tokens is not None:
            COUNT.check("prompt_tokens", prompt_tokens)
        wanted, piece = self._generation(config, {}).max_new_tokens or 0, piece_size(stream_prefill)
        plan = plan_reply(self, prompt_tokens, wanted, piece, conversation=conversation)
        check_memory(plan, available_memory(str(self.device)))

    @property
    def runner(self) -> Runner:
        """What runs token ids; raises if the engine has been closed."""
        if self._runner is None:
            raise CakeError("the engine is closed: load it again")
        return self._runner

    def close(self) -> None:
        """Free weights and arena. Safe to call twice."""
        self._runner = None

    def __enter__(self) -> Engine:
        _ = self.runner  # raises where the engine has been closed
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- text in, text out --------------------------------------------------------------------------------------------

    def stream(
        self,
        prompt: str | Iterator[str] | None = None,
        *,
        messages: list[Message] | None = None,
        ids: Sequence[int] | None = None,
        cache: Document | None = None,
        stream_prefill: bool | int | None = None,
        config: GenerationConfig | None = None,
        on_progress: OnProgress | None = None,
        **options: Any,
    ) -> Generator[Piece, None, None]:
        """Generate one reply piece by piece; the last piece carries the finish reason and the statistics.

        Give one of `prompt` (a plain text, continued as it stands), `messages` (rendered by the model's chat template)
        and `ids`. With `cache` the prompt, a text or ids, is a question behind a document that `compress` has read.
        `stream_prefill` (tokens of a piece, True for 2,048) reads the prompt in pieces, each evicted from before the
        next is read: memory is that of a piece, and attention linear in the text. Then the prompt, or the last
        message's content, may also be an iterator of texts, such as an open file, which is read as it comes.
        Options are the fields of GenerationConfig, as keywords or in `config`. Closing the iterator early ends the
        reply and frees its rows. Wrong input raises here, not at the first piece; of a text that comes, when it comes.
        """
        _ = self.runner
        generation = self._generation(config, options)
        if (size := piece_size(stream_prefill)) is not None:
            pieces = prompt_pieces(self, prompt, messages, ids, cache, size)
            check_pieces(self.runner, pieces, generation.max_new_tokens or 0)
            return reply(self, TextSequence(), pieces, generation, on_progress=on_progress)
        prompt_ids = self.encode(cast("str | None", prompt), messages=messages, ids=ids, cache=cache)
        before = 0 if cache is None else cache.tokens
        room_for_reply(before + len(prompt_ids), generation.max_new_tokens or 0, self.context)
        sequence = TextSequence() if cache is None else open_document(self, cache)
        return reply(self, sequence, prompt_ids, generation, on_progress=on_progress)

    @overload
    def generate(self, prompt: list[Prompt], **options: Any) -> list[Result]: ...
    @overload
    def generate(self, prompt: str | Iterator[str] | None = None, **options: Any) -> Result: ...
    def generate(
        self, prompt: str | Iterator[str] | list[Prompt] | None = None, **options: Any
    ) -> Result | list[Result]:
        """Generate a whole reply; see `stream` for the arguments.

        A list of prompts gives a list of results. Each prompt is a text, a list of messages or a list of ids; `config`
        may be a list too, one for each; `batch` is how many are decoded together at most (16, and what memory has room
        for). Each reply is the one that its prompt would get alone. Of questions to a document (`cache`), texts or
        ids, each has a copy of its rows while it is answered; a result's `prompt_ids` are what was fed behind it.
        """
        if isinstance(prompt, list):
            if options.pop("messages", None) is not None or options.pop("ids", None) is not None:
                raise OptionError("give exactly one of a prompt text, messages and ids")
            return generate_list(self, prompt, **options)
        if "batch" in options:
            raise OptionError("batch says how many of a list of prompts are decoded together: there is one prompt")
        cache: Document | None = options.get("cache")
        if cache is None and piece_size(options.get("stream_prefill")) is not None:
            return collect(self.stream(prompt, **options), [])
        messages, ids = options.pop("messages", None), options.pop("ids", None)
        fed = self.encode(cast("str | None", prompt), messages=messages, ids=ids, cache=cache)
        return collect(self.stream(ids=fed, **options), fed)

    def chat(self, system: str | None = None, *, stream_prefill: bool | int | None = None) -> Chat:
        """A conversation over the budget: each turn reads only what is new, in pieces where `stream_prefill` is given
        and it is longer. See `engine/chat.py`."""
        _ = self.runner
        return Chat(self, system, stream_prefill=stream_prefill)

    def compress(
        self,
        text: str | None = None,
        *,
        messages: list[Message] | None = None,
        ids: Sequence[int] | None = None,
        policy: str | None = None,
        stream_prefill: bool | int | None = None,
        on_progress: OnProgress | None = None,
    ) -> Document:
        """Read a document once, evicting as it is read; `stream` and `generate` answer behind it with `cache=`.

        A text is continued by the question as it stands. Of messages the last is the user's and has the document: a
        question joins it after a blank line, and the template does the rest. Ids are continued by ids, or by a text.
        What is kept is chosen without the question: what it would have wanted may be gone. `policy` chooses; without it
        that is what the engine was told to use, and where it was told nothing `document`, which loses least there
        (docs/methods.md). `stream_prefill` reads it in pieces, see `stream`.
        """
        return compress(self, text, messages, ids, policy, on_progress, piece_size(stream_prefill))

    def load_document(self, path: str | Path) -> Document:
        """A document that `Document.save` has written. Raises SnapshotError for a file that cannot be gone on from."""
        return load_document(self, path)

    @cached_property
    def fingerprint(self) -> str:
        """What tells this model from others, from its weight files; see `engine/saving.py`."""
        return model_fingerprint(self)

    def score(self, text: str | Sequence[int]) -> list[float]:
        """Natural log-likelihood of every token after the first, given all before it (nothing is evicted)."""
        ids = self.encode(text) if isinstance(text, str) else self.encode(ids=text)
        return self.runner.score(ids)

    def encode(
        self,
        prompt: str | None = None,
        *,
        messages: list[Message] | None = None,
        ids: Sequence[int] | None = None,
        cache: Document | None = None,
    ) -> list[int]:
        """The ids that `stream` would read. Raises PromptError for an empty, undecodable or ill-formed prompt."""
        if cache is not None:
            return question_ids(self, cache, prompt, messages, ids)
        return prompt_ids(self, prompt, messages, ids)

    def text_tokenizer(self) -> Tokenizer:
        """The tokenizer; raises TokenizerError if the model came without one."""
        if self.tokenizer is None:
            raise TokenizerError(f"{self.model_path} has no tokenizer: give token ids")
        return self.tokenizer

    def chat_template(self) -> ChatTemplate:
        """The chat template; raises PromptError if the model has none."""
        self.text_tokenizer()
        if self.template is None:
            raise PromptError(f"{self.model_path} has no chat template: give plain text instead")
        return self.template

    def resolved(self, config: GenerationConfig | None = None, **options: Any) -> GenerationConfig:
        """Options with every `None` filled in, from the model's own defaults; without a seed one is drawn."""
        return self._generation(config, options)

    def _generation(self, config: GenerationConfig | None, options: dict[str, Any]) -> GenerationConfig:
        """The caller's options over the model's own defaults."""
        config = with_options(config, options)
        if config.stop:
            self.text_tokenizer()
        return resolve_generation(config, self.defaults)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Every id that ends a reply: of config.json, generation_config.json and the tokenizer."""
        own = self.tokenizer.eos_ids if self.tokenizer is not None else ()
        return frozenset(self.config.eos_token_ids) | frozenset(own)
