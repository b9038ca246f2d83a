"""What a caller may ask of the generation of one reply, checked, and completed from the model's generation_config.json.

Imports no torch: the command line reads its defaults from here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, TypeVar

from ..errors import OptionError
from ..ranges import COUNT, MOST, Range, check_numbers, shown

Number = TypeVar("Number", int, float)

DEFAULT_MAX_NEW_TOKENS = 512
LOWEST_TEMPERATURE = 1e-5  # below it a reply is greedy: logits / temperature would leave fp32
MAX_SEED = 2**64 - 1
NUMBERS = {
    "max_new_tokens": COUNT,
    "temperature": Range(0, MOST, float),
    "top_k": COUNT,
    "top_p": Range(0, 1, float, above=True),
    "min_p": Range(0, 1, float),
    "repetition_penalty": Range(1 / MOST, MOST, float),
    "presence_penalty": Range(-2, 2, float),
    "frequency_penalty": Range(-2, 2, float),
    "seed": Range(0, MAX_SEED),
    "logprobs": COUNT,
}


@dataclass(frozen=True)
class GenerationConfig:
    """Options of one reply. `None` means: from the model's generation_config.json, else the default in brackets.

    max_new_tokens: most tokens to generate (512; never from the file); 0 gives an empty reply.
    temperature: 0 always takes the most probable token (0, or 1 where the model's file or a given top_k, top_p or
        min_p asks for sampling).
    top_k: sample among the k most probable tokens, 0 is off (0).
    top_p: sample among the fewest most probable tokens that together have probability p, 1 is off (1).
    min_p: sample among tokens with at least min_p times the best one's probability, 0 is off (0).
    repetition_penalty: divides positive and multiplies negative logits of every token that stands in the prompt or the
        reply, once, however often it stands there (1, which is off), as in transformers.
    presence_penalty: subtracted from the logit of every token in the reply (0), frequency_penalty: the same times its
        count (0); both look at the reply only, as in OpenAI's and vLLM's interfaces.
    seed: 0 to 2**64 - 1; without one, a fresh one is drawn and recorded in the statistics.
    stop: texts that end the reply; they are not part of it.
    logprobs: report the chosen token's log-probability and those of this many best tokens; None is off.
    Raises OptionError where a value cannot be applied.
    """

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None

    numbers: ClassVar[Mapping[str, Range]] = NUMBERS

    def __post_init__(self) -> None:
        check_numbers(self)
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, (tuple, list)) or not all(isinstance(text, str) for text in stop):
            raise OptionError(f"the option stop must be a text or a list of texts, not {shown(self.stop)}")
        if "" in stop:
            raise OptionError("the option stop holds an empty text, which would end every reply at once; leave it out")
        object.__setattr__(self, "stop", tuple(stop))

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken (of a resolved config)."""
        return self.temperature is not None and self.temperature < LOWEST_TEMPERATURE

    @property
    def penalises(self) -> bool:
        """Whether choosing needs a `History` of the tokens so far (of a resolved config)."""
        return (
            self.repetition_penalty not in (None, 1.0)
            or self.presence_penalty not in (None, 0.0)
            or self.frequency_penalty not in (None, 0.0)
        )


def with_options(config: GenerationConfig | None, options: Mapping[str, Any]) -> GenerationConfig:
    """The keywords over the fields of `config`. Raises OptionError for another object, and for a name that is none."""
    known = {field.name for field in fields(GenerationConfig)}
    unknown = sorted(set(options) - known)
    if unknown:
        raise OptionError(f"unknown option {unknown[0]!r}: the options are {', '.join(sorted(known))}")
    if config is not None and not isinstance(config, GenerationConfig):
        raise OptionError(f"config is a GenerationConfig (a list of them for a list of prompts), not {shown(config)}")
    return replace(config, **options) if config is not None else GenerationConfig(**options)


def resolve_generation(config: GenerationConfig, generation_json: Mapping[str, object] | None) -> GenerationConfig:
    """Fill every `None` (but `logprobs`) of `config`: from the model's generation_config.json, else from the defaults.

    As in transformers, a file without `"do_sample": true` asks for greedy replies, whatever its temperature. A caller
    who gives top_k, top_p or min_p but no temperature asks for sampling. Values that the caller gave are not looked up
    in the file. The seed is drawn from the operating system if there is none. Raises OptionError for a value in the
    file that cannot be applied.
    """
    file = _file_values(generation_json or {}, config)
    temperature = config.temperature
    if temperature is None:
        sampling = any(value is not None for value in (config.top_k, config.top_p, config.min_p))
        if sampling or (generation_json or {}).get("do_sample") is True:
            temperature = 1.0 if file.temperature is None else file.temperature
        else:
            temperature = 0.0
    return replace(
        config,
        max_new_tokens=DEFAULT_MAX_NEW_TOKENS if config.max_new_tokens is None else config.max_new_tokens,
        temperature=temperature,
        top_k=_first(config.top_k, file.top_k, 0),
        top_p=_first(config.top_p, file.top_p, 1.0),
        min_p=_first(config.min_p, file.min_p, 0.0),
        repetition_penalty=_first(config.repetition_penalty, file.repetition_penalty, 1.0),
        presence_penalty=_first(config.presence_penalty, None, 0.0),
        frequency_penalty=_first(config.frequency_penalty, None, 0.0),
        seed=fresh_seed() if config.seed is None else config.seed,
    )


def fresh_seed() -> int:
    """A seed of 32 bits from the operating system; no generator of the process is touched."""
    return int.from_bytes(os.urandom(4), "little")


def _file_values(generation_json: Mapping[str, object], config: GenerationConfig) -> GenerationConfig:
    """The file's values for what the caller left open."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    values = {name: generation_json.get(name) for name in names if getattr(config, name) is None}
    top_k = values.get("top_k")
    if isinstance(top_k, int) and top_k < 0:  # vLLM's and sglang's spelling of "off"
        values["top_k"] = 0
    try:
        return GenerationConfig(**values)  # type: ignore[arg-type]
    except OptionError as error:
        raise OptionError(f"the model's generation_config.json is not usable: {error}; give that option") from None


def _first(given: Number | None, file: Number | None, default: Number) -> Number:
    if given is not None:
        return given
    return default if file is None else file
