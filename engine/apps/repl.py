"""The chat command: a conversation at a terminal, or one message a line from a pipe."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

from ...cache.budget import size_text
from ...errors import CakeError, PromptError
from ..generation import GenerationConfig
from .console import Console
from .line_input import LineInput, open_line_input, read_message
from .loading import (
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
from .prompt import join_documents, read_document, system_text
from .reply import OnProgress, Reply

if TYPE_CHECKING:
    from ..chat import Chat
    from ..engine import Engine
    from ..results import Piece

HELP = r"""/help            this text
/exit            end (so does Ctrl-D)
/clear           start a new conversation (also /reset); attached documents are dropped
/stats           context used, and the figures of the last reply
/regen           another reply to the last message, in place of the last one
/undo            take the last message and its reply back (one turn)
/save FILE       write the conversation to a file: what is kept of it, and its text
/load FILE       go on with a saved conversation, of the same model, in place of this one
/read FILE       attach a document to the next message
/system TEXT     set the system prompt and start a new conversation; without TEXT, show it
/budget N        KV budget, tokens per layer and KV head: a smaller one gives tokens up at once, a larger one brings
                 none of them back; without N, show it and what is left
A line that ends with \ goes on in the next one; a line with only three quotes begins and ends a longer text.
Ctrl-C stops a reply. A message that begins with / is written with //."""

# the turn, in tokens, for which memory is checked before weights are read
NOMINAL_TURN = 2048

# share of the context from which on every turn says how much is left
NEARLY_FULL = 0.8

ENDS = ("exit", "quit")
TAKE_ARGUMENTS = ("save", "load", "read", "system", "budget")

# what can be done where the context ends
WAYS_ON = "/undo takes the last turn back, /save FILE keeps the conversation, /clear starts a new one"

SHOWN = 60  # characters of a message that was taken back


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="the system prompt")
    add_generation_arguments(parser, skip=("logprobs",))
    add_model_arguments(parser)
    add_pieces_argument(parser, "read long messages and documents")
    add_output_arguments(parser.add_argument_group("output"))


def conflict(args: argparse.Namespace, given: set[str]) -> str | None:
    """Why these flags do not go together, or None."""
    return pieces_conflict(args, length_known=True) or usage_conflict(args, given)


def run(args: argparse.Namespace, load: Load | None = None) -> int:
    """Talks until the end of the input; returns the exit code."""
    with Console(quiet=args.quiet, verbose=args.verbose) as console:
        return talk(args, console, load)


def talk(args: argparse.Namespace, console: Console, load: Load | None = None) -> int:
    """`run` on a console that is open already: the one-shot command at a terminal without a prompt."""
    generation = generation_config(args)
    system = system_text(args)

    def before_weights(engine: Engine) -> None:
        if engine.tokenizer is None or engine.template is None:
            missing = "tokenizer" if engine.tokenizer is None else "chat template"
            raise PromptError(f"this model has no {missing}, so it cannot chat: give a prompt with --raw --prompt TEXT")
        engine.check_room(max(1, min(NOMINAL_TURN, engine.context // 2)), generation, conversation=True)

    with open_engine(args, console, load, before_weights) as engine:
        return Repl(engine, console, open_line_input(), generation, system, args.stream_prefill).run()


class Repl:
    """One conversation and the documents that wait for its next message."""

    def __init__(
        self,
        engine: Engine,
        console: Console,
        lines: LineInput,
        generation: GenerationConfig,
        system: str | None,
        piece: int | None = None,
    ) -> None:
        self._engine, self._console, self._lines, self._generation = engine, console, lines, generation
        self.chat: Chat = engine.chat(system=system, stream_prefill=piece)
        self._documents: list[tuple[str, str]] = []
        self._failed = False
        self._commands = {
            "help": self._help,
            "clear": self._clear,
            "reset": self._clear,
            "stats": self._stats,
            "regen": self._regen,
            "undo": self._undo,
            "save": self._save,
            "load": self._load,
            "read": self._read,
            "system": self._system,
            "budget": self._budget,
        }

    def run(self) -> int:
        """Reads messages until /exit or the end of the input. A pipe with a failed turn gives exit code 1."""
        if self._lines.interactive:
            self._console.notice("/help lists the commands, Ctrl-D ends")
        while True:
            try:
                message = read_message(self._lines)
            except EOFError:
                break
            except KeyboardInterrupt:
                if not self._lines.interactive:
                    raise
                self._console.notice("Ctrl-D or /exit ends the chat")
                continue
            except PromptError as error:
                self._fail(error)
                continue
            if message.strip() in [f"/{name}" for name in ENDS]:
                break
            try:
                self._handle(message)
            except CakeError as error:
                self._fail(error)
            except KeyboardInterrupt:  # just before or just after a reply
                if not self._lines.interactive:
                    raise
                self._console.notice("interrupted")
        return 1 if self._failed and not self._lines.interactive else 0

    def _handle(self, message: str) -> None:
        if not message.strip():
            return
        if message.startswith("//"):
            self._turn(message[1:])
        elif message.startswith("/"):
            name, argument = (part.strip() for part in message[1:].partition(" ")[::2])
            alone = name in ENDS or (name in self._commands and name not in TAKE_ARGUMENTS)
            if argument and alone:
                raise PromptError(f"/{name} stands alone: {argument!r} has no effect on it")
            command = self._commands.get(name)
            if command is None:
                raise PromptError(f"unknown command /{name}: /help lists them (// begins a message with /)")
            command(argument)
        else:
            self._turn(message)

    def _fail(self, error: CakeError) -> None:
        self._failed = True
        self._console.error(error)

    def _turn(self, message: str) -> None:
        """One message and its reply. A turn that fails or stops before its first token leaves all as it was."""
        text = join_documents([document for _, document in self._documents], message)
        if self._speak(lambda on_progress: self.chat.send(text, config=self._generation, on_progress=on_progress)):
            self._documents.clear()

    def _speak(
        self,
        stream: Callable[[OnProgress], Generator[Piece, None, None]],
        without_reply: str = "the message is dropped",
    ) -> bool:
        """Show a reply; whether there is one, at least its first token. `without_reply`: what it means if not."""
        before = self.chat.tokens_used
        reply = Reply(self._console)
        try:
            reply.take(stream)
        except PromptError as error:
            if "context" not in str(error):
                raise
            raise PromptError(f"{error}; {WAYS_ON}") from error
        if reply.finish_reason == "interrupted":
            if not self._lines.interactive:
                raise KeyboardInterrupt
            what = "what there is of the reply stays in the conversation" if reply.pieces else without_reply
            self._console.notice(f"interrupted: {what}")
        reply.report(f"context {self.chat.tokens_used:,} of {self.chat.context:,}")
        self._tell_context(self.chat.tokens_used - before)
        return bool(reply.pieces)

    def _tell_context(self, turn_tokens: int) -> None:
        """Before the limit is met: when it is near, or when a second turn like this one would not fit."""
        used, context = self.chat.tokens_used, self.chat.context
        if used + turn_tokens > context or used > NEARLY_FULL * context:
            self._console.notice(f"context nearly full: {used:,} of {context:,} tokens used; {WAYS_ON}")

    # -- commands -----------------------------------------------------------------------------------------------------

    def _help(self, argument: str) -> None:
        self._console.answer(HELP)

    def _clear(self, argument: str) -> None:
        self.chat.clear()
        self._documents.clear()
        self._console.answer("a new conversation")

    def _stats(self, argument: str) -> None:
        self._context()
        if self._documents:
            self._console.answer(f"attached: {', '.join(name for name, _ in self._documents)}")
        if self.chat.stats is not None:
            self._console.answer(self.chat.stats.line())

    def _regen(self, argument: str) -> None:
        self._speak(
            lambda on_progress: self.chat.regenerate(config=self._generation, on_progress=on_progress),
            "the last reply stays",
        )

    def _undo(self, argument: str) -> None:
        message = " ".join(self.chat.undo().split())
        shown = message if len(message) <= SHOWN else message[: SHOWN - 3] + "..."
        self._console.answer(f"taken back: {shown}")
        self._context()

    def _save(self, argument: str) -> None:
        path = self._file(argument, "/save")
        self.chat.save(path)
        self._console.answer(f"saved: {path}, {size_text(os.path.getsize(path))}")

    def _load(self, argument: str) -> None:
        path = self._file(argument, "/load")
        self.chat.load(path)
        turns = sum(message["role"] == "user" for message in self.chat.messages)
        self._console.answer(f"{path}: a conversation of {turns} {'turn' if turns == 1 else 'turns'}")
        self._context()

    def _file(self, argument: str, command: str) -> str:
        name = _unquoted(argument)
        if not name:
            raise PromptError(f"{command} needs the name of a file")
        return os.path.expanduser(name)

    def _context(self) -> None:
        self._console.answer(f"context: {self.chat.tokens_used:,} of {self.chat.context:,} tokens used")

    def _read(self, argument: str) -> None:
        name = _unquoted(argument)
        if not name:
            raise PromptError("/read needs the name of a file")
        if name == "-":
            raise PromptError("/read takes a file: standard input is where your messages come from")
        from ..encoding import check_length

        text = read_document(os.path.expanduser(name))
        assert self._engine.tokenizer is not None
        check_length(self._engine, text, self.chat.tokens_used, self._console.progress)
        tokens = len(self._engine.tokenizer.encode(text, add_bos=False, allow_special=False))
        room = self.chat.context - self.chat.tokens_used
        if tokens >= room:
            raise PromptError(
                f"{name} has {tokens:,} tokens, and {max(room, 0):,} of the context's {self.chat.context:,} are left: "
                "give a shorter file, or /clear first"
            )
        self._documents.append((name, text))
        self._console.answer(f"{name}: {len(text):,} characters, {tokens:,} tokens, read with your next message")

    def _system(self, argument: str) -> None:
        if not argument:
            self._console.answer(f"system prompt: {self.chat.system or 'none'}")
            return
        self.chat.clear()
        self.chat.system = argument
        self._console.answer("system prompt set; a new conversation")

    def _budget(self, argument: str) -> None:
        if argument:
            self.chat.set_budget(argument)
        self._console.answer(f"budget: {self.chat.budget_text}")


def _unquoted(name: str) -> str:
    """A file name as people paste it, with or without quotes."""
    if len(name) >= 2 and name[0] == name[-1] and name[0] in "'\"":
        return name[1:-1]
    return name
