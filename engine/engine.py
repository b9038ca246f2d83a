"""`Engine`: the facade that knows text. Below it, `runner.py` takes and yields token ids."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, overload

import torch

from ..cache.config import CacheConfig
from ..errors import BackendError, CakeError, OptionError, PromptError, TokenizerError
from ..models.chat_template import ChatTemplate
from ..models.config import ModelConfig, read_config, with_rope_scaling
from ..models.decoder import Decoder
from ..models.hub import resolve_model
from ..models.tokenizer import Tokenizer
from ..models.weights import load_decoder, random_decoder
from .chat import Chat
from .generation import GenerationConfig, resolve_generation
from .loading import choose_device, context_limit, generation_defaults, load_tokenizer
from .memory import available_memory, check_memory, plan_run, weights_of
from .reply import OnProgress, reply
from .results import Piece, Progress, Result, TokenLogprobs
from .runner import Runner, room_for_reply
from .sequence import Sequence as TextSequence
from .text import check_text

log = logging.getLogger(__name__)

Message = dict[str, str]
ATTENTION = ("auto", "sdpa")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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
        defaults: dict[str, object],
        random_weights: bool = False,
    ) -> None:
        self.model_path, self.config, self.tokenizer, self.template = model_path, config, tokenizer, template
        self.cache, self.context, self.chunk, self.device, self.dtype = cache, context, chunk, device, dtype
        self.defaults, self.random_weights = defaults, random_weights
        self.load_s = 0.0
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
        random_weights: bool = False,
        weights_seed: int = 0,
        on_progress: OnProgress | None = None,
        before_weights: Callable[[Engine], None] | None = None,
        **cache_options: Any,
    ) -> Engine:
        """Load a model from a folder, an alias or a hub id.

        cache: a CacheConfig, or give its fields as keywords (budget=1024, policy="cake", decode_policy="hold", ...).
        dtype: storage of the weights, default the checkpoint's; on a CPU they are multiplied in fp32.
        threads: CPU threads of this process's torch. context: the most tokens of a text, default the model's own.
        random_weights: `model` is a config.json or its folder, and the values are random (for benchmarks).
        before_weights: called once config and tokenizer are there and before a weight is read; may raise.
        Raises CakeError's family, each with what to do.
        """
        started = time.perf_counter()
        cache = _cache_config(cache, cache_options)
        if attention not in ATTENTION:
            raise BackendError(
                f"there is no attention backend {attention!r} here: choose one of {', '.join(ATTENTION)}"
            )
        if chunk < 1:
            raise OptionError(f"chunk must be at least 1 token, not {chunk}")
        if dtype is not None and dtype not in DTYPES:
            raise OptionError(f"unknown dtype {dtype!r}: choose one of {', '.join(DTYPES)}")
        target = choose_device(device)
        if threads is not None:
            torch.set_num_threads(threads)
        report = _stage_reporter(on_progress)
        path = Path(model) if random_weights else resolve_model(str(model), revision=revision, on_progress=report)
        if random_weights and path.is_file():
            path = path.parent
        config = read_config(path)
        if rope_scaling is not None:
            config = with_rope_scaling(config, rope_scaling)
        engine = cls(
            path,
            config,
            tokenizer := load_tokenizer(path, config, optional=random_weights),
            ChatTemplate.load(path, tokenizer) if tokenizer is not None else None,
            cache=cache,
            context=context_limit(context, config),
            chunk=chunk,
            device=target,
            dtype=dtype,
            defaults=generation_defaults(path),
            random_weights=random_weights,
        )
        if before_weights is not None:
            before_weights(engine)
        loading = None if report is None else partial(report, "load")
        decoder = (
            random_decoder(config, device=target, dtype=dtype, seed=weights_seed)
            if random_weights
            else load_decoder(path, config, device=target, dtype=dtype, on_progress=loading)
        )
        engine._attach(decoder)
        log.info(
            "%s: %s weights, computed in %s on %s",
            path.name,
            _name(decoder.dtype),
            _name(decoder.compute_dtype),
            target,
        )
        engine.load_s = time.perf_counter() - started
        return engine

    def check_room(self, prompt_tokens: int, config: GenerationConfig | None = None) -> None:
        """Compare what a one-shot run needs with what there is. Needs no weights, only their headers.

        Raises PromptError if the prompt does not fit the context and MemoryLimit if the run does not fit the memory;
        near the limit a warning is logged.
        """
        wanted = self._generation(config, {}).max_new_tokens or 0
        weights, stored = weights_of(None if self.random_weights else self.model_path, self.config, self.dtype)
        plan = plan_run(
            self.config,
            self.cache,
            weights=weights,
            stored=stored,
            prompt_tokens=prompt_tokens,
            new_tokens=room_for_reply(prompt_tokens, wanted, self.context),
            chunk=self.chunk,
            device=self.device,
        )
        check_memory(plan, available_memory(str(self.device)))

    def _attach(self, decoder: Decoder) -> None:
        valid = None if self.tokenizer is None else min(self.tokenizer.vocab_size, self.config.vocab_size)
        self._runner = Runner(
            decoder,
            self.cache,
            context=self.context,
            chunk=self.chunk,
            valid_ids=valid,
            kv_dtype=DTYPES[self.cache.kv_dtype] if self.cache.kv_dtype else None,
        )

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
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- text in, text out --------------------------------------------------------------------------------------------

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: list[Message] | None = None,
        ids: Sequence[int] | None = None,
        config: GenerationConfig | None = None,
        on_progress: OnProgress | None = None,
        **options: Any,
    ) -> Iterator[Piece]:
        """Generate one reply piece by piece; the last piece carries the finish reason and the statistics.

        Give one of `prompt` (a plain text, continued as it stands), `messages` (rendered by the model's chat template)
        and `ids`. Options are the fields of GenerationConfig, as keywords or in `config`. Closing the iterator early
        ends the reply and frees its rows. Wrong input raises here, not at the first piece.
        """
        prompt_ids = self.encode(prompt, messages=messages, ids=ids)
        generation = self._generation(config, options)
        return reply(self, TextSequence(), prompt_ids, generation, on_progress=on_progress)

    @overload
    def generate(self, prompt: list[str], **options: Any) -> list[Result]: ...
    @overload
    def generate(self, prompt: str | None = None, **options: Any) -> Result: ...
    def generate(self, prompt: str | list[str] | None = None, **options: Any) -> Result | list[Result]:
        """Generate a whole reply; see `stream` for the arguments. A list of prompts gives a list, one after another."""
        if isinstance(prompt, list):
            return [self.generate(text, **options) for text in prompt]
        ids = self.encode(prompt, messages=options.pop("messages", None), ids=options.pop("ids", None))
        return collect(self.stream(ids=ids, **options), ids)

    def chat(self, system: str | None = None) -> Chat:
        """A conversation over the budget: each turn reads only what is new. See `engine/chat.py`."""
        return Chat(self, system)

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
    ) -> list[int]:
        """The ids that `stream` would read. Raises PromptError for an empty, undecodable or ill-formed prompt."""
        if sum(given is not None for given in (prompt, messages, ids)) != 1:
            raise OptionError("give exactly one of a prompt text, messages and ids")
        if ids is not None:
            result = [int(token) for token in ids]
            wrong = [token for token in result if not 0 <= token < self.config.vocab_size]
            if wrong:
                raise PromptError(f"token id {wrong[0]} is outside the model's vocabulary of {self.config.vocab_size}")
        elif messages is not None:
            for message in messages:
                check_text(message.get("content") or "", f"the {message.get('role', 'chat')} message")
            result = self.chat_template().encode(messages)
        else:
            assert prompt is not None
            check_text(prompt, "the prompt")
            result = self.text_tokenizer().encode(prompt)
        if not result:
            raise PromptError("the prompt is empty: there is no token to read")
        return result

    def text_tokenizer(self) -> Tokenizer:
        """The tokenizer; raises TokenizerError if the model came without one."""
        if self.tokenizer is None:
            raise TokenizerError(f"{self.model_path} has no tokenizer: give token ids")
        return self.tokenizer

    def chat_template(self) -> ChatTemplate:
        """The chat template; raises PromptError if the model has none."""
        self.text_tokenizer()
        if self.template is None:
            raise PromptError(f"{self.model_path} has no chat template: give plain text instead (--raw)")
        return self.template

    def _generation(self, config: GenerationConfig | None, options: dict[str, Any]) -> GenerationConfig:
        """The caller's options over the model's own defaults."""
        known = {field.name for field in fields(GenerationConfig)}
        unknown = sorted(set(options) - known)
        if unknown:
            raise OptionError(f"unknown option {unknown[0]!r}: the options are {', '.join(sorted(known))}")
        config = replace(config, **options) if config is not None else GenerationConfig(**options)
        return resolve_generation(config, self.defaults)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Every id that ends a reply: of config.json, generation_config.json and the tokenizer."""
        own = self.tokenizer.eos_ids if self.tokenizer is not None else ()
        return frozenset(self.config.eos_token_ids) | frozenset(own)


def collect(pieces: Iterator[Piece], prompt_ids: list[int]) -> Result:
    """The whole of a stream."""
    texts, ids, logprobs = [], [], []
    for piece in pieces:
        texts.append(piece.text)
        if piece.id is not None:
            ids.append(piece.id)
            if piece.top_logprobs is not None:
                logprobs.append(TokenLogprobs(piece.id, piece.logprob, piece.top_logprobs))
        if piece.finish_reason is not None and piece.stats is not None:
            found = tuple(logprobs) if logprobs else None
            return Result("".join(texts), tuple(ids), piece.finish_reason, piece.stats, tuple(prompt_ids), found)
    raise CakeError("the reply ended without a reason")


def _cache_config(cache: CacheConfig | None, options: dict[str, Any]) -> CacheConfig:
    known = {field.name for field in fields(CacheConfig)}
    unknown = sorted(set(options) - known)
    if unknown:
        raise OptionError(f"unknown option {unknown[0]!r}: the cache's options are {', '.join(sorted(known))}")
    given = {name: value for name, value in options.items() if value is not None}
    return replace(cache, **given) if cache is not None else CacheConfig(**given)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _stage_reporter(on_progress: OnProgress | None) -> Callable[[str, int, int], None] | None:
    if on_progress is None:
        return None
    callback = on_progress

    def report(stage: str, done: int, total: int) -> None:
        callback(Progress("load" if stage == "load" else "download", done, total))

    return report
