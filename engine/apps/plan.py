"""The plan command: what a run takes in memory, from config and safetensors headers alone."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...cache.config import CacheConfig
from ...errors import PromptError
from ...ranges import Range
from ..generation import DEFAULT_MAX_NEW_TOKENS, GenerationConfig
from ..options import GENERATION_FLAGS, EngineOptions, add_flags, from_args, of_range, positive_count
from .console import Console
from .loading import (
    DEFAULT_MODEL,
    add_model_arguments,
    add_pieces_argument,
    pieces_conflict,
    usage_conflict,
)

if TYPE_CHECKING:
    from ...models.config import ModelConfig
    from ..available import Available
    from ..memory import Plan

DEFAULT_PROMPT_TOKENS = 8192
MOST_PROMPTS = 65_536  # together; each is added up

# what is shown, and the field of Plan it comes from
ROWS = (
    ("weights", "weights"),
    ("KV arena", "arena"),
    ("  kept rows", "kept"),
    ("  one layer, staged", "staging"),
    ("  or the reply's room", "reply"),
    ("hidden states", "hidden"),
    ("one layer, widened", "widened"),
    ("one chunk and tables", "chunk"),
    ("matrix products", "products"),
    ("rows before the turn", "undo"),
    ("total", "total"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    length = parser.add_argument_group("run")
    length.add_argument(
        "--prompt-tokens",
        metavar="N",
        type=positive_count,
        help=f"length of the prompt (default {DEFAULT_PROMPT_TOKENS}, or what the context has room for)",
    )
    length.add_argument(
        "--batch",
        metavar="N",
        type=of_range(Range(1, MOST_PROMPTS)),
        default=1,
        help="how many such prompts are decoded together, as far as --kv-memory has room for them (default 1)",
    )
    length.add_argument(
        "--chat",
        action="store_true",
        help="the second turn of a conversation, after one of the same size, with the copies that /undo goes back to",
    )
    add_pieces_argument(length, "the prompt is read")
    others = tuple(name for name in GENERATION_FLAGS if name != "max_new_tokens")
    add_flags(length, GenerationConfig, GENERATION_FLAGS, skip=others)
    add_model_arguments(
        parser,
        # what no figure depends on
        skip=("threads", "tuning", "attention", "step", "tau1", "tau2", "gamma", "recascade"),
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="one JSON object, sizes in bytes")


def conflict(args: argparse.Namespace, given: set[str]) -> str | None:
    """Why these flags do not go together, or None."""
    if args.chat and args.batch > 1:
        return "--chat is one conversation: leave --batch out"
    if args.stream_prefill is not None:
        for name, on in (("batch", args.batch > 1), ("chat", args.chat)):
            if on:
                return f"--{name} has no effect with --stream-prefill: one prompt is read in pieces"
    return pieces_conflict(args, length_known=True) or usage_conflict(args, given)


def run(args: argparse.Namespace) -> int:
    """Prints the plan beside that of a cache that keeps everything, and what this machine has free."""
    cache, options = from_args(CacheConfig, args), from_args(EngineOptions, args)
    new_tokens = from_args(GenerationConfig, args).max_new_tokens
    from ...cache.policies import make_policy
    from ...models.config import ModelConfig, context_limit, read_config, with_rope_scaling
    from ...models.embedded import SHAPE
    from ..available import available_memory
    from ..loading import choose_device
    from ..memory import plan_run, weights_of
    from ..piece_memory import plan_pieces
    from ..tuning import policy_model

    device = choose_device(options.device)
    folder = find_config(args)
    config = ModelConfig.from_dict(SHAPE) if folder is None else read_config(folder)
    if options.rope_scaling is not None:
        config = with_rope_scaling(config, options.rope_scaling)
    context = context_limit(options.context, config)
    prompt_tokens, new_tokens = lengths(context // 2 if args.chat else context, args.prompt_tokens, new_tokens)
    weights, stored = weights_of(None if args.random_weights else folder, config, options.dtype, options.quant)

    def plan_with(cache: CacheConfig) -> Plan:
        return plan_run(
            config,
            cache,
            weights=weights,
            stored=stored,
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            chunk=options.chunk,
            device=device,
            batch=args.batch,
            conversation=context if args.chat else None,
        )

    plan, full = plan_with(cache), plan_with(everything(cache))
    make_policy(
        cache, policy_model(config), plan.budget or 0
    )  # an option that is missing is refused as in the run itself
    if args.stream_prefill is not None:
        plan = plan_pieces(
            config,
            cache,
            weights=weights,
            stored=stored,
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            chunk=options.chunk,
            piece=args.stream_prefill,
            context=context,
            device=device,
        )
    available = available_memory(str(device))
    name = args.random_weights or args.model or DEFAULT_MODEL
    with Console() as console:
        if args.json:
            console.text(json.dumps(document(name, context, plan, full, available)) + "\n")
        else:
            console.text(table(name, config, str(stored).removeprefix("torch."), plan, full, available))
    return 0


class ConfigOnly(Exception):
    """Raised where a download would begin: the config is there, and the weights are not wanted."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder


def find_config(args: argparse.Namespace) -> Path | None:
    """The folder (or file) with the config; of a hub model the small files are fetched, never the weights.

    None for the embedded model where it has not been fetched: its config comes with its weights, and is known.
    """
    if args.random_weights is not None:
        return Path(args.random_weights)
    from ...models.hub import resolve_model

    def stop(folder: Path | None, nbytes: int) -> None:
        raise ConfigOnly(folder)

    name = args.model or DEFAULT_MODEL
    try:
        return resolve_model(name, revision=args.revision, before_download=stop)
    except ConfigOnly as found:
        return found.folder


def lengths(context: int, prompt_tokens: int | None, new_tokens: int | None) -> tuple[int, int]:
    """Prompt and reply that fit the context; what was not asked for is cut to fit, what was is refused with both
    numbers (PromptError)."""
    reply = DEFAULT_MAX_NEW_TOKENS if new_tokens is None else new_tokens
    if new_tokens is not None and new_tokens >= context:
        raise PromptError(
            f"a reply of {new_tokens:,} tokens does not fit the context of {context:,} behind a prompt: plan fewer, or "
            "stretch the context with --rope-scaling KIND:FACTOR"
        )
    prompt = prompt_tokens or max(1, min(DEFAULT_PROMPT_TOKENS, context - reply))
    if prompt >= context:
        raise PromptError(
            f"a prompt of {prompt:,} tokens does not fit the context of {context:,}: plan a shorter one, or stretch "
            "the context with --rope-scaling KIND:FACTOR"
        )
    return prompt, min(reply, context - prompt)


def everything(cache: CacheConfig) -> CacheConfig:
    """The same cache without eviction: what other engines hold."""
    return CacheConfig(policy="full", kv_dtype=cache.kv_dtype)


def table(name: str, config: ModelConfig, stored: str, plan: Plan, full: Plan, available: Available | None) -> str:
    """What people read."""
    from ...cache.budget import size_text

    budget = "everything is kept" if plan.budget is None else f"budget {plan.budget:,} tokens per layer and KV head"
    prompts = "a prompt" if plan.batch == 1 else f"{plan.batch} prompts together, each"
    prompts = "the second turn of a conversation, like the first one" if plan.undo else prompts
    lines = [
        f"{name}: {config.num_layers} layers, {config.num_heads} heads, {config.num_kv_heads} KV heads of "
        f"{config.head_dim}, {stored}",
        f"{prompts} of {plan.prompt_tokens:,} tokens and up to {plan.new_tokens:,} new ones, {budget}",
        "",
        f"{'':<22}{'this run':>14}{'full cache':>14}",
    ]
    for label, field in ROWS:
        if field in ("undo", "reply") and not (getattr(plan, field) or getattr(full, field)):
            continue
        lines.append(f"{label:<22}{size_text(getattr(plan, field)):>14}{size_text(getattr(full, field)):>14}")
    lines.append("")
    if available is None:
        lines.append("this system does not say how much memory is free")
    else:
        verdict = "it fits" if plan.total <= available.bytes else "it does not fit"
        lines.append(f"{available.limit} has {size_text(available.bytes)} free: {verdict}")
    return "\n".join(lines) + "\n"


def document(name: str, context: int, plan: Plan, full: Plan, available: Available | None) -> dict[str, Any]:
    """What programs read."""
    return {
        "model": name,
        "context": context,
        **plan.as_dict(),
        "full_cache": full.as_dict(),
        "available": None if available is None else available.bytes,
        "available_limit": None if available is None else available.limit,
        "fits": None if available is None else plan.total <= available.bytes,
    }
