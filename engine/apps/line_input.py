"""Where a chat reads its lines: prompt_toolkit or readline on a terminal, plain bytes from a pipe."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ...errors import CakeError, PromptError
from ..text import check_text, decode_input

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

PROMPT = "> "
CONTINUATION = ". "
BLOCK = '"""'
HISTORY_LINES = 1000
LONGEST_LINE = 1 << 27  # bytes of a message from a pipe, which may be endless


class LineInput(Protocol):
    """One line at a time, without its newline. Raises EOFError at the end, KeyboardInterrupt on Ctrl-C, PromptError
    for bytes that are no UTF-8 (the line is used up, the next one can be read)."""

    interactive: bool

    def read(self, prompt: str) -> str: ...


def open_line_input() -> LineInput:
    """The best one there is for this standard input."""
    if sys.stdin is None or not sys.stdin.isatty():
        return PipeInput()
    try:
        return ToolkitInput()
    except ImportError:
        return ReadlineInput()


def read_message(lines: LineInput) -> str:
    r"""One message: a line, lines joined by a final `\`, or a block between two `\"\"\"`. Errors as of `LineInput`."""
    line = lines.read(PROMPT)
    if line.lstrip().startswith(BLOCK):
        return _read_block(lines, line.lstrip().removeprefix(BLOCK))
    parts = []
    while line.endswith("\\"):
        parts.append(line.removesuffix("\\"))
        try:
            line = lines.read(CONTINUATION)
        except EOFError:
            line = ""
    return "\n".join([*parts, line])


def _read_block(lines: LineInput, first: str) -> str:
    """The lines up to the closing quotes or, from a pipe, the end of the input.

    What the quotes' own lines leave empty is no line. Raises PromptError where a terminal's text is not closed.
    """
    parts = [first]
    while not parts[-1].rstrip().endswith(BLOCK):
        try:
            parts.append(lines.read(CONTINUATION))
        except EOFError:
            if lines.interactive:
                raise PromptError(f"the text had no closing {BLOCK}: it is dropped") from None
            break
    else:
        parts[-1] = parts[-1].rstrip().removesuffix(BLOCK)
        if not parts[-1]:
            parts.pop()
    return "\n".join(parts[1:] if parts and not parts[0] else parts)


def history_file() -> Path:
    """Where typed lines are remembered, in the user's state folder; made on first use, readable by the user alone."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    path = Path(state) / "cake-infer" / "history"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        path.touch(mode=0o600)
    return path


class PipeInput:
    """Lines of a pipe or file; nothing is echoed and no prompt is shown."""

    interactive = False

    def read(self, prompt: str) -> str:
        data = b"" if sys.stdin is None else sys.stdin.buffer.readline(LONGEST_LINE + 1)
        if not data:
            raise EOFError
        if len(data) > LONGEST_LINE:
            raise CakeError(f"a line of standard input has more than {LONGEST_LINE >> 20} MiB, too many for a message")
        return decode_input(data, "the line").removesuffix("\n").removesuffix("\r")


class ReadlineInput:
    """Python's own `input`, with editing and history where the readline module exists."""

    interactive = True

    def __init__(self) -> None:
        try:
            import readline
        except ImportError:
            return
        try:
            path = history_file()
            readline.read_history_file(path)
        except (OSError, RuntimeError):
            return
        import atexit

        readline.set_history_length(HISTORY_LINES)
        atexit.register(_write_history, path)

    def read(self, prompt: str) -> str:
        try:
            if sys.stdout is not None and sys.stdout.isatty():
                line = input(prompt)
            else:  # text is redirected: the prompt must not be part of it
                print(prompt, end="", file=sys.stderr, flush=True)
                line = input()
        except UnicodeDecodeError as error:
            raise PromptError(f"the line is not valid UTF-8 (byte {error.start}): type it again") from error
        except (EOFError, KeyboardInterrupt):
            print(file=sys.stderr)  # the cursor still stands behind the prompt
            raise
        return _typed(line)


class ToolkitInput:
    """prompt_toolkit: editing over several rows, history search, pasted text kept in one piece.

    Raises ImportError where it is not installed.
    """

    interactive = True

    def __init__(self) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.history import FileHistory, History, InMemoryHistory
        from prompt_toolkit.output import create_output

        class Lines(FileHistory):
            def store_string(self, string: str) -> None:
                with suppress(OSError, UnicodeEncodeError):  # a line that cannot be remembered is still a line
                    super().store_string(string)

        history: History
        try:
            history = Lines(str(history_file()))
        except (OSError, RuntimeError):
            history = InMemoryHistory()
        terminal = sys.stdout is not None and sys.stdout.isatty()
        self._session: PromptSession[str] = PromptSession(
            history=history, output=create_output(stdout=sys.stdout if terminal else sys.stderr)
        )

    def read(self, prompt: str) -> str:
        return _typed(self._session.prompt(prompt))


def _typed(line: str) -> str:
    """A line from a terminal; broken bytes arrive as lone surrogates."""
    if any("\udc80" <= character <= "\udcff" for character in line):
        return decode_input(line.encode("utf-8", "surrogateescape"), "the line")
    check_text(line, "the line")
    return line


def _write_history(path: Path) -> None:
    import readline

    with suppress(OSError):
        readline.write_history_file(path)
