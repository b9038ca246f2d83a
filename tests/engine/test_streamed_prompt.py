"""Documents that are read in pieces as they come: files, pipes that are still written, and what is wrong in them."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from cake_infer import cli
from cake_infer.engine.apps.prompt import join_documents, read_document
from cake_infer.engine.apps.streamed import BLOCK, Texts
from cake_infer.errors import PromptError

FAKE = Path(__file__).parent / "fake_engine.py"
LINE = "the first of them was not this one, \u732b and all that is left is for him to have one\r\n"


def no_progress(progress):
    pass


class Pipe:
    """A pipe as standard input, written by the test."""

    def __init__(self, monkeypatch):
        read, self._write = os.pipe()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(os.fdopen(read, "rb")))

    def write(self, data):
        os.write(self._write, data)

    def close(self):
        os.close(self._write)


@pytest.fixture
def pipe(monkeypatch):
    return Pipe(monkeypatch)


@pytest.fixture
def run(model_folder, capfd):
    folder = model_folder()

    def go(*argv):
        cache = ["--budget", "64", "--window", "8"]
        code = cli.main(["--model", str(folder), "--step", "eager", "--max-tokens", "6", "--json", *cache, *argv])
        out, err = capfd.readouterr()
        return code, json.loads(out) if out else None, err

    return go


@pytest.mark.parametrize(
    "contents", [["a\n", "b\r\n"], ["", "x"], ["a\n\n", "\n"], [LINE * 5000, "end"], ["a\r\n\r\n"]]
)
@pytest.mark.parametrize("question", [None, "why?"])
def test_documents_that_come_are_those_that_are_read_whole(tmp_path, contents, question):
    names = tuple(str(tmp_path / str(number)) for number in range(len(contents)))
    for name, content in zip(names, contents, strict=True):
        Path(name).write_bytes(content.encode())
    texts = Texts(names, question, no_progress)
    assert texts.size == sum(os.path.getsize(name) for name in names)
    assert "".join(texts) == join_documents([read_document(name) for name in names], question)
    assert (texts.read, texts.share) == (texts.size, min(1.0, float(texts.size)))


@pytest.mark.parametrize("more", [[], ["--raw"], ["--system", "be brief"]])
def test_in_one_piece_the_command_says_what_it_says_of_the_whole(run, tmp_path, more):
    path = tmp_path / "doc.txt"
    path.write_bytes((LINE * 30).encode())
    asked = ["--prompt-file", str(path), "--prompt", "Which one?", *more]
    _, expected, _ = run(*asked)
    code, found, err = run(*asked, "--stream-prefill", "100000")
    assert code == 0, err
    assert (found["ids"], found["prompt_tokens"]) == (expected["ids"], expected["prompt_tokens"])
    assert found["stats"]["layer_lengths"] == expected["stats"]["layer_lengths"]
    code, found, err = run(*asked, "--stream-prefill", "200")
    assert code == 0, err
    assert found["prompt_tokens"] == expected["prompt_tokens"]
    assert found["stats"]["pieces"] == -(-expected["prompt_tokens"] // 200)
    assert f"in {found['stats']['pieces']} pieces" in err


def test_a_pipe_is_read_while_it_is_written(run, pipe):
    asked = ["--raw", "--stream-prefill", "100"]

    def write():
        for _ in range(30):
            pipe.write(LINE.encode())
            time.sleep(0.005)
        pipe.close()

    writer = threading.Thread(target=write)
    writer.start()
    code, found, err = run(*asked)
    writer.join()
    assert code == 0, err
    assert found["stats"]["pieces"] > 10


def test_pieces_come_before_the_pipe_ends(pipe):
    """What has been written so far is handed on, though nobody knows whether there will be more."""
    texts = Texts(("-",), "why?", no_progress)
    for number in range(3):
        pipe.write(f"part {number}\n".encode())
        assert next(text for text in texts if text).strip() == f"part {number}"
    pipe.write("\n\u732b".encode()[:-1])
    pipe.write("\u732b\n".encode()[2:])
    pipe.close()
    assert "".join(texts).endswith("\n\u732b\n\nwhy?")
    assert texts.share is None


def test_a_silent_pipe_can_be_interrupted(pipe):
    told = []

    def interrupt(progress):
        told.append(progress.stage)
        if len(told) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        next(Texts(("-",), None, interrupt))
    assert told == ["wait", "wait"]


def test_ctrl_c_while_text_is_waited_for_exits_with_130():
    process = subprocess.Popen(
        [sys.executable, str(FAKE), "--stream-prefill"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert b"waiting for text on standard input" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, b"", b"")


def test_a_file_longer_than_the_context_is_refused_before_weights_and_before_it_is_read(run, tmp_path, monkeypatch):
    path = tmp_path / "doc.txt"
    path.write_bytes((LINE * 20000).encode())
    read = []
    blocks = Texts._blocks
    monkeypatch.setattr(Texts, "_blocks", lambda self, name: (read.append(data) or data for data in blocks(self, name)))
    monkeypatch.setattr("cake_infer.engine.loading.load_decoder", None)
    code, found, err = run("--prompt-file", str(path), "--stream-prefill")
    assert (code, found) == (1, None)
    about = int(err.split("about ")[1].split(" tokens")[0].replace(",", ""))
    line = len(run_tokens(run, tmp_path))
    assert about == pytest.approx(20000 * line, rel=0.05)
    assert "the model's context is 4,096" in err
    assert err.count("\n") == 1
    assert sum(map(len, read)) <= 3 * BLOCK < path.stat().st_size / 8


def run_tokens(run, tmp_path):
    """The ids of one line, by the tokenizer of the model that `run` uses."""
    from cake_infer.models.tokenizer import Tokenizer

    return Tokenizer.load(tmp_path / "model").encode(LINE.replace("\r", ""), add_bos=False)


def test_a_file_that_fits_is_counted_and_read(run, tmp_path):
    path = tmp_path / "doc.txt"
    path.write_bytes((LINE * 60).encode())  # more bytes than the context has tokens
    assert path.stat().st_size > 4096
    code, found, err = run("--prompt-file", str(path), "--raw", "--stream-prefill", "1000")
    assert code == 0, err
    assert found["stats"]["pieces"] >= 2


def test_a_pipe_longer_than_the_context_is_told_when_it_happens(run, pipe):
    def write():
        try:
            while True:
                pipe.write(LINE.encode() * 100)
        except BrokenPipeError:
            pass

    threading.Thread(target=write, daemon=True).start()
    code, found, err = run("--raw", "--stream-prefill", "1000")
    sys.stdin.close()
    assert (code, found) == (1, None)
    assert "the text has at least 5,000 tokens, but the model's context is 4,096" in err


@pytest.mark.parametrize("source", ["file", "pipe"])
def test_broken_text_in_the_middle_is_one_line_with_the_byte_offset(run, pipe, tmp_path, source):
    data = (LINE * 40).encode()
    broken = data + b"\xff" + data
    if source == "file":
        (tmp_path / "doc.txt").write_bytes(broken)
        asked = ["--prompt-file", str(tmp_path / "doc.txt")]
    else:
        pipe.write(broken)
        asked = []
    pipe.close()
    code, found, err = run(*asked, "--raw", "--stream-prefill", "100")
    assert (code, found) == (1, None)
    assert f"is not UTF-8 text (0xff at byte {len(data)})" in err
    assert err.count("error: ") == 1


def test_what_is_not_there_is_said_before_a_model_is_looked_for(run, tmp_path, monkeypatch):
    monkeypatch.setattr("cake_infer.engine.loading.resolve_model", None)
    for name, reason in ((tmp_path / "none.txt", "No such file"), (tmp_path, "Is a directory")):
        code, _, err = run("--prompt-file", str(name), "--stream-prefill")
        assert code == 1
        assert f"cannot read {name}: {reason}" in err


def test_a_file_as_standard_input_is_counted_and_then_read_from_where_it_stands(run, tmp_path, monkeypatch):
    path = tmp_path / "doc.txt"
    path.write_bytes(b"skipped" + (LINE * 60).encode())
    whole = read_document(str(path)).removeprefix("skipped")
    with open(path) as file:
        os.lseek(file.fileno(), 7, os.SEEK_SET)
        monkeypatch.setattr(sys, "stdin", file)
        code, found, err = run("--raw", "--stream-prefill", "1000")
        assert code == 0, err
        assert "".join(Texts(("-",), None, no_progress)) == whole.removesuffix("\n")
    (tmp_path / "rest.txt").write_text(whole)
    assert (
        run("--raw", "--stream-prefill", "1000", "--prompt-file", str(tmp_path / "rest.txt"))[1]["ids"] == found["ids"]
    )


def test_nothing_to_read_is_an_empty_prompt(run, pipe):
    pipe.close()
    code, _, err = run("--stream-prefill")
    assert code == 1
    assert "the prompt is empty" in err
    with pytest.raises(PromptError, match="cannot read"):
        next(text for text in Texts(("nothing.txt",), None, no_progress) if text)
