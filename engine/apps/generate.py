"""The one-shot command: a document and a question in, one reply out."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from ...cache.saved_file import read_header
from ..options import UsageError, flag_of, not_empty, positive_count
from .console import Console
from .loading import (
    USELESS_WHEN_FULL,
    Load,
    add_generation_arguments,
    add_model_arguments,
    add_output_arguments,
    add_pieces_argument,
    generation_config,
    open_engine,
    pieces_conflict,
    usage_conflict,
)
from .prompt import Prompt, add_prompt_arguments, prompt_conflict, read_prompt
from .reply import INTERRUPTED, Reply

if TYPE_CHECKING:
    from ..document import Document
    from ..engine import Engine
    from ..generation import GenerationConfig
    from .streamed import StreamedPrompt


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = parser.add_argument_group("prompt")
    add_prompt_arguments(text, "continue the text as it stands")
    text.add_argument(
        "--prompt-tokens", metavar="N", type=positive_count, help="N random tokens instead of a text, for benchmarks"
    )
    text.add_argument(
        "--cache",
        metavar="FILE",
        type=not_empty,
        help="a document that `compress` has read, in place of reading it again; the prompt is the question",
    )
    add_pieces_argument(text, "read the text, while a pipe is still written too,")
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
    if clash := prompt_conflict(args):
        return clash
    if args.logprobs is not None and not args.json:
        return "--logprobs needs --json, which has room for them"
    if args.cache is not None:
        for name in ("system", "raw", "prompt_tokens", "stream_prefill"):
            if name in given:
                return f"--{name.replace('_', '-')} has no effect with --cache: the document is read already"
        for name in ("budget", *USELESS_WHEN_FULL):
            if name in given and name not in ("window", "hold_by"):
                return f"{flag_of(name)} has no effect with --cache: nothing more is evicted"
        if "window" in given and args.decode_policy != "hold" and args.kv_bits is None:
            return "--window has no effect with --cache: nothing more is evicted (--decode-policy hold) or packed"
        if "policy" in given:
            return "--policy has no effect with --cache: nothing more is evicted"
    pieces = pieces_conflict(args, length_known=args.prompt_tokens is not None)
    return pieces or usage_conflict(args, given)


def run(args: argparse.Namespace, load: Load | None = None) -> int:
    """Generates one reply; returns the exit code. Raises CakeError."""
    from .streamed import streamed_prompt

    if args.cache is not None and load is None:
        read_header(args.cache)  # a file that is not there, or no saved cache, is told before torch is imported
    with Console(quiet=args.quiet, verbose=args.verbose) as console:
        generation = generation_config(args)
        if args.stream_prefill is not None and not args.prompt_tokens:
            streamed = streamed_prompt(args)
            if streamed is not None:
                return _stream(args, console, load, streamed, generation)
        prompt = read_prompt(args, console)
        if args.cache is not None:
            return _ask(args, console, load, prompt, generation)
        if prompt is None:
            from .repl import talk

            for name in ("raw", "json"):
                if getattr(args, name):
                    raise UsageError(f"--{name} needs a prompt, and there is none: give --prompt or --prompt-file")
            return talk(args, console, load)
        prompt.check()
        ids: list[int] = []
        pieces = {} if args.stream_prefill is None else {"stream_prefill": args.stream_prefill}

        def before_weights(engine: Engine) -> None:
            engine.one_prompt = True
            ids.extend(prompt.ids(engine))
            engine.check_room(len(ids), generation, **pieces)

        with open_engine(args, console, load, before_weights) as engine:
            reply = Reply(console, show=not args.json)
            reply.take(lambda on_progress: engine.stream(ids=ids, config=generation, on_progress=on_progress, **pieces))
            return _finish(args, console, engine, reply, len(ids))


def _stream(
    args: argparse.Namespace, console: Console, load: Load | None, prompt: StreamedPrompt, generation: GenerationConfig
) -> int:
    """A text that is read in pieces, as it comes."""

    def before_weights(engine: Engine) -> None:
        engine.one_prompt = True
        prompt.check(engine, generation, console)

    with open_engine(args, console, load, before_weights) as engine:
        reply = Reply(console, show=not args.json)
        reply.take(
            lambda on_progress: engine.stream(
                **prompt.arguments(on_progress, console), config=generation, on_progress=on_progress
            )
        )
        return _finish(args, console, engine, reply, reply.stats.prompt_tokens if reply.stats is not None else None)


def _finish(args: argparse.Namespace, console: Console, engine: Engine, reply: Reply, prompt_tokens: int | None) -> int:
    """What is written when the reply is over; the exit code."""
    if args.json:
        document = {"model": str(engine.model_path), "prompt_tokens": prompt_tokens, **reply.document()}
        console.text(json.dumps(document, ensure_ascii=False, allow_nan=False) + "\n")
    reply.report()
    return INTERRUPTED if reply.finish_reason == "interrupted" else 0


def _ask(
    args: argparse.Namespace, console: Console, load: Load | None, prompt: Prompt | None, generation: GenerationConfig
) -> int:
    """A question behind a document that was read before."""
    if prompt is None or not prompt.text:
        raise UsageError("--cache needs a question: give --prompt TEXT, or text on standard input")
    asked: list[tuple[Document, list[int]]] = []

    def before_weights(engine: Engine) -> None:
        engine.one_prompt = True
        document = engine.load_document(args.cache)
        # behind a plain text too the question follows after a blank line
        text = f"\n\n{prompt.text}" if isinstance(document.source, str) else prompt.text
        ids = engine.encode(text, cache=document)
        asked.append((document, ids))
        engine.check_room(len(ids) + int(document.kept_tokens), generation)

    with open_engine(args, console, load, before_weights) as engine:
        [(document, ids)] = asked
        reply = Reply(console, show=not args.json)
        reply.take(
            lambda on_progress: engine.stream(ids=ids, cache=document, config=generation, on_progress=on_progress)
        )
        return _finish(args, console, engine, reply, len(ids))
