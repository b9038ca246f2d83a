"""`cake-infer serve`: OpenAI's interface over HTTP, many clients at once."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import CakeError, OptionError
from ..generation import GenerationConfig
from ..options import Flag, add_flags, from_args, not_empty
from ..serving.options import ServeOptions
from .console import Console
from .loading import (
    DEFAULT_MODEL,
    Load,
    add_generation_arguments,
    add_model_arguments,
    open_engine,
    usage_conflict,
)

if TYPE_CHECKING:
    from ..engine import Engine
    from ..serving.server import Server

KEY_VARIABLE = "CAKE_API_KEY"
SUMMARY = """\
Answers /v1/chat/completions, /v1/completions, /v1/models and /v1/documents as OpenAI's clients expect it, /metrics for
Prometheus, and /health. Requests are decoded together; one that has no room yet waits. See docs/serving.md."""

SERVE_FLAGS = {
    "host": Flag(
        "the address to listen on; others than this machine's own need a key", parse=not_empty, metavar="ADDRESS"
    ),
    "port": Flag("the port; 0 is any that is free", metavar="N"),
    "api_key": Flag(
        f"what clients must send as a bearer token; better in the variable {KEY_VARIABLE}, which no list of processes "
        "shows",
        not_empty,
        "KEY",
    ),
    "parallel": Flag("replies that are decoded together at most", metavar="N"),
    "queue": Flag("how many more may wait; further ones are told to come back (429)", metavar="N"),
    "arena": Flag(
        "KV memory of all replies together (2GiB); default what --parallel of the longest take, or what is free",
        metavar="SIZE",
    ),
    "slice": Flag("seconds for which a prompt is read before the running replies go on", metavar="S"),
    "max_body": Flag("bytes of a request at most", metavar="BYTES"),
    "max_prompt": Flag("tokens of a prompt at most; default what the context allows", metavar="N"),
    "documents": Flag("uploaded documents at most", metavar="N"),
    "document_bytes": Flag("bytes of the keys and values of all documents at most", metavar="BYTES"),
    "connections": Flag("open connections at most; further ones get 503", metavar="N"),
    "backlog": Flag("pieces of a stream that wait for a client at most; a slower one is dropped", metavar="N"),
    "patience": Flag("seconds in which a client must send its request, or take what it is sent", metavar="S"),
    "grace": Flag("seconds that running replies get when the server is stopped", metavar="S"),
}
NO_DEFAULT = ("seed", "stop", "logprobs")  # of a reply: a request says it, or nobody


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = f"{parser.description}\n\n{SUMMARY}"
    server = parser.add_argument_group("server")
    add_flags(server, ServeOptions, SERVE_FLAGS, skip=("public",))
    server.add_argument("--public", action="store_true", help="let anybody in who can reach the address, without a key")
    add_model_arguments(parser, skip=("kv_memory",))
    add_generation_arguments(parser, skip=NO_DEFAULT)
    output = parser.add_argument_group("output")
    output.add_argument("--quiet", action="store_true", help="no progress and notices; warnings stay")
    output.add_argument("--verbose", action="store_true", help="more notices, and a line of statistics for each reply")


def conflict(args: argparse.Namespace, given: set[str]) -> str | None:
    """Why these flags do not go together, or None. Raises OptionError."""
    if args.api_key is None:
        args.api_key = os.environ.get(KEY_VARIABLE) or None
    if "public" in given and args.api_key is not None:
        return "--public has no effect with an API key: leave one of them out"
    from_args(ServeOptions, args)
    return usage_conflict(args, given)


def run(args: argparse.Namespace, load: Load | None = None) -> int:
    """Serves until it is stopped. Raises CakeError."""
    options = from_args(ServeOptions, args)
    for name in ("fastapi", "uvicorn", "httptools", "prometheus_client"):
        if importlib.util.find_spec(name) is None:
            raise CakeError(f"serve needs the package {name}: pip install 'cake-infer[serve]'")
    from ...cache.budget import size_text
    from ..serving.room import arena_limit, warm_up
    from ..serving.server import Server, listen, serve
    from ..serving.service import Service

    defaults = from_args(GenerationConfig, args)
    with Console(quiet=args.quiet, verbose=args.verbose) as console:
        sock = listen(options.host, options.port)
        with sock, open_engine(args, console, load) as engine:
            console.progress.clear()
            if engine.tokenizer is None:
                raise OptionError(f"{engine.model_path} has no tokenizer: the server reads and writes text")
            warm_up(engine)
            limit = arena_limit(engine, options, defaults)
            service = Service(engine, options, names=_names(args, engine), limit=limit, defaults=defaults)
            server = Server(service)
            failures = _Failures(console, server)
            logging.getLogger("uvicorn.error").addHandler(failures)
            host, port = sock.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            console.notice(
                f"{service.model} at http://{shown}:{port}/v1: up to {options.parallel} replies together in "
                f"{size_text(limit)} of KV memory, {_key(options)}; Ctrl-C to stop"
            )
            try:
                serve(server, sock)
            finally:
                logging.getLogger("uvicorn.error").removeHandler(failures)
    return 0


def _names(args: argparse.Namespace, engine: Engine) -> tuple[str, ...]:
    """What a request may call the model; a folder goes by its own name."""
    given = str(args.random_weights or args.model or DEFAULT_MODEL)
    path = Path(given)
    return tuple(dict.fromkeys((path.resolve().name, given))) if path.exists() else (given,)


def _key(options: ServeOptions) -> str:
    return "no key" if options.api_key is None else "with a key"


class _Failures(logging.Handler):
    """What the HTTP library could not do, as warnings; how it starts and stops is nobody's business.

    Nor is what a second Ctrl-C breaks off.
    """

    def __init__(self, console: Console, server: Server) -> None:
        super().__init__(logging.WARNING)
        self._console, self._server = console, server

    def emit(self, record: logging.LogRecord) -> None:
        if not self._server.force_exit:
            self._console.warning(record.getMessage())
