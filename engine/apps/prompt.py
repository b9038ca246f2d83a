"""What a one-shot run is asked: documents first, the question after, and their token ids."""

from __future__ import annotations

import argparse
import os
import random
import select
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from ...errors import PromptError
from ..options import not_empty
from ..text import check_text, decode_input
from .console import Console

if TYPE_CHECKING:
    from ..engine import Engine

STDIN = "standard input"
# how long a pipe may stay silent before the user is told what the command waits for
SILENCE_S = 2.0
# bytes of a text: read at once, and at most
BLOCK, LONGEST = 1 << 20, 1 << 30


@dataclass(frozen=True)
class Prompt:
    """One user message (or raw text), or a number of random tokens for a benchmark."""

    text: str = ""
    system: str | None = None
    raw: bool = False
    random_tokens: int = 0
    seed: int = 0

    def check(self) -> None:
        """Raise PromptError for a message without a text. Of a raw text only the tokenizer knows: it may add tokens."""
        if not (self.text or self.raw or self.random_tokens):
            raise PromptError("the prompt is empty: give --prompt TEXT, --prompt-file FILE or text on standard input")

    def ids(self, engine: Engine) -> list[int]:
        """Token ids as the model gets them; raises PromptError if there are none."""
        if self.random_tokens:
            return random_ids(engine, self.random_tokens, self.seed)
        if engine.tokenizer is None:
            raise PromptError("these weights come without a tokenizer: give --prompt-tokens N instead of a text")
        from ..encoding import check_length

        check_length(engine, self.text)
        if self.raw:
            ids = engine.tokenizer.encode(self.text)
            if not ids:
                raise PromptError("the prompt is empty, and this tokenizer adds no token of its own: give it some text")
            return ids
        self.check()
        if engine.template is None:
            raise PromptError("this model has no chat template: give --raw, and it continues the text as it stands")
        messages = [{"role": "system", "content": self.system}] if self.system else []
        return engine.template.encode([*messages, {"role": "user", "content": self.text}])


def add_prompt_arguments(group: argparse._ActionsContainer, raw: str, *, question: bool = True) -> None:
    """The flags that `read_prompt` reads. raw: what `--raw` does. question: whether one may follow."""
    if question:
        group.add_argument("--prompt", metavar="TEXT", help="the question; it follows the documents after a blank line")
    group.add_argument(
        "--prompt-file",
        metavar="FILE",
        action="append",
        type=not_empty,
        help="a UTF-8 document, - for standard input; may be given several times",
    )
    group.add_argument("--system", metavar="TEXT", help="the system prompt")
    group.add_argument("--raw", action="store_true", help=f"{raw}, without chat template; control tokens count")
    group.set_defaults(prompt=None, prompt_tokens=None)  # where a command does not have them


def prompt_conflict(args: argparse.Namespace) -> str | None:
    """Why the flags of a prompt do not go together, or None."""
    if args.raw and args.system is not None:
        return "--system has no effect with --raw: write it into the text"
    if args.prompt_file and args.prompt_file.count("-") > 1:
        return "--prompt-file - can be given once: standard input is read once"
    return None


def random_ids(engine: Engine, count: int, seed: int) -> list[int]:
    """`count` ids drawn evenly from the vocabulary, control tokens left out."""
    from ..fitting import room_for_reply

    room_for_reply(count, 0, engine.context)  # before so many are drawn
    special = engine.tokenizer.special_ids if engine.tokenizer is not None else frozenset(engine.config.eos_token_ids)
    ordinary = [token for token in range(engine.config.vocab_size) if token not in special]
    return random.Random(seed).choices(ordinary, k=count)


def join_documents(documents: Sequence[str], question: str | None = None) -> str:
    """The documents and then the question, a blank line between them; a text's final newline is not part of it."""
    parts = [text.removesuffix("\n").removesuffix("\r") for text in documents]
    return "\n\n".join(parts if question is None else [*parts, question])


def read_document(name: str) -> str:
    """The text of a file, or of standard input for `-`. Raises PromptError for what is no text."""
    if name == "-":
        return decode_input(_stdin_bytes(), STDIN)
    try:
        mode = os.stat(name).st_mode
        if stat.S_ISDIR(mode):
            raise PromptError(f"cannot read {name}: it is a folder")
        with open(name, "rb") as file:
            if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or file.isatty() or _is_stdin(file)):
                raise PromptError(f"cannot read {name}: it is neither a file nor a pipe")
            return decode_input(_read_all(file, name), name)
    except OSError as error:
        raise PromptError(f"cannot read {name}: {error.strerror or error}") from error


def read_prompt(args: argparse.Namespace, console: Console) -> Prompt | None:
    """The prompt that flags and standard input make up; None if there is none and a person sits at a terminal.

    Standard input is a document if it is a pipe or a file and no --prompt-file is given (there `-` stands for it).
    """
    if args.prompt_tokens:
        return Prompt(random_tokens=args.prompt_tokens, seed=args.seed or 0)
    documents = [read_document(name) for name in args.prompt_file or ()]
    if not documents and (args.prompt is None or stdin_is_data()):
        if args.prompt is None and sys.stdin is not None and sys.stdin.isatty():
            return None
        _tell_if_silent(console)
        text = decode_input(_stdin_bytes(), STDIN)
        if text or args.prompt is None:
            documents.append(text)
    question = None if args.prompt is None else argument_text(args.prompt, "--prompt")
    return Prompt(join_documents(documents, question), system_text(args), args.raw)


def system_text(args: argparse.Namespace) -> str | None:
    """The system prompt of the flags."""
    return None if args.system is None else argument_text(args.system, "--system")


def argument_text(text: str, name: str) -> str:
    """A text of the command line, decoded as UTF-8 like every other input, whatever the locale.

    Python smuggles the bytes that the locale cannot decode in as lone surrogates. Raises PromptError for broken UTF-8.
    """
    if any("\udc80" <= character <= "\udcff" for character in text):
        text = decode_input(os.fsencode(text), name)
    check_text(text, name)
    return text


def _stdin_bytes() -> bytes:
    return b"" if sys.stdin is None else _read_all(sys.stdin.buffer, STDIN)


def _read_all(file: BinaryIO, name: str) -> bytes:
    """In blocks, between which Ctrl-C is heard. Raises PromptError for what is longer than any text, or endless."""
    blocks: list[bytes] = []
    try:
        size = os.fstat(file.fileno()).st_size
    except (OSError, ValueError):
        size = 0
    while size <= LONGEST:
        blocks.append(file.read(BLOCK))
        size = max(size, len(blocks) * BLOCK - BLOCK + len(blocks[-1]))
        if len(blocks[-1]) < BLOCK:  # the end; a terminal would be asked once more
            break
    if size > LONGEST:
        raise PromptError(f"cannot read {name}: it has more than {LONGEST >> 20:,} MiB, too many for a text")
    return b"".join(blocks)


def _is_stdin(file: BinaryIO) -> bool:
    try:
        return os.path.sameopenfile(file.fileno(), 0)
    except OSError:
        return False


def stdin_mode() -> int:
    """The file mode of standard input; 0 where there is none."""
    try:
        return os.fstat(sys.stdin.fileno()).st_mode if sys.stdin is not None else 0
    except (OSError, ValueError):
        return 0


def stdin_is_data() -> bool:
    """Whether somebody sends a document: a pipe, a socket or a file, but no terminal and not /dev/null."""
    mode = stdin_mode()
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stat.S_ISREG(mode)


def _tell_if_silent(console: Console) -> None:
    """A pipe that nobody writes to would look like a hang."""
    mode = stdin_mode()
    if (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)) and not select.select([sys.stdin], [], [], SILENCE_S)[0]:
        console.notice("waiting for text on standard input (< /dev/null if there is none)")
