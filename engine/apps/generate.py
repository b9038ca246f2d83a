"""The one-shot command: a document and a question in, one reply out."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from ..options import UsageError, positive_count
from .console import Console
from .loading import (
    Load,
    add_generation_arguments,
    add_model_arguments,
    add_output_arguments,
    generation_config,
    open_engine,
    usage_conflict,
)
from .reply import INTERRUPTED, Reply

if TYPE_CHECKING:
    from ..engine import Engine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = parser.add_argument_group("prompt")
    text.add_argument("--prompt", metavar="TEXT", help="the question; it follows the documents after a blank line")
    text.add_argument(
        "--prompt-file",
        metavar="FILE",
        action="append",
        help="a UTF-8 document, - for standard input; may be given several times",
    )
    text.add_argument("--system", metavar="TEXT", help="the system prompt")
    text.add_argument(
        "--raw", action="store_true", help="continue the text as it stands, without chat template; control tokens count"
    )
    text.add_argument(
        "--prompt-tokens", metavar="N", type=positive_count, help="N random tokens instead of a text, for benchmarks"
    )
    add_generation_arguments(parser)
    add_model_arguments(parser)
    output = parser.add_argument_group("output")
    output.add_argument(
        "--json", action="store_true", help="one JSON object with text, ids and statistics instead of streamed text"
    )
    add_output_arguments(output)


def conflict(args: argparse.Namespace, given: set[str]) -> str | None:
    """Why these flags do not go together, or None."""
    if args.prompt_tokens:
        for name in ("prompt", "prompt_file", "system", "raw"):
            if name in given:
                return f"--{name.replace('_', '-')} has no effect with --prompt-tokens"
    if args.raw and args.system is not None:
        return "--system has no effect with --raw: write it into the text"
    if args.logprobs is not None and not args.json:
        return "--logprobs needs --json, which has room for them"
    if args.prompt_file and args.prompt_file.count("-") > 1:
        return "--prompt-file - can be given once: standard input is read once"
    return usage_conflict(args, given)


def run(args: argparse.Namespace, load: Load | None = None) -> int:
    """Generates one reply; returns the exit code. Raises CakeError."""
    from .prompt import read_prompt

    with Console(quiet=args.quiet, verbose=args.verbose) as console:
        generation = generation_config(args)
        prompt = read_prompt(args, console)
        if prompt is None:
            from .repl import talk

            for name in ("raw", "json"):
                if getattr(args, name):
                    raise UsageError(f"--{name} needs a prompt, and there is none: give --prompt or --prompt-file")
            return talk(args, console, load)
        ids: list[int] = []

        def before_weights(engine: Engine) -> None:
            ids.extend(prompt.ids(engine))
            engine.check_room(len(ids), generation)

        with open_engine(args, console, load, before_weights) as engine:
            reply = Reply(console, show=not args.json)
            reply.take(lambda on_progress: engine.stream(ids=ids, config=generation, on_progress=on_progress))
            if args.json:
                document = {"model": str(engine.model_path), "prompt_tokens": len(ids), **reply.document()}
                console.text(json.dumps(document, ensure_ascii=False, allow_nan=False) + "\n")
            reply.report()
        return INTERRUPTED if reply.finish_reason == "interrupted" else 0
