"""What a one-shot run is asked where its text is read in pieces: documents as they come, the question after them."""

from __future__ import annotations

import argparse
import os
import select
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import PromptError
from ..results import Progress
from ..text import TextReader
from . import prompt as inputs
from .console import Console
from .prompt import SILENCE_S, STDIN, argument_text, stdin_mode, system_text

if TYPE_CHECKING:
    from ..engine import Engine
    from ..generation import GenerationConfig

BLOCK = 1 << 16  # bytes read at a time
LOOK_S = 0.1  # how often somebody may interrupt while a pipe is silent

OnProgress = Callable[[Progress], None]


@dataclass(frozen=True)
class StreamedPrompt:
    """One user message (or raw text) of documents and a question, none of which has been read.

    names: of files, `-` for standard input. piece: tokens read at a time.
    """

    names: tuple[str, ...]
    question: str | None
    system: str | None
    raw: bool
    piece: int

    def check(self, engine: Engine, generation: GenerationConfig, console: Console) -> None:
        """Refuse, before weights are loaded, what can be told beforehand.

        Files are encoded once as far as the context goes, and so it is known whether they fit; a pipe is not touched.
        Raises PromptError and MemoryLimit.
        """
        if engine.tokenizer is None:
            raise PromptError("these weights come without a tokenizer: give --prompt-tokens N instead of a text")
        if not self.raw and engine.template is None:
            raise PromptError("this model has no chat template: give --raw, and it continues the text as it stands")
        texts = self.texts(console.progress)
        tokens = None
        if texts.size is not None and texts.size >= engine.context:
            tokens = self._count(engine, texts, console)
        engine.check_room(tokens, generation, stream_prefill=self.piece)

    def _count(self, engine: Engine, texts: Texts, console: Console) -> int:
        """The tokens of files. Raises PromptError where there are too many."""
        from ..pieces import TextPieces

        assert engine.tokenizer is not None
        count, pieces = 0, TextPieces(engine.tokenizer, ((text, ()) for text in texts), BLOCK // 16, texts)
        for piece in pieces:
            count += len(piece)
            console.progress(Progress("tokenize", texts.read, texts.size or 0))
            if count >= engine.context:
                share = pieces.share or 1.0
                about = f"about {count / share:,.0f}" if share < 1 else f"{count:,}"
                raise PromptError(
                    f"the prompt has {about} tokens, but the model's context is {engine.context:,} and a reply needs "
                    "at least 1: shorten the prompt, or stretch the context with --rope-scaling KIND:FACTOR"
                )
        return count

    def arguments(self, on_progress: OnProgress, console: Console) -> dict[str, Any]:
        """Those of `Engine.stream` that say what is read."""
        texts = self.texts(on_progress, console)
        if self.raw:
            return {"prompt": texts, "stream_prefill": self.piece}
        system = [{"role": "system", "content": self.system}] if self.system else []
        return {"messages": [*system, {"role": "user", "content": texts}], "stream_prefill": self.piece}

    def texts(self, on_progress: OnProgress, console: Console | None = None) -> Texts:
        return Texts(self.names, self.question, on_progress, console)


class Texts:
    """The documents and then the question as an iterator of texts, a blank line between them.

    A text's final newline is not part of it. size: bytes of all documents, None with a pipe among them; read: so far.
    Raises PromptError, with the byte offset, for what is no text.
    """

    def __init__(
        self, names: tuple[str, ...], question: str | None, on_progress: OnProgress, console: Console | None = None
    ) -> None:
        self._names, self._question, self._on_progress, self._console = names, question, on_progress, console
        self.size = _total_size(names)
        self.read = 0
        self._texts = self._run()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._texts)

    @property
    def share(self) -> float | None:
        """What part of the bytes has been read, 0 to 1; None where nobody knows how many there are."""
        return None if self.size is None else min(1.0, self.read / max(self.size, 1))

    def _run(self) -> Iterator[str]:
        separator = ""
        for name in self._names:
            begun = name != "-"  # a pipe that nothing comes from is no document
            if begun:
                yield separator
            for text in self._document(name):
                if not begun:
                    yield separator
                begun = True
                yield text
            if begun:
                separator = "\n\n"
        if self._question is not None:
            yield separator + self._question

    def _document(self, name: str) -> Iterator[str]:
        """A document without its final newline."""
        reader, held = TextReader(STDIN if name == "-" else name), ""
        for data in self._blocks(name):
            text = held + reader.push(data)
            held = text[max(len(text.rstrip("\r\n")), len(text) - 2) :]
            text = text[: len(text) - len(held)]
            if text:
                yield text
        held = (held + reader.finish()).removesuffix("\n").removesuffix("\r")
        if held:
            yield held

    def _blocks(self, name: str) -> Iterator[bytes]:
        if name == "-":
            yield from self._stdin()
            return
        try:
            with open(name, "rb", buffering=0) as file:
                while data := file.read(BLOCK):
                    self.read += len(data)
                    yield data
        except OSError as error:
            raise PromptError(f"cannot read {name}: {error.strerror or error}") from error

    def _stdin(self) -> Iterator[bytes]:
        """A pipe is read as it is written, and while it is silent an interrupt is looked for."""
        if sys.stdin is None:
            return
        if stat.S_ISREG(mode := stdin_mode()):  # read from where it stands, which stays: it may be read again
            descriptor = sys.stdin.fileno()
            at = os.lseek(descriptor, 0, os.SEEK_CUR)
            while data := os.pread(descriptor, BLOCK, at):
                at += len(data)
                self.read += len(data)
                yield data
            return
        pipe = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
        silent = 0.0
        while True:
            while pipe and not select.select([sys.stdin], [], [], LOOK_S)[0]:
                silent += LOOK_S
                if self._console is not None and silent - LOOK_S < SILENCE_S <= silent and not self.read:
                    self._console.notice("waiting for text on standard input (< /dev/null if there is none)")
                self._on_progress(Progress("wait", 0, 0))
            data = os.read(sys.stdin.fileno(), BLOCK) if pipe else sys.stdin.buffer.read(BLOCK)
            if not data:
                return
            self.read += len(data)
            yield data


def streamed_prompt(args: argparse.Namespace) -> StreamedPrompt | None:
    """The prompt that flags and standard input make up, as `read_prompt` does; None where a person sits at a terminal.

    Raises PromptError for a file that is not there.
    """
    names = tuple(args.prompt_file or ())
    if not names and (args.prompt is None or inputs.stdin_is_data()):
        if args.prompt is None and sys.stdin is not None and sys.stdin.isatty():
            return None
        names = ("-",)
    for name in names:
        if name != "-" and (os.path.isdir(name) or not os.access(name, os.R_OK)):
            reason = "Is a directory" if os.path.isdir(name) else "Permission denied"
            raise PromptError(f"cannot read {name}: {reason if os.path.exists(name) else 'No such file or directory'}")
    question = None if args.prompt is None else argument_text(args.prompt, "--prompt")
    return StreamedPrompt(names, question, system_text(args), args.raw, args.stream_prefill)


def _total_size(names: tuple[str, ...]) -> int | None:
    total = 0
    for name in names:
        if name == "-":
            regular = stat.S_ISREG(stdin_mode())
            size = os.fstat(sys.stdin.fileno()).st_size - os.lseek(sys.stdin.fileno(), 0, os.SEEK_CUR) if regular else 0
        else:
            regular = os.path.isfile(name)
            size = os.path.getsize(name) if regular else 0
        if not regular:
            return None
        total += max(size, 0)
    return total
