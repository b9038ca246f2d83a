"""What a request may say. A field that the server knows is applied or refused; one that nobody knows is ignored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, Strict, ValidationError, field_validator
from pydantic_core import PydanticCustomError, from_json

from ...ranges import MOST_TOKENS
from ..generation import GenerationConfig
from .errors import ApiError, invalid

MOST_LOGPROBS = 20
MOST_STOPS = 16
MOST_PROMPTS = 1024

Body = TypeVar("Body", bound="Request")
Item = TypeVar("Item")


class _FirstError(FailFast):
    """An error for each of millions of wrong items would take minutes."""

    __hash__ = object.__hash__  # as a part of a union has to have


List = Annotated[list[Item], _FirstError()]
# true is no number, "5" is none either, and 1 is not true
Whole = Annotated[int, Strict()]
Number = Annotated[float, Strict()]
Truth = Annotated[bool, Strict()]


def _nothing(value: object) -> bool:
    return value is None or value is False or value in ("", 0) or value in ([], {})


def _one_of(*allowed: object) -> Callable[[object], bool]:
    return lambda value: value is None or any(value == one and type(value) is type(one) for one in allowed)


def _text_format(value: object) -> bool:
    return value is None or (isinstance(value, Mapping) and value.get("type") == "text")


# fields of OpenAI's interface, and of other servers', that would change the answer and that this one does not have;
# each may have the values that change nothing
NOT_SUPPORTED: dict[str, Callable[[object], bool]] = {
    "tools": _nothing,
    "tool_choice": _one_of("none", "auto"),
    "functions": _nothing,
    "function_call": _one_of("none", "auto"),
    "response_format": _text_format,
    "logit_bias": _nothing,
    "audio": _nothing,
    "modalities": lambda value: value is None or value == ["text"],
    "prediction": _nothing,
    "reasoning_effort": _one_of("none"),
    "verbosity": _one_of("medium"),
    "web_search_options": _nothing,
    "service_tier": _one_of("auto", "default"),
    "store": _nothing,
    "echo": _nothing,
    "suffix": _nothing,
    "min_tokens": _nothing,
    "stop_token_ids": _nothing,
    "bad_words": _nothing,
    "length_penalty": _one_of(1, 1.0),
    "use_beam_search": _nothing,
    "prompt_logprobs": _nothing,
    "guided_json": _nothing,
    "guided_regex": _nothing,
    "guided_choice": _nothing,
    "guided_grammar": _nothing,
    "structured_outputs": _nothing,
    "grammar": _nothing,
    "json_schema": _nothing,
    "add_generation_prompt": _one_of(True),
    "continue_final_message": _nothing,
    "chat_template": _nothing,
    "chat_template_kwargs": _nothing,
    "skip_special_tokens": _one_of(True),
}


class Request(BaseModel):
    """What every body has in common."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    @classmethod
    def parse(cls: type[Body], body: bytes) -> Body:
        """Raises ApiError for what is no JSON object, has a wrong value, or asks for what the server cannot do."""
        try:
            given = from_json(body, allow_inf_nan=False)
        except ValueError as error:
            raise invalid(f"the body is not valid JSON: {error}") from None
        if not isinstance(given, dict):
            raise invalid("the body must be a JSON object")
        for name, harmless in NOT_SUPPORTED.items():
            if name in given and not harmless(given[name]):
                raise invalid(f"{name} is not supported by this server: leave it out", name, "unsupported_parameter")
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise _told(error) from None


def _told(error: ValidationError) -> ApiError:
    """The first thing that is wrong, and where."""
    first = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"] if not isinstance(part, str) or part.isidentifier())
    return invalid(f"{where}: {first['msg']}" if where else first["msg"], where or None)


class CakeOptions(BaseModel):
    """The extension: how the cache of this request is kept. Unknown keys are refused.

    budget: tokens per layer and KV head, or a percentage of the prompt. policy: what evicts. document: the id of a
    document, behind which the prompt is a question. stats: tell what the reply cost and kept.
    """

    model_config = ConfigDict(extra="forbid")

    budget: Whole | str | None = None
    policy: str | None = None
    document: str | None = None
    stats: Truth = False


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore")

    include_usage: Truth = False
    include_obfuscation: Literal[False] | None = None


class Sampling(Request):
    """The fields that chat and completion share."""

    model: str | None = None
    stream: Truth | None = None
    stream_options: StreamOptions | None = None
    n: Whole | None = Field(None, ge=1, le=MOST_TOKENS)
    best_of: Whole | None = Field(None, ge=1)
    max_tokens: Whole | None = Field(None, ge=0)
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Whole | None = None
    min_p: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    seed: Whole | None = None
    stop: str | List[str] | None = None
    ignore_eos: Truth | None = None
    cake: CakeOptions = Field(default_factory=CakeOptions)

    @property
    def streams(self) -> bool:
        return bool(self.stream)

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def limit(self) -> int | None:
        """The most tokens of a reply, None where nothing was said."""
        return self.max_tokens

    def top_logprobs_wanted(self) -> int | None:
        raise NotImplementedError

    def generation(self, defaults: GenerationConfig) -> GenerationConfig:
        """The options of a reply; what the request leaves open is the server's. Raises OptionError."""
        if self.stream_options is not None and not self.streams:
            raise invalid("stream_options has no effect without stream: leave it out", "stream_options")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise invalid("best_of is not supported: leave it out", "best_of", "unsupported_parameter")
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        if stop is not None and len(stop) > MOST_STOPS:
            raise invalid(f"stop has {len(stop)} texts, and {MOST_STOPS} are the most", "stop")
        given = {
            name: getattr(self, name)
            for name in (
                "temperature",
                "top_p",
                "top_k",
                "min_p",
                "presence_penalty",
                "frequency_penalty",
                "repetition_penalty",
                "seed",
            )
        }
        if given["top_k"] == -1:  # vLLM's spelling of "off"
            given["top_k"] = 0
        given |= {"max_new_tokens": self.limit(), "stop": stop and tuple(stop), "logprobs": self.top_logprobs_wanted()}
        values = {field.name: getattr(defaults, field.name) for field in fields(defaults)}
        return GenerationConfig(**values | {name: value for name, value in given.items() if value is not None})


class Message(BaseModel):
    """One message of a chat: a role, and a text or a list of parts that are texts."""

    model_config = ConfigDict(extra="ignore")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | List[dict[str, Any]] | None = None
    tool_calls: list[Any] | None = None
    function_call: dict[str, Any] | None = None

    def plain(self, number: int) -> dict[str, str]:
        """Role and text, as the template takes them. Raises ApiError for what is no text."""
        where = f"messages.{number}"
        if self.role in ("tool", "function") or self.tool_calls or self.function_call:
            raise invalid("tools are not supported by this server", where, "unsupported_parameter")
        if self.content is None and self.role == "user":
            raise invalid("a user message needs a content", f"{where}.content")
        role = "system" if self.role == "developer" else self.role
        if isinstance(self.content, list):
            return {"role": role, "content": "\n".join(_part(part, where, at) for at, part in enumerate(self.content))}
        return {"role": role, "content": self.content or ""}


def _part(part: dict[str, Any], where: str, number: int) -> str:
    kind, text = part.get("type"), part.get("text")
    if kind != "text":
        what = f"content parts of the type {kind!r} are not supported: this server reads text"
        raise invalid(what, f"{where}.content.{number}", "unsupported_content")
    if not isinstance(text, str):
        raise invalid("a text part has no text", f"{where}.content.{number}")
    return text


class ChatRequest(Sampling):
    """The body of /v1/chat/completions."""

    messages: List[Message] = Field(min_length=1)
    max_completion_tokens: Whole | None = Field(None, ge=0)
    logprobs: Truth | None = None
    top_logprobs: Whole | None = Field(None, ge=0, le=MOST_LOGPROBS)

    def limit(self) -> int | None:
        if self.max_completion_tokens is None:
            return self.max_tokens
        if self.max_tokens is not None and self.max_tokens != self.max_completion_tokens:
            raise invalid("max_tokens and max_completion_tokens differ: give one", "max_completion_tokens")
        return self.max_completion_tokens

    def top_logprobs_wanted(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs has no effect without logprobs: set it to true", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def plain_messages(self) -> list[dict[str, str]]:
        return [message.plain(number) for number, message in enumerate(self.messages)]


class CompletionRequest(Sampling):
    """The body of /v1/completions."""

    prompt: str | List[Whole] | List[str] | List[List[Whole]] = Field(union_mode="left_to_right")
    logprobs: Whole | None = Field(None, ge=0, le=MOST_LOGPROBS)

    @field_validator("prompt", mode="before")
    @classmethod
    def few(cls, prompt: object) -> object:
        """Before millions of prompts are looked at, each for itself."""
        if isinstance(prompt, list) and len(prompt) > MOST_PROMPTS and not isinstance(prompt[0], int):
            raise PydanticCustomError(
                "too_many", f"these are {len(prompt):,} prompts, and {MOST_PROMPTS:,} are the most"
            )
        return prompt

    def top_logprobs_wanted(self) -> int | None:
        return self.logprobs

    def prompts(self) -> list[str | list[int]]:
        """Each prompt is a text or ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise invalid("prompt is an empty list", "prompt")
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class DocumentRequest(Request):
    """The body of POST /v1/documents: a text that questions will be asked about.

    raw: read as it stands, without chat template; questions are completions then.
    """

    text: str = Field(min_length=1)
    name: str | None = Field(None, max_length=200)
    system: str | None = None
    raw: Truth = False
    model: str | None = None
    cake: CakeOptions = Field(default_factory=CakeOptions)
