"""A plugin for the `llm` command line (`pip install 'cake-infer[llm]'`): `llm -m cake/mistral-7b "..." < doc.txt`.

Every short name of `cake-infer models` is a model `cake/NAME`; `cake` alone is the one that the option `model` names, a
folder or a hub id. Imported whenever `llm` starts, so that nothing heavy is imported before a reply is asked for.
"""

from __future__ import annotations

import sys
import threading
from argparse import Namespace
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import asdict, fields
from functools import cache
from typing import TYPE_CHECKING, Any, get_type_hints

import llm
from pydantic import ConfigDict, Field, create_model

from ...cache.config import CacheConfig
from ...errors import CakeError, OptionError, PromptError
from ...models.registry import ALIASES, EMBEDDED
from ..generation import GenerationConfig
from ..options import CACHE_FLAGS, ENGINE_FLAGS, GENERATION_FLAGS, NOT_FLAGS, EngineOptions, spell_options
from .loading import usage_conflict

if TYPE_CHECKING:
    from ..chat import Chat
    from ..engine import Engine
    from ..results import Piece, Progress

FLAGS = {EngineOptions: ENGINE_FLAGS, CacheConfig: CACHE_FLAGS, GenerationConfig: GENERATION_FLAGS}
RENAMED = {"max_new_tokens": "max_tokens"}  # as on our own command line
LEFT_OUT = {*NOT_FLAGS, "logprobs"}  # llm has no place for them

Messages = list[dict[str, str]]


@llm.hookimpl
def register_models(register: Any) -> None:
    """What `llm` asks a plugin for."""
    register(CakeModel("cake", None))
    for alias in ALIASES:
        register(CakeModel(f"cake/{alias}", alias))


@cache
def options_class(any_model: bool) -> type[Any]:
    """The options of our own command line, by the same names; a list is written with commas."""
    known: dict[str, Any] = {}
    if any_model:
        known["model"] = (str | None, Field(default=None, description=f"a folder or a hub id (default {EMBEDDED})"))
    for cls, flags in FLAGS.items():
        hints = get_type_hints(cls)
        for field in fields(cls):
            if field.name in LEFT_OUT:
                continue
            hint = str if "tuple" in str(hints[field.name]) else hints[field.name]
            text = flags[field.name].help.replace("%%", "%")
            known[RENAMED.get(field.name, field.name)] = (hint | None, Field(default=None, description=text))
    config = ConfigDict(extra="forbid", protected_namespaces=())
    made = create_model("Options", __config__=config, **known)
    return type("Options", (made, llm.Options), {"model_config": config})


class CakeModel(llm.Model):
    """One of our models. `alias` None: whichever the option `model` names."""

    can_stream = True

    def __init__(self, model_id: str, alias: str | None) -> None:
        self.model_id, self.alias = model_id, alias
        self.Options = options_class(alias is None)

    def execute(self, prompt: Any, stream: bool, response: Any, conversation: Any) -> Iterator[str]:
        """The reply, piece by piece. Raises llm.ModelError, one line, which `llm` shows."""
        try:
            given = {name: value for name, value in prompt.options.model_dump().items() if value is not None}
            asked = Asked.of(self.alias or str(given.pop("model", EMBEDDED)), given)
            messages = [_message(message) for message in prompt.messages]
            key = None if conversation is None else conversation.id
            with closing(KEPT.pieces(asked, messages, key)) as pieces:
                for piece in pieces:
                    if piece.text:
                        yield piece.text
                    if piece.stats is not None:
                        _report(response, piece)
        except CakeError as error:
            raise llm.ModelError(spell_options(" ".join(str(error).split()), _spelled)) from error


class Asked:
    """What a prompt's options say: the model, how it is loaded, and how the reply is chosen."""

    def __init__(self, model: str, engine: EngineOptions, cache: CacheConfig, generation: GenerationConfig) -> None:
        self.model, self.engine, self.cache, self.generation = model, engine, cache, generation

    @classmethod
    def of(cls, model: str, given: dict[str, Any]) -> Asked:
        """Raises OptionError for a value that is wrong, or that would not be applied."""
        parts: list[Any] = []
        for made in FLAGS:
            names = {field.name: RENAMED.get(field.name, field.name) for field in fields(made)}
            values = {name: given[shown] for name, shown in names.items() if shown in given}
            hints = get_type_hints(made)
            values = {n: tuple(v.split(",")) if "tuple" in str(hints[n]) else v for n, v in values.items()}
            parts.append(made(**values))
        engine, cache, generation = parts
        args = Namespace(random_weights=None, **{f.name: getattr(cache, f.name) for f in fields(cache)})
        if conflict := usage_conflict(args, set(given)):
            raise OptionError(conflict)
        return cls(model, engine, cache, generation)

    @property
    def loaded(self) -> tuple[Any, ...]:
        """What another engine would be needed for."""
        return self.model, self.engine, self.cache


class Kept:
    """The engine of this process, and the conversation whose rows it holds: `llm chat` reads only what is new."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._loaded: tuple[Any, ...] = ()
        self._chat: Chat | None = None
        self._key: str | None = None

    def pieces(self, asked: Asked, messages: Messages, key: str | None) -> Generator[Piece, None, None]:
        """The reply to the last message. What there was before is in the rows already, or is read again."""
        if not messages or messages[-1]["role"] != "user":
            raise PromptError("the prompt is empty: there is nothing to answer")
        with self._lock:
            engine = self._load(asked, messages)
            if engine.template is None:
                if len(messages) > 1:
                    raise PromptError("this model has no chat template: it continues one text, with no system text")
                return engine.stream(messages[0]["content"], config=asked.generation)
            system = messages[0]["content"] if messages[0]["role"] == "system" else None
            before = messages[system is not None : -1]
            if not before:
                self._chat, self._key = engine.chat(system), key
            chat = self._chat
            if chat is None or key is None or key != self._key or chat.system != system or chat.messages != before:
                return engine.stream(messages=messages, config=asked.generation)
            return chat.send(messages[-1]["content"], config=asked.generation)

    def _load(self, asked: Asked, messages: Messages) -> Engine:
        """The engine, with room checked before its weights are read; another one is closed first."""
        if self._engine is not None and self._loaded == asked.loaded:
            return self._engine
        self.close()
        from ..engine import Engine

        def before_weights(engine: Engine) -> None:
            if engine.template is not None:
                engine.check_room(len(engine.encode(messages=messages)), asked.generation)

        self._engine = Engine.load(
            asked.model,
            cache=asked.cache,
            before_weights=before_weights,
            on_progress=_download_notice(asked.model),
            **asdict(asked.engine),
        )
        self._loaded = asked.loaded
        return self._engine

    def close(self) -> None:
        """Free the engine, if there is one."""
        if self._engine is not None:
            self._engine.close()
        self._engine, self._chat, self._key = None, None, None


KEPT = Kept()


def _spelled(option: str) -> str:
    """An option as `llm` takes it."""
    return f"-o {RENAMED.get(option, option)}"


def _message(message: Any) -> dict[str, str]:
    """One of llm's messages as ours. Raises PromptError for what is no text."""
    texts = []
    for part in message.parts:
        if isinstance(part, llm.parts.TextPart):
            texts.append(part.text)
        elif not isinstance(part, llm.parts.ReasoningPart):
            raise PromptError(f"the model reads text, and this prompt has a {type(part).__name__}")
    return {"role": message.role, "content": "".join(texts)}


def _report(response: Any, piece: Piece) -> None:
    """What `llm logs` keeps: tokens in and out, and our own figures."""
    stats = piece.stats
    assert stats is not None
    figures = stats.as_dict()
    kept = {"kept_tokens": figures["kept_tokens"], "of": figures["full_tokens"]}
    response.set_usage(input=stats.prompt_tokens, output=stats.new_tokens, details=kept)
    response.response_json = {"finish_reason": piece.finish_reason, "statistics": figures}


def _download_notice(model: str) -> Any:
    """Says on standard error, once, that weights are fetched: it takes minutes."""
    told: list[bool] = []

    def tell(progress: Progress) -> None:
        if progress.stage == "download" and not told:
            told.append(True)
            print(f"downloading {model} ...", file=sys.stderr, flush=True)

    return tell
