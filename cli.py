"""The command line: parses and dispatches, nothing else. Imports neither torch nor tokenizers."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, NoReturn

from . import __version__
from .engine.options import UsageError, check_options, spell_flags
from .errors import CakeError, OptionError

DESCRIPTION = """\
Read a long document, keep what matters of it in a cache of fixed size, and answer. Without a command: one reply to a
prompt (--prompt, --prompt-file or standard input), or a chat where there is none and a terminal."""

EXIT_CODES = (
    "0; 1 an error, in one line on standard error; 2 a wrong command line or value; 130 interrupted; "
    "141 the reader of standard output went away."
)

# name -> (module in engine.apps, what it does); the one-shot command has no name
COMMANDS = {
    "chat": ("repl", "a conversation at the terminal"),
    "compress": ("compress", "read a document once and save what is kept of it, for many questions"),
    "serve": ("serve", "an HTTP server that OpenAI's clients can talk to"),
    "plan": ("plan", "what a run takes in memory, without loading the model"),
    "eval fidelity": ("eval_fidelity", "how far each policy's cache is from the full one, over many prompts"),
    "eval needle": ("eval_needle", "whether facts in a long text are found again, by length, depth and policy"),
    "eval longbench": ("eval_longbench", "LongBench's tasks with its prompts and metrics, per policy and budget"),
    "eval generation": ("eval_generation", "what each rule of decoding loses over a long continuation, step by step"),
    "eval speed": ("eval_speed", "prefill, decode and peak memory of each policy"),
    "tune": ("tune", "CAKE's constants for a model, by grid search over your own texts"),
    "inspect": ("inspect", "a page that shows what every layer and head kept of one prompt"),
    "policies": ("policies", "the eviction methods: what each reads, costs and can be told"),
    "models": ("models", "the models that have a short name, and which are on this machine"),
    "import-gguf": ("import_gguf", "turn a GGUF file into a model folder"),
}
ONE_SHOT = "generate"

ERROR, USAGE, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141


class Parser(argparse.ArgumentParser):
    """Options are given in full, and a wrong command line is one line and exit code 2."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **keywords)

    def error(self, message: str) -> NoReturn:
        if message.endswith("expected one argument"):
            message += " (one that begins with - is written behind =, as in --prompt=-1)"
        message = re.sub(r"^argument (\S+): must be", r"\1 must be", " ".join(message.split()))
        raise UsageError(f"{message}; see {self.prog} --help")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Help and version. argparse would take no notice of a full disk, or of a reader that has gone."""
        if message:
            print(message, end="", file=sys.stdout if file is None else file, flush=True)


def build_parser(command: str | None) -> argparse.ArgumentParser:
    """The parser of one command (None: the one-shot); imports that command's module and no other."""
    if command is None:
        listing = "\n".join(f"  {name:<15} {summary}" for name, (_, summary) in COMMANDS.items())
        parser = Parser(
            prog="cake-infer",
            usage="cake-infer [command] [flags]",
            description=f"{DESCRIPTION}\n\ncommands (each has its own --help):\n{listing}",
            epilog=f"Exit codes: {EXIT_CODES}\nStandard output has the generated text and nothing else.",
        )
        parser.add_argument("--version", action="version", version=f"cake-infer {__version__}")
    else:
        parser = Parser(prog=f"cake-infer {command}", description=COMMANDS[command][1])
    app(command).add_arguments(parser)
    return parser


def command_of(words: Sequence[str]) -> str | None:
    """The command that a command line begins with, of one word or two; None for the one-shot."""
    return next((name for n in (2, 1) if (name := " ".join(words[:n])) in COMMANDS), None)


def app(command: str | None) -> Any:
    """A command's module: `add_arguments(parser)`, `run(args) -> exit code`, and `conflict` where flags may clash."""
    name = ONE_SHOT if command is None else COMMANDS[command][0]
    return import_module(f".engine.apps.{name}", __package__)


def given_flags(parser: argparse.ArgumentParser, argv: Sequence[str]) -> set[str]:
    """The destinations of the flags that stand in the command line, whatever their values."""
    names = {word.split("=", 1)[0] for word in argv if word.startswith("-")}
    return {action.dest for action in parser._actions if names.intersection(action.option_strings)}


def repeated_flag(parser: argparse.ArgumentParser, argv: Sequence[str]) -> str | None:
    """Why a flag stands in the command line twice in vain, or None: the first of its values would be dropped."""
    names = [word.split("=", 1)[0] for word in argv if word.startswith("-")]
    for action in parser._actions:
        if action.nargs == 0 or isinstance(action, argparse._AppendAction):
            continue
        if sum(name in action.option_strings for name in names) > 1:
            hint = "give all its values behind one" if action.nargs == "+" else "give it once"
            return f"{action.option_strings[-1]} is given twice: {hint}"
    return None


def main(argv: Sequence[str] | None = None, load: Callable[..., Any] | None = None) -> int:
    """Runs one command and returns its exit code; `load` replaces `Engine.load` in tests."""
    words = list(sys.argv[1:] if argv is None else argv)
    command = command_of(words)
    del words[: len(command.split()) if command else 0]
    try:
        if command is None and words and (group := [name for name in COMMANDS if name.startswith(f"{words[0]} ")]):
            return _show_group(words, group)
        module, parser = app(command), build_parser(command)
        if command is None and words and not words[0].startswith("-"):
            parser.error(f"no such command: {words[0]!r} (there are {', '.join(COMMANDS)}; a text goes to --prompt)")
        args = parser.parse_args(words)
        if twice := repeated_flag(parser, words):
            parser.error(twice)
        try:
            if hasattr(module, "conflict") and (conflict := module.conflict(args, given_flags(parser, words))):
                parser.error(spell_flags(conflict))
            check_options(args)
        except OptionError as error:
            parser.error(spell_flags(str(error)))
        if load is not None:
            return int(module.run(args, load))
        if hasattr(args, "random_weights"):
            import_module(".engine.apps.loading", __package__).check_model(args)
        return int(module.run(args))
    except UsageError as error:
        return _fail(error, USAGE)
    except CakeError as error:
        return _fail(error, ERROR)
    except MemoryError:
        return _fail("out of memory: lower --budget, or see what the run needs with `cake-infer plan`", ERROR)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _forget_stdout()
        return BROKEN_PIPE
    except OSError as error:  # a file that no command expected to be odd
        return _fail(f"cannot use {error.filename or 'a file'}: {error.strerror or error}", ERROR)
    except SystemExit as error:  # --help and --version
        return int(error.code or 0)


def _show_group(words: Sequence[str], group: Sequence[str]) -> int:
    """The commands that begin with the same word, to somebody who asks for them or gives none of them."""
    if not {"-h", "--help"}.intersection(words[1:2]):
        what = f"no such command: {' '.join(words[:2])!r}" if words[1:] else f"{words[0]} alone is no command"
        raise UsageError(f"{what} (there are {', '.join(group)})")
    listing = "\n".join(f"  {name:<16} {COMMANDS[name][1]}" for name in group)
    print(f"usage: cake-infer {words[0]} NAME [flags]\n\ncommands (each has its own --help):\n{listing}", flush=True)
    return 0


def _fail(message: object, code: int) -> int:
    with suppress(OSError, ValueError):  # nobody may be listening; the exit code remains
        print(f"error: {spell_flags(' '.join(str(message).split()))}", file=sys.stderr, flush=True)
    return code


def _forget_stdout() -> None:
    """What is still buffered goes nowhere: the interpreter would complain about it on its way out."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)
