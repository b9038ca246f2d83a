"""The chat at a real terminal (a pty) and from a pipe with a slow stand-in for the engine, and on a real small one."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import IO, Any

import pytest
from cake_infer.cache.config import CacheConfig
from cake_infer.engine.apps.console import Console
from cake_infer.engine.apps.line_input import CONTINUATION, PROMPT, PipeInput, read_message
from cake_infer.engine.apps.progress import ProgressBar
from cake_infer.engine.apps.repl import Repl
from cake_infer.engine.engine import Engine
from cake_infer.engine.generation import GenerationConfig
from cake_infer.engine.results import Piece
from cake_infer.errors import CakeError, PromptError

FAKE = Path(__file__).parent / "fake_engine.py"
CTRL_C, CTRL_D = b"\x03", b"\x04"
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[=>]|\r")


class Terminal:
    """A chat in a pty, whose output is read as it comes."""

    def __init__(
        self, *argv: str, editor: str, home: Path, stdout: IO[bytes] | None = None, **environment: object
    ) -> None:
        self.master, slave = pty.openpty()
        settings = {
            "HOME": home,
            "XDG_STATE_HOME": home / "state",
            "TERM": "xterm",
            "PROMPT_TOOLKIT_NO_CPR": 1,
            "LINE_EDITOR": editor,
            **environment,
        }
        self.process = subprocess.Popen(
            [sys.executable, str(FAKE), "chat", *argv],
            stdin=slave,
            stdout=stdout or slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=_take_terminal,
            env={**os.environ, **{name: str(value) for name, value in settings.items()}},
        )
        os.close(slave)
        self.seen = ""
        self._read_to = 0

    def expect(self, text: str, seconds: float = 20) -> str:
        """Waits until `text` comes, after what was expected before; returns everything up to its end."""
        deadline = time.monotonic() + seconds
        while True:
            at = self.seen.find(text, self._read_to)
            if at >= 0:
                start, self._read_to = self._read_to, at + len(text)
                return self.seen[start : self._read_to]
            left = deadline - time.monotonic()
            assert left > 0, f"{text!r} did not come; the terminal shows:\n{self.seen}"
            if select.select([self.master], [], [], left)[0]:
                try:
                    data = os.read(self.master, 65536)
                except OSError:  # the other end is closed
                    data = b""
                assert data, f"the chat ended before {text!r}:\n{self.seen}"
                self.seen += ESCAPES.sub("", data.decode("utf-8", "replace"))

    def type(self, data: bytes | str) -> None:
        os.write(self.master, data.encode() if isinstance(data, str) else data)

    def line(self, text: str) -> None:
        self.type(text + "\r")

    def interrupt_line(self) -> None:
        """Ctrl-C at a prompt; again where it strikes just before readline waits, which then does not notice."""
        for _ in range(10):
            self.type(CTRL_C)
            try:
                self.expect("Ctrl-D", 2)
                return
            except AssertionError:
                continue
        raise AssertionError(f"Ctrl-C at the prompt had no effect:\n{self.seen}")

    def ready(self) -> None:
        """Until the next prompt."""
        self.expect(PROMPT.strip())

    def end(self) -> int:
        """Ctrl-D, and the exit code. One that comes before the line editor listens is lost, as for people."""
        for _ in range(10):
            self.type(CTRL_D)
            deadline = time.monotonic() + 2
            while self.process.poll() is None and time.monotonic() < deadline:
                if select.select([self.master], [], [], 0.05)[0]:
                    try:
                        self.seen += os.read(self.master, 65536).decode("utf-8", "replace")
                    except OSError:
                        break
            if self.process.poll() is not None:
                break
        return self.process.wait(timeout=5)


def _take_terminal() -> None:
    """In the child: the pty becomes its controlling terminal, so that Ctrl-C is a signal."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


EDITORS = ["prompt_toolkit", "readline"]


@pytest.fixture(params=EDITORS)
def chat(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    """Opens a chat in a pty, with each of the two line editors."""
    if request.param == "prompt_toolkit":
        pytest.importorskip("prompt_toolkit")
    opened: list[Terminal] = []

    def start(*argv: str, **environment: Any) -> Terminal:
        opened.append(Terminal(*argv, editor=request.param, home=tmp_path, **environment))
        opened[-1].ready()
        return opened[-1]

    yield start
    for terminal in opened:
        if terminal.process.poll() is None:
            terminal.process.kill()
            terminal.process.wait()
        os.close(terminal.master)


def test_ctrl_c_stops_a_reply_and_the_conversation_goes_on(chat: Callable[..., Terminal]) -> None:
    terminal = chat(FAKE_ENDLESS="ttt")
    terminal.line("first")
    terminal.expect("[0] one two three")
    terminal.type(CTRL_C)
    terminal.expect("stays in the conversation")
    terminal.ready()
    terminal.line("second")
    # the broken pair counts as two messages: roles alternate
    terminal.expect("[2] one two")
    terminal.type(CTRL_C)
    terminal.expect("stays in the conversation")
    terminal.ready()
    terminal.interrupt_line()
    terminal.ready()
    terminal.line("third")
    terminal.expect("[4] one")
    terminal.type(CTRL_C)
    terminal.expect("stays in the conversation")
    terminal.ready()
    assert terminal.end() == 0
    assert "Traceback" not in terminal.seen


def test_ctrl_c_while_the_message_is_read_drops_it(chat: Callable[..., Terminal]) -> None:
    terminal = chat(FAKE_ENDLESS="p")
    terminal.line("first")
    terminal.expect("reading")
    terminal.type(CTRL_C)
    terminal.expect("the message is dropped")
    terminal.ready()
    terminal.line("second")
    terminal.expect("[0] one", 30)
    terminal.ready()
    assert terminal.end() == 0
    assert "Traceback" not in terminal.seen


def test_ctrl_c_stops_a_reply_that_is_written_again_and_the_rest_of_the_commands_go_on(
    chat: Callable[..., Terminal],
) -> None:
    terminal = chat(FAKE_ENDLESS="-tt", FAKE_TOKENS="one two three four five")
    terminal.line("first")
    terminal.expect("tok")
    terminal.ready()
    terminal.line("second")
    terminal.expect("[2] one two three")
    terminal.type(CTRL_C)
    terminal.expect("stays in the conversation")
    terminal.ready()
    terminal.line("/regen")
    terminal.expect("[2] one two")
    terminal.type(CTRL_C)
    terminal.expect("stays in the conversation")
    terminal.ready()
    terminal.interrupt_line()
    terminal.ready()
    terminal.line("/regen")
    terminal.expect("[2] one two three four five")
    terminal.ready()
    terminal.line("/undo")
    terminal.expect("taken back: second")
    terminal.ready()
    terminal.line("third")
    terminal.expect("[2] one")
    terminal.expect("tok")
    terminal.ready()
    assert terminal.end() == 0
    assert "Traceback" not in terminal.seen


def test_ctrl_c_before_a_reply_is_written_again_leaves_the_last_one(chat: Callable[..., Terminal]) -> None:
    terminal = chat(FAKE_ENDLESS="-p")
    terminal.line("first")
    terminal.expect("tok")
    terminal.ready()
    terminal.line("/regen")
    terminal.expect("reading")
    terminal.type(CTRL_C)
    terminal.expect("interrupted: the last reply stays")
    terminal.ready()
    terminal.line("second")
    terminal.expect("[2] one", 30)
    terminal.ready()
    assert terminal.end() == 0


def test_a_terminal_shows_a_bar_with_time_left_while_a_long_message_is_read(chat: Callable[..., Terminal]) -> None:
    terminal = chat(FAKE_PREFILL=1.5)
    terminal.line("first")
    shown = terminal.expect("left")
    assert re.search(r"reading  \[#+\.+\] +\d+%  layer \d+/10  \ds left", shown)
    terminal.expect("[0] one")
    terminal.ready()
    terminal.end()


def test_quiet_shows_neither_bar_nor_statistics(chat: Callable[..., Terminal]) -> None:
    terminal = chat("--quiet", FAKE_PREFILL=1)
    terminal.line("first")
    shown = terminal.expect("six\n") + terminal.expect(PROMPT.strip())
    assert "reading" not in shown
    assert "tok" not in shown
    terminal.end()


def test_commands_answer_at_the_terminal(chat: Callable[..., Terminal], tmp_path: Path) -> None:
    document = tmp_path / "a document.txt"
    document.write_text("Das Dokument.\n")
    terminal = chat("--system", "be kind")
    terminal.line("/help")
    for command in ("/help", "/exit", "/clear", "/stats", "/read FILE", "/system TEXT", "/budget N"):
        terminal.expect(command)
    terminal.line("/system")
    terminal.expect("system prompt: be kind")
    terminal.line(f"/read {document}")
    terminal.expect("14 characters, 14 tokens")
    terminal.line("was?")
    terminal.expect("[0] one two three four five six\n")
    terminal.expect("prompt 21 tok")
    terminal.line("/stats")
    terminal.expect("context: 28 of 4,096 tokens used")
    terminal.expect("prompt 21 tok")
    terminal.line("/budget 5")
    terminal.expect("error: ")
    terminal.expect("the minimum is 32")
    terminal.line("/budget 64")
    terminal.expect("budget: 64 in words")
    terminal.line("/bugdet 64")
    terminal.expect("unknown command /bugdet")
    terminal.line("/read")
    terminal.expect("needs the name of a file")
    terminal.line("/system be brief")
    terminal.expect("system prompt set; a new conversation")
    terminal.line("again")
    terminal.expect("[0] one")
    terminal.line("/exit")
    assert terminal.process.wait(timeout=20) == 0


def test_a_message_may_have_several_lines(chat: Callable[..., Terminal], tmp_path: Path) -> None:
    terminal = chat(FAKE_SENT=tmp_path / "sent")
    terminal.line("one \\")
    terminal.expect(CONTINUATION.strip())
    terminal.line("two")
    terminal.expect("[0] one two")
    terminal.ready()
    terminal.line('"""')
    terminal.expect(CONTINUATION.strip())
    terminal.line("  three")
    terminal.line("")
    terminal.line('four"""')
    terminal.expect("[2] one two")
    terminal.ready()
    terminal.line("half \\")
    terminal.expect(CONTINUATION.strip())
    terminal.interrupt_line()
    terminal.ready()
    terminal.line("//not a command")
    terminal.expect("[4] one two")
    terminal.ready()
    assert terminal.end() == 0
    assert json.loads((tmp_path / "sent").read_text()) == ["one \ntwo", "  three\n\nfour", "/not a command"]


def test_broken_bytes_in_a_line_are_an_error_and_the_chat_goes_on(chat: Callable[..., Terminal]) -> None:
    terminal = chat()
    terminal.type(b"abc\xff\xfe def\r")
    terminal.expect("error: ")
    terminal.expect("byte")
    terminal.ready()
    terminal.line("hello")
    terminal.expect("[0] one")
    terminal.ready()
    assert terminal.end() == 0


def test_an_empty_line_asks_again_and_sends_nothing(chat: Callable[..., Terminal], tmp_path: Path) -> None:
    terminal = chat(FAKE_SENT=tmp_path / "sent")
    terminal.line("")
    terminal.ready()
    terminal.line("   ")
    terminal.ready()
    terminal.line("hello")
    terminal.expect("[0] one")
    terminal.ready()
    assert terminal.end() == 0
    assert json.loads((tmp_path / "sent").read_text()) == ["hello"]


def test_replies_alone_go_to_a_file_while_the_prompt_stays_on_the_terminal(
    chat: Callable[..., Terminal], tmp_path: Path
) -> None:
    with (tmp_path / "replies.txt").open("wb") as file:
        terminal = chat(stdout=file)
        terminal.line("first")
        terminal.expect("tok")
        terminal.ready()
        terminal.line("second")
        terminal.expect("tok")
        terminal.ready()
        assert terminal.end() == 0
    text = (tmp_path / "replies.txt").read_text()
    assert text == "[0] one two three four five six\n[2] one two three four five six\n"
    assert "[0]" not in terminal.seen


def test_typed_lines_are_remembered_for_the_next_chat(chat: Callable[..., Terminal], tmp_path: Path) -> None:
    terminal = chat()
    terminal.line("remember this")
    terminal.expect("[0] one")
    terminal.ready()
    assert terminal.end() == 0
    history = tmp_path / "state" / "cake-infer" / "history"
    assert "remember this" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0
    again = chat()
    again.type(b"\x1b[A\r")  # arrow up
    again.expect("remember this")
    again.expect("[0] one")
    again.expect("tok")
    again.ready()
    assert again.end() == 0


# -- from a pipe -------------------------------------------------------------------------------------------------------


def piped(text: str | bytes, *argv: str, **environment: object) -> subprocess.CompletedProcess[bytes]:
    """A chat whose messages come from a pipe."""
    return subprocess.run(
        [sys.executable, str(FAKE), "chat", *argv],
        input=text.encode() if isinstance(text, str) else text,
        capture_output=True,
        timeout=60,
        check=False,
        env={**os.environ, **{name: str(value) for name, value in environment.items()}},
    )


def test_a_pipe_is_a_message_a_line_and_stdout_has_the_replies_alone() -> None:
    seen = piped("one\n\ntwo\n", FAKE_TOKENS="yes →")
    assert (seen.returncode, seen.stdout.decode()) == (0, "[0] yes →\n[2] yes →\n")
    assert seen.stderr.count(b"\n") == 2
    assert b"/help" not in seen.stderr


def test_a_pipe_with_quiet_has_an_empty_stderr() -> None:
    assert piped("one\n", "--quiet").stderr == b""


def test_an_endless_line_of_a_pipe_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cake_infer.engine.apps.line_input.LONGEST_LINE", 8)
    for line, fits in ((b"1234567\n", True), (b"12345678\n", False), (b"123456789", False)):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(line)))
        if fits:
            assert PipeInput().read("") == "1234567"
        else:
            with pytest.raises(CakeError, match="too many for a message"):
                PipeInput().read("")


def test_a_command_that_stands_alone_takes_no_argument_in_silence() -> None:
    seen = piped("one\n/undo 3\n/regen shorter\n/clear all\n/stats now\n/help me\n/exit now\ntwo\n", FAKE_TOKENS="yes")
    assert seen.stdout == b"[0] yes\n[2] yes\n"
    assert seen.stderr.count(b"stands alone") == 6
    assert b"unknown command" not in seen.stderr
    assert b"'shorter' has no effect" in seen.stderr


def test_every_turn_shows_the_context_used() -> None:
    lines = piped("one\ntwo\n", FAKE_TOKENS="yes").stderr.decode().splitlines()
    assert [line.split(" | ")[-1] for line in lines] == ["context 7 of 4,096", "context 14 of 4,096"]


def test_a_broken_line_of_a_pipe_is_an_error_with_its_offset_and_the_next_one_is_read() -> None:
    seen = piped(b"abc\xff\xfe def\nnext\n", FAKE_TOKENS="yes")
    assert seen.stdout == b"[0] yes\n"
    assert b"error: " in seen.stderr
    assert b"3" in seen.stderr.split(b"\n")[0]
    assert seen.returncode == 1


def test_a_conversation_announces_the_limit_refuses_beyond_it_and_goes_on_after_clear() -> None:
    turn = "x" * 15
    seen = piped(f"{turn}\n{turn}\n{turn}\n/clear\nhello\n", "--max-tokens", "2", FAKE_CONTEXT=50)
    notices = seen.stderr.decode().splitlines()
    assert seen.stdout.decode() == "[0] one two\n[2] one two\n[0] one two\n"
    nearly = [index for index, line in enumerate(notices) if "context nearly full: 40 of 50" in line]
    refused = [index for index, line in enumerate(notices) if line.startswith("error: ")]
    assert len(nearly) == len(refused) == 1
    assert nearly[0] < refused[0]
    assert "57" in notices[refused[0]]
    assert "50" in notices[refused[0]]
    assert "/clear" in notices[refused[0]]


def test_a_refused_turn_is_not_left_in_the_history(tmp_path: Path) -> None:
    seen = piped(f"hi\n{'x' * 100}\nhi\n/reset\nhi\n", FAKE_CONTEXT=60, FAKE_SENT=tmp_path / "sent")
    assert [line[:3] for line in seen.stdout.decode().splitlines()] == ["[0]", "[2]", "[0]"]
    assert json.loads((tmp_path / "sent").read_text()) == ["hi", "hi", "hi"]


def test_a_document_is_read_with_the_next_message_and_only_with_it(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("A\n")
    (tmp_path / "b.txt").write_text("B")
    commands = f"/read {tmp_path}/a.txt\n/read '{tmp_path}/b.txt'\nwhat?\nand?\n/read {tmp_path}/a.txt\n/clear\nnow?\n"
    seen = piped(commands, FAKE_SENT=tmp_path / "sent")
    assert seen.returncode == 0, seen.stderr
    assert json.loads((tmp_path / "sent").read_text()) == ["A\n\nB\n\nwhat?", "and?", "now?"]


def test_a_document_that_does_not_fit_or_is_no_text_is_refused_and_not_attached(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("x" * 200)
    (tmp_path / "binary").write_bytes(b"ab\xff")
    commands = f"/read {tmp_path}/long.txt\n/read {tmp_path}/binary\n/read {tmp_path}/none\n/read -\nhi\n"
    seen = piped(commands, FAKE_CONTEXT=100, FAKE_SENT=tmp_path / "sent")
    errors = [line for line in seen.stderr.decode().splitlines() if line.startswith("error: ")]
    assert len(errors) == 4
    assert "200" in errors[0]
    assert "100" in errors[0]
    assert json.loads((tmp_path / "sent").read_text()) == ["hi"]


def test_an_interrupted_pipe_exits_with_130(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    process = subprocess.Popen(
        [sys.executable, str(FAKE), "chat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "FAKE_ENDLESS": "t", "FAKE_TOKENS": "word", "FAKE_MARKS": str(marks)},
    )
    assert process.stdin is not None
    process.stdin.write(b"hello\nagain\n")
    process.stdin.flush()
    deadline = time.monotonic() + 30
    while not (marks.exists() and marks.read_text().startswith("ptt")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert out.startswith(b"[0] word word")
    assert out.count(b"[") == 1
    assert b"Traceback" not in err


# -- on a real engine --------------------------------------------------------------------------------------------------

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Lines:
    """Lines from a list; None is Ctrl-D. `interactive` as at a terminal."""

    interactive = True

    def __init__(self, *lines: str | None) -> None:
        self.lines = list(lines)

    def read(self, prompt: str) -> str:
        line = self.lines.pop(0) if self.lines else None
        if line is None:
            raise EOFError
        return line


@pytest.fixture
def model(write_checkpoint: Callable[..., Path], write_byte_tokenizer: Callable[..., None], tmp_path: Path) -> Path:
    folder = write_checkpoint(tmp_path / "model", eos_token_id=319)
    write_byte_tokenizer(folder, 300, chat_template=TEMPLATE, bos=False)
    return folder


def talk(engine: Engine, *lines: str, tokens: int = 8, interrupt_at: int | None = None) -> Repl:
    """A whole chat; `interrupt_at`: Ctrl-C when that many tokens of the first reply are there."""
    generation = GenerationConfig(max_new_tokens=tokens, temperature=0.0)
    with Console(quiet=True) as console:
        repl = Repl(engine, console, Lines(*lines), generation, None)
        if interrupt_at is not None:
            repl.chat.send = interrupted(repl.chat.send, interrupt_at)  # type: ignore[method-assign]
        repl.run()
    return repl


def interrupted(send: Any, at: int) -> Any:
    """`send`, with a SIGINT to this process after the first turn's piece number `at`."""
    turns = []

    def sending(text: str, **options: Any) -> Iterator[Piece]:
        turns.append(text)
        with closing(send(text, **options)) as pieces:
            for count, piece in enumerate(pieces, 1):
                if count == at and len(turns) == 1:
                    os.kill(os.getpid(), signal.SIGINT)
                yield piece

    return sending


def test_the_conversation_after_ctrl_c_is_the_one_with_the_shorter_reply(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Engine.load(model) as engine:
        cut = talk(engine, "Hello", "And now?", interrupt_at=3).chat
        rows = engine.runner.tenancy.arena.length.copy()
        fresh = engine.chat()
        for text, tokens in (("Hello", 3), ("And now?", 8)):
            list(fresh.send(text, max_new_tokens=tokens, temperature=0.0))
    assert [message["role"] for message in cut.messages] == ["user", "assistant"] * 2
    # but for the beginning of a character, which the cut reply does not show
    assert fresh.messages[1]["content"].startswith(cut.messages[1]["content"])
    assert cut.messages[2:] == fresh.messages[2:]
    assert cut.tokens_used == fresh.tokens_used
    # one token, the last one chosen, is fed by the next turn
    assert (rows == cut.tokens_used - 1).all()


def test_a_message_that_was_stopped_while_it_was_read_leaves_no_trace(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[object] = []

    def stop_in_the_second_layer(self: ProgressBar, progress: object) -> None:
        seen.append(progress)
        if len(seen) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(ProgressBar, "__call__", stop_in_the_second_layer)
    with Engine.load(model) as engine:
        repl = talk(engine, "Hello", "Hello")
        fresh = engine.chat()
        monkeypatch.undo()
        list(fresh.send("Hello", max_new_tokens=8, temperature=0.0))
    assert len(seen) == 2 + 3, "the first message ended in its second layer, the other went through three"
    assert repl.chat.messages == fresh.messages


def test_a_conversation_after_clear_is_a_new_one_with_evicted_turns_as_well(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = "the quick brown fox jumps over the lazy dog " * 4
    cache = CacheConfig(budget=40, window=8)
    with Engine.load(model, cache=cache) as engine:
        chat = talk(engine, long, "what?", "/reset", long).chat
        after_reset, kept = chat.messages, chat.stats
        fresh = engine.chat()
        list(fresh.send(long, max_new_tokens=8, temperature=0.0))
    assert after_reset == fresh.messages
    assert kept is not None
    assert kept.kept_tokens == 40
    assert kept.full_tokens > 100


def test_a_conversation_that_outgrows_the_context_is_announced_refused_and_cleared(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Engine.load(model, context=128) as engine:
        lines = ["x" * 10] * 4 + ["/clear", "y"]
        with Console() as console:
            repl = Repl(engine, console, Lines(*lines), GenerationConfig(max_new_tokens=4, temperature=0.0), None)
            repl.run()
    notices = [line for line in capsys.readouterr().err.splitlines() if "tok/s" not in line]
    nearly = next(index for index, line in enumerate(notices) if "context nearly full" in line)
    refused = [index for index, line in enumerate(notices) if line.startswith("error: ")]
    assert len(refused) >= 1
    assert nearly < refused[0]
    for way in ("send less", "/undo", "/save FILE", "/clear"):
        assert way in notices[refused[0]]
    assert "128" in notices[refused[0]]
    cut = [index for index, line in enumerate(notices) if line.startswith("warning: the reply can have")]
    assert all(index < refused[0] for index in cut)
    assert [message["content"] for message in repl.chat.messages[::2]] == ["y"]


def test_a_saved_conversation_goes_on_where_it_was(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long, cache = "the quick brown fox jumps over the lazy dog " * 4, CacheConfig(budget=40, window=8)
    path = tmp_path / "talk one.cake"
    with Engine.load(model, cache=cache, step="eager") as engine:
        straight = talk(engine, long, "what?", "and?").chat
        talk(engine, long, "what?", f"/save {path}")
    with Engine.load(model, cache=cache, step="eager") as engine:
        loaded = talk(engine, "something else", f'/load "{path}"', "and?").chat
    assert loaded.messages == straight.messages
    assert (loaded.tokens_used, loaded._sequence.ids) == (straight.tokens_used, straight._sequence.ids)
    err = capsys.readouterr().err
    assert f"saved: {path}" in err
    assert "a conversation of 2 turns" in err
    assert f"of {loaded.context:,} tokens used" in err


def test_what_is_taken_back_or_written_again_leaves_the_conversation_without_it(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long, cache = "the quick brown fox jumps over the lazy dog " * 4, CacheConfig(budget=40, window=8)
    with Engine.load(model, cache=cache, step="eager") as engine:
        straight = talk(engine, long, "and?").chat
        back = talk(engine, long, "what of " * 9, "/undo", "/undo", "and?", "/regen").chat
        nothing = talk(engine, "/undo", "/regen", "/save", f"/load {tmp_path / 'none'}", "/save x/y/z").chat
    assert back.messages == straight.messages  # greedy: the same reply again
    assert back._sequence.ids == straight._sequence.ids
    assert nothing.messages == []
    err = capsys.readouterr().err
    assert "taken back: what of what of" in err
    assert err.count("error: ") == 6


def test_ctrl_c_while_a_reply_is_written_again(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the prefill the old reply stays; later what there is of the new one does, and the conversation goes on."""
    with Engine.load(model, step="eager") as engine:
        straight = talk(engine, "Hello", "And now?").chat
        seen: list[object] = []

        def stop_in_the_second_layer(self: ProgressBar, progress: object) -> None:
            seen.append(progress)
            if len(seen) == 3 + 2:
                os.kill(os.getpid(), signal.SIGINT)

        monkeypatch.setattr(ProgressBar, "__call__", stop_in_the_second_layer)
        stopped = talk(engine, "Hello", "/regen", "And now?").chat
        monkeypatch.undo()
        assert len(seen) == 3 + 2 + 3
        assert stopped.messages == straight.messages

        repl = talk(engine, "Hello")
        chat, again = repl.chat, repl.chat.regenerate
        count = 0

        def interrupted_again(**options: Any) -> Iterator[Piece]:
            nonlocal count
            with closing(again(**options)) as pieces:
                for piece in pieces:
                    count += 1
                    if count == 3:
                        os.kill(os.getpid(), signal.SIGINT)
                    yield piece

        chat.regenerate = interrupted_again  # type: ignore[method-assign]
        repl._handle("/regen")
        repl._handle("And now?")
        fresh = engine.chat()
        for text, tokens in (("Hello", 3), ("And now?", 8)):
            list(fresh.send(text, max_new_tokens=tokens, temperature=0.0))
    assert [message["role"] for message in chat.messages] == ["user", "assistant"] * 2
    assert chat.messages[2:] == fresh.messages[2:]
    assert chat.tokens_used == fresh.tokens_used


def test_at_the_end_of_the_context_undo_makes_room_and_a_saved_conversation_can_be_loaded(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Engine.load(model, context=128, step="eager") as engine:
        lines = [*["x" * 10] * 4, f"/save {tmp_path / 'full'}", "/undo", "y", "/clear", f"/load {tmp_path / 'full'}"]
        chat = talk(engine, *lines, "x" * 10, tokens=4).chat
        turns = len(chat.messages) // 2
        capsys.readouterr()
        shorter = talk(engine, *["x" * 10] * turns, "/undo", "y", tokens=4).chat
    assert [message["content"] for message in chat.messages[::2]] == ["x" * 10] * turns
    assert 1 < turns < 4
    assert [message["content"] for message in shorter.messages[::2]] == [*["x" * 10] * (turns - 1), "y"]
    assert "error" not in capsys.readouterr().err


# -- lines into messages -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["a"], "a"),
        (["a\\", "b\\", "c"], "a\nb\nc"),
        (["a\\", None], "a\n"),
        (['"""a', "b", 'c"""'], "a\nb\nc"),
        (['"""', "a\\", "", '"""'], "a\\\n"),
        (['"""one line"""'], "one line"),
        (['say """'], 'say """'),
    ],
)
def test_lines_make_one_message(lines: list[str | None], message: str) -> None:
    assert read_message(Lines(*lines)) == message


def test_a_text_that_ends_without_its_quotes_is_sent_from_a_pipe_and_dropped_at_a_terminal() -> None:
    lines = Lines('"""', "a", None)
    with pytest.raises(PromptError, match="it is dropped"):
        read_message(lines)
    lines = Lines('"""', "a", None)
    lines.interactive = False
    assert read_message(lines) == "a"


def test_the_end_of_the_input_between_messages_is_passed_on() -> None:
    with pytest.raises(EOFError):
        read_message(Lines())
