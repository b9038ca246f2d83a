"""The command line's flags: one per field of the option dataclasses, with the dataclass defaults.

Nothing here imports torch. A field without an entry in `FLAGS` or `NOT_FLAGS` fails when the parser is built, so that a
new option cannot be forgotten, and a flag can never have a default of its own.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, TypeVar

from ..cache.config import CacheConfig
from ..errors import OptionError
from ..models.rope_config import parse_scaling
from ..ranges import COUNT, POSITIVE, Range, check_numbers, shown
from .generation import GenerationConfig

DTYPES = ("float32", "bfloat16", "float16")
ATTENTION = ("auto", "sdpa", "flash_attn", "triton")
STEPS = ("auto", "compiled", "graph", "eager")
TUNING = ("auto", "off")
QUANTS = ("int8", "int4")
DEFAULT_PIECE = 2048  # tokens of a text that is read in pieces
NUMBERS = {
    "threads": Range(1, 1024),  # torch's own pool crashes the process with too many
    "context": POSITIVE,
    "chunk": POSITIVE,
}
_DEVICE = re.compile(r"cpu|cuda(:[0-9]+)?")

Options = TypeVar("Options")


class UsageError(Exception):
    """A command line that does not parse, a value that no model could take, or flags that exclude one another."""


@dataclass(frozen=True)
class EngineOptions:
    """How a model is loaded and run: the keyword arguments of `Engine.load` with the same names and defaults.

    Raises OptionError for a value that is wrong whatever the model and the machine.
    """

    dtype: str | None = None
    device: str | None = None
    threads: int | None = None
    context: int | None = None
    rope_scaling: str | None = None
    chunk: int = 512
    attention: str = "auto"
    step: str = "auto"
    quant: str | None = None
    tuning: str = "auto"

    numbers: ClassVar[Mapping[str, Range]] = NUMBERS

    def __post_init__(self) -> None:
        check_numbers(self)
        choices = {"dtype": DTYPES, "attention": ATTENTION, "step": STEPS, "quant": QUANTS, "tuning": TUNING}
        for name, known in choices.items():
            value = getattr(self, name)
            if value not in known and not (value is None and name in ("dtype", "quant")):
                raise OptionError(f"the option {name} must be one of {', '.join(known)}, not {shown(value)}")
        if self.device is not None and not (isinstance(self.device, str) and _DEVICE.fullmatch(self.device)):
            raise OptionError(f"the option device must be cpu, cuda or cuda:N, not {shown(self.device)}")
        if self.quant is not None and self.dtype is not None:
            raise OptionError(
                f"weights are stored either as {self.quant} or as {self.dtype}: give one of the option quant and "
                "the option dtype"
            )
        if self.rope_scaling is not None:
            parse_scaling(self.rope_scaling)


def as_it_is(text: str) -> str:
    """A text. argparse gives defaults to this too, and `str` would take from one that nobody said it."""
    return text


@dataclass(frozen=True)
class Flag:
    """What argparse needs for one field; name and default come from the field itself, and so does `parse` where its
    dataclass has a range of `numbers` for it."""

    help: str
    parse: Callable[[str], Any] = as_it_is
    metavar: str | None = None
    choices: tuple[str, ...] | None = None
    name: str | None = None
    repeat: bool = False


def of_range(numbers: Range) -> Callable[[str], Any]:
    """What reads the numbers of a range, and says of any other text which they are."""

    def read(text: str) -> int | float:
        try:
            return numbers.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


token_count, positive_count = of_range(COUNT), of_range(POSITIVE)


def not_empty(text: str) -> str:
    """A text that says something: an empty one, as of a variable that is not set, is a mistake and no default."""
    if not text:
        raise argparse.ArgumentTypeError("the value is empty")
    return text


CACHE_FLAGS = {
    "budget": Flag(
        "KV cache budget: tokens per layer and KV head on average (1024), or a share of the prompt (3.2%%)", metavar="N"
    ),
    "kv_memory": Flag("the budget as the size of the whole KV arena instead (512MiB)", metavar="SIZE"),
    "policy": Flag(
        "what is kept where the prompt is longer than the budget: auto (the tokens that matter), cake (as its "
        "paper chooses them), full (all), or another name that `policies` lists",
        metavar="NAME",
    ),
    "indicator": Flag("what scores the tokens, in place of the policy's own; see `policies`", metavar="NAME"),
    "allocation": Flag("how layers share the budget, in place of the policy's own; see `policies`", metavar="NAME"),
    "heads": Flag("how the heads of a layer share, in place of the policy's own; see `policies`", metavar="NAME"),
    "merge": Flag("what kept values take over of evicted ones: none, cam or d2o; see `policies`", metavar="NAME"),
    "policy_options": Flag(
        "a parameter of the policy's parts (sinks=4); may be given several times",
        not_empty,
        "NAME=VALUE",
        name="--policy-option",
        repeat=True,
    ),
    "window": Flag(
        "the last tokens of the prompt, always kept, whose queries vote; default 32, or what the policy's paper takes",
        metavar="N",
    ),
    "decode_policy": Flag(
        "new tokens: grow keeps them all in reserved room, hold overwrites the slots that are wanted least (with "
        "--kv-bits 32 at a time)",
        choices=("grow", "hold"),
    ),
    "hold_by": Flag(
        "what hold gives up: attention (the default), or another rule that `policies` lists, in plain torch; with "
        "interval=N only every N tokens",
        metavar="NAME[,OPTION=VALUE]",
    ),
    "schedule": Flag(
        "when a prompt is cut: cascade (layer by layer, in the memory of the budget) or late (once, after the last "
        "layer, in that of a full cache); default the policy's own",
        choices=("cascade", "late"),
    ),
    "recascade": Flag(
        "with hold: after every N new tokens CAKE's layers share the cache anew, by what the reply attends to",
        metavar="N",
    ),
    "tau1": Flag("CAKE's allocation: temperature of a layer's dispersion; default by model and budget", metavar="X"),
    "tau2": Flag("CAKE's allocation: temperature of a layer's shift; default by model and budget", metavar="X"),
    "gamma": Flag("policy cake: weight of the variance in a token's score; default 200", metavar="X"),
    "kv_bits": Flag(
        "pack kept keys and values in 8, 4 or 2 bits, but for the latest tokens",
        positive_count,
        "N",
    ),
    "kv_dtype": Flag(
        "number format of the kept keys and values; default bfloat16 for bfloat16 and quantised weights", choices=DTYPES
    ),
}

GENERATION_FLAGS = {
    "max_new_tokens": Flag("the most tokens to generate; default 512", metavar="N", name="--max-tokens"),
    "temperature": Flag("0 is greedy, which is the default where the model asks for nothing else", metavar="X"),
    "top_k": Flag("sample among the K likeliest tokens, 0 for all; default the model's own", metavar="K"),
    "top_p": Flag("sample among the likeliest tokens of total probability P; default the model's own", metavar="P"),
    "min_p": Flag("drop tokens less likely than P times the likeliest; default the model's own", metavar="P"),
    "repetition_penalty": Flag(
        "above 1 makes tokens of prompt and reply less likely; default the model's own", metavar="X"
    ),
    "presence_penalty": Flag("taken off the logit of each token in the reply, 0 is none", metavar="X"),
    "frequency_penalty": Flag("taken off a token's logit for each time it is in the reply, 0 is none", metavar="X"),
    "seed": Flag("for a repeatable text; default a fresh one, shown in the statistics", metavar="N"),
    "stop": Flag("end the reply before this text; may be given several times", not_empty, "TEXT", repeat=True),
    "logprobs": Flag("with --json: log-probabilities of each token and the N likeliest", metavar="N"),
}

ENGINE_FLAGS = {
    "dtype": Flag("number format of the weights; default the checkpoint's", choices=DTYPES),
    "device": Flag("cpu, cuda or cuda:N; default cuda where there is one", metavar="NAME"),
    "threads": Flag("CPU threads; default one per core", metavar="N"),
    "context": Flag("the most tokens of a conversation; default what the model was made for", metavar="N"),
    "rope_scaling": Flag("stretch the context: linear:F, dynamic:F or yarn:F", metavar="KIND:F"),
    "chunk": Flag("tokens read at a time within a layer", metavar="N"),
    "attention": Flag(
        "attention backend: sdpa (torch), flash_attn, triton, or auto: the best that can run", choices=ATTENTION
    ),
    "step": Flag(
        "what decodes: compiled (numba, on a CPU), graph (one CUDA graph a token), eager (plain torch), or auto: the "
        "fastest that can run",
        choices=STEPS,
    ),
    "tuning": Flag("constants that `tune` found for this model: auto uses them, off does not", choices=TUNING),
    "quant": Flag("int8 or int4 weights, packed once into the cache folder; int4 on a CPU only", choices=QUANTS),
}

# fields that are constants of the method rather than choices of a user
NOT_FLAGS = {"pool"}


_RENAMED = {
    field: flag.name
    for flags in (ENGINE_FLAGS, CACHE_FLAGS, GENERATION_FLAGS)
    for field, flag in flags.items()
    if flag.name
}


def flag_of(option: str) -> str:
    """`--max-tokens` for `max_new_tokens`, else the option's own name with dashes."""
    return _RENAMED.get(option) or "--" + option.replace("_", "-")


def add_flags(
    parser: argparse._ActionsContainer, cls: type, flags: dict[str, Flag], skip: tuple[str, ...] = ()
) -> None:
    """Adds a flag per field of dataclass `cls`, with the field's default, but for those in `skip`."""
    for field in fields(cls):
        if field.name in NOT_FLAGS or field.name in skip:
            continue
        flag = flags[field.name]
        default = None if field.default is MISSING else field.default
        text = flag.help
        if default is not None and default != ():
            text += f" (default {default})"
        arguments: dict[str, Any] = {"dest": field.name, "default": default, "help": text, "metavar": flag.metavar}
        if flag.choices:
            arguments["choices"] = flag.choices
            arguments.pop("metavar")
        if flag.repeat:
            arguments["action"] = "append"
            arguments["default"] = None
        numbers = cls.numbers.get(field.name)  # type: ignore[attr-defined]
        parse = flag.parse if numbers is None else of_range(numbers)
        parser.add_argument(flag_of(field.name), type=parse, **arguments)


def from_args(cls: type[Options], args: argparse.Namespace) -> Options:
    """The dataclass with the values of the command line; raises its OptionError or BudgetError."""
    values: dict[str, Any] = {}
    for field in fields(cls):  # type: ignore[arg-type]
        value = getattr(args, field.name, MISSING)
        if value is MISSING or (value is None and field.default is not None):
            continue
        values[field.name] = tuple(value) if isinstance(value, list) else value
    return cls(**values)


def check_options(args: argparse.Namespace) -> None:
    """Every value of the command line that is wrong whatever the model and the machine: raises OptionError.

    The one place where the command line learns of them, before anything is read; what turns out later is an error of
    the run.
    """
    for cls in (EngineOptions, CacheConfig, GenerationConfig):
        from_args(cls, args)


def spell_options(message: str, spell: Callable[[str], str]) -> str:
    """A message of the library, which says `the option NAME` of whatever it names, as people write it where they are.

    The library does not know whether an option came as a keyword, a flag or a field: whoever shows its messages does.
    """
    return re.sub(r"\bthe option ([a-z][a-z0-9_]*)\b", lambda match: spell(match[1]), message)


def spell_flags(message: str) -> str:
    """A message as people at a command line write it: `the option rope_scaling` is `--rope-scaling`."""
    return spell_options(message, flag_of)
