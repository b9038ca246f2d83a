"""How every command that runs a model gets it: the same flags, the same checks before a byte of weights is read."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from ...cache.config import CacheConfig
from ...cache.policies import choose
from ..generation import GenerationConfig
from ..options import (
    CACHE_FLAGS,
    DEFAULT_PIECE,
    ENGINE_FLAGS,
    GENERATION_FLAGS,
    EngineOptions,
    add_flags,
    from_args,
    not_empty,
    positive_count,
)
from .console import Console

if TYPE_CHECKING:
    from ..engine import Engine

DEFAULT_MODEL = "smollm2-135m"
USELESS_WHEN_FULL = (
    "budget",
    "window",
    "tau1",
    "tau2",
    "gamma",
    "indicator",
    "allocation",
    "heads",
    "merge",
    "policy_options",
    "hold_by",
    "schedule",
    "recascade",
)

Load = Callable[..., "Engine"]


def add_model_arguments(parser: argparse.ArgumentParser, skip: tuple[str, ...] = ()) -> None:
    """Which model, how it is run, and what its cache may hold; `skip` names fields that a command has no use for."""
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model",
        metavar="NAME",
        type=not_empty,
        help=f"a folder, an alias or a hub id (default {DEFAULT_MODEL}); see `models`",
    )
    model.add_argument("--revision", metavar="REV", type=not_empty, help="branch, tag or commit of a hub model")
    model.add_argument(
        "--random-weights",
        metavar="CONFIG",
        type=not_empty,
        help="random values in the shapes of this config.json (or its folder)",
    )
    add_flags(model, EngineOptions, ENGINE_FLAGS, skip)
    add_flags(parser.add_argument_group("cache"), CacheConfig, CACHE_FLAGS, skip)


def add_generation_arguments(parser: argparse.ArgumentParser, skip: tuple[str, ...] = ()) -> None:
    """How the reply is chosen, token by token."""
    add_flags(parser.add_argument_group("reply"), GenerationConfig, GENERATION_FLAGS, skip)


def add_output_arguments(parser: argparse._ActionsContainer) -> None:
    """What is said on standard error."""
    parser.add_argument("--quiet", action="store_true", help="no progress, notices or statistics; warnings stay")
    parser.add_argument("--verbose", action="store_true", help="more notices, and the kept tokens of each layer")


def add_pieces_argument(parser: argparse._ActionsContainer, text: str) -> None:
    """Texts longer than memory, or long ones in less time."""
    parser.add_argument(
        "--stream-prefill",
        metavar="N",
        nargs="?",
        type=positive_count,
        const=DEFAULT_PIECE,
        help=f"{text} in pieces of N tokens ({DEFAULT_PIECE}), evicting after each: memory is that of a piece, time "
        "linear in the text",
    )


def pieces_conflict(args: argparse.Namespace, *, length_known: bool) -> str | None:
    """Why --stream-prefill does not go together with other flags, or None."""
    if args.stream_prefill is None:
        return None
    if args.policy == "full":
        return "--stream-prefill has no effect with --policy full, which keeps everything"
    if not length_known and args.kv_memory is None and "%" in str(args.budget):
        return "--budget in % needs the length of the prompt, which --stream-prefill does not know: give it in tokens"
    return None


def generation_config(args: argparse.Namespace) -> GenerationConfig:
    """The reply's options of the flags. Raises OptionError."""
    from .prompt import argument_text

    config = from_args(GenerationConfig, args)
    return replace(config, stop=tuple(argument_text(text, "--stop") for text in config.stop))


def open_engine(
    args: argparse.Namespace,
    console: Console,
    load: Load | None = None,
    before_weights: Callable[[Engine], None] | None = None,
) -> Engine:
    """The model of the flags, which are checked before it is looked for; `load` stands in for `Engine.load`."""
    cache = from_args(CacheConfig, args)
    keywords: dict[str, Any] = asdict(from_args(EngineOptions, args))
    if load is None:
        from ..engine import Engine

        load = Engine.load
    return load(
        args.random_weights or args.model or DEFAULT_MODEL,
        revision=args.revision,
        cache=cache,
        random_weights=args.random_weights is not None,
        on_progress=console.progress,
        before_weights=before_weights,
        **keywords,
    )


def check_model(args: argparse.Namespace) -> None:
    """Raise what needs neither weights nor torch, which takes seconds to import, nor the network: there is no model of
    that name, its config cannot be read or have the context that is asked for, or a file of the policy is missing."""
    from ...models.config import context_limit, read_config
    from ...models.hub import check_name, local_model

    options, choice = from_args(EngineOptions, args), from_args(CacheConfig, args).choice
    if choice is not None:
        choice.check_files()
    name = args.model or DEFAULT_MODEL
    if args.random_weights is None:
        check_name(name, revision=args.revision)
    folder = args.random_weights or local_model(name, revision=args.revision)
    if folder is not None:
        context_limit(options.context, read_config(folder, options.rope_scaling))


def weights_conflict(args: argparse.Namespace, given: set[str]) -> str | None:
    """Why it is not clear which model is meant, or None."""
    for name in () if args.random_weights is None else ("model", "revision"):
        if name in given:
            return f"the option {name} has no effect with the option random_weights"
    return None


def usage_conflict(args: argparse.Namespace, given: set[str]) -> str | None:
    """Why options that were given exclude one another, or None: one that would not be applied is refused.

    Like a message of the library it says `the option NAME`: not only command lines ask.
    """
    if conflict := weights_conflict(args, given):
        return conflict
    if {"budget", "kv_memory"} <= given:
        return "the option budget and the option kv_memory both set the size of the cache: give one"
    if args.policy == "full":
        for name in USELESS_WHEN_FULL:
            if name in given and not (name == "window" and args.kv_bits is not None):
                return f"the option {name} has no effect with the policy full, which keeps everything"
        if args.decode_policy == "hold":
            return "the option decode_policy hold has no effect with the policy full, which keeps everything"
        return None
    for name in ("hold_by", "recascade"):
        if name in given and args.decode_policy != "hold":
            return f"the option {name} has no effect without the option decode_policy hold"
    parts = {name: getattr(args, name, None) for name in ("indicator", "allocation", "heads", "merge")}
    chosen = choose(args.policy, **parts)
    for name in ("tau1", "tau2", "gamma"):
        if name in given and all(method.option(name) is None for method in chosen.parts.values()):
            return f"the option {name} has no effect with {chosen.title}, which has no such parameter"
    return None
