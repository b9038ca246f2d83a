"""The command: its flags, who is let in, a port that is taken, and how it is stopped."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from cake_infer.cli import build_parser, main
from cake_infer.engine.apps import serve
from cake_infer.engine.serving.options import ServeOptions, is_loopback
from cake_infer.errors import OptionError

from_cli = [sys.executable, "-m", "cake_infer", "serve"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--host", "0.0.0.0"], "can be reached from other machines"),
        (["--host", "some.name.example"], "can be reached from other machines"),
        (["--port", "70000"], "between 0"),
        (["--public", "--api-key", "x"], "--public has no effect"),
        (["--api-key", " "], "not empty"),
        (["--policy", "full", "--budget", "100"], "no effect"),
    ],
)
def test_wrong_flags_are_one_line_and_exit_2(capsys, monkeypatch, flags, expected):
    monkeypatch.delenv("CAKE_API_KEY", raising=False)
    assert main(["serve", *flags], lambda *_, **__: pytest.fail("nothing was to be loaded")) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert error.count("\n") == 1


def test_a_public_address_needs_a_key_or_the_word(monkeypatch):
    assert is_loopback("127.0.0.1")
    assert is_loopback("127.8.8.8")
    assert is_loopback("::1")
    assert is_loopback("localhost")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("::")
    with pytest.raises(OptionError):
        ServeOptions(host="0.0.0.0")
    assert ServeOptions(host="0.0.0.0", api_key="k").host == ServeOptions(host="0.0.0.0", public=True).host


def test_a_port_in_use_is_one_clear_line_before_anything_is_loaded(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        load = lambda *_, **__: pytest.fail("nothing was to be loaded")  # noqa: E731
        assert main(["serve", "--port", str(port)], load) == 1
    error = capsys.readouterr().err
    assert f"port {port} of 127.0.0.1 is in use" in error
    assert "--port" in error
    assert error.count("\n") == 1


# flag -> a value, and where it arrives: an option of the server, of loading, of the cache, or a default of replies
FLAGS = {
    "--host": ("127.0.0.2", "options", "host"),
    "--port": ("1234", "options", "port"),
    "--api-key": ("k", "options", "api_key"),
    "--public": (None, "options", "public"),
    "--parallel": ("3", "options", "parallel"),
    "--queue": ("0", "options", "queue"),
    "--arena": ("5MiB", "options", "arena"),
    "--slice": ("0.25", "options", "slice"),
    "--max-body": ("99", "options", "max_body"),
    "--max-prompt": ("98", "options", "max_prompt"),
    "--documents": ("7", "options", "documents"),
    "--document-bytes": ("97", "options", "document_bytes"),
    "--connections": ("96", "options", "connections"),
    "--backlog": ("95", "options", "backlog"),
    "--patience": ("9.5", "options", "patience"),
    "--grace": ("0.5", "options", "grace"),
    "--model": ("mistral-7b", "load", "model"),
    "--context": ("77", "load", "context"),
    "--budget": ("3.2%", "cache", "budget"),
    "--max-tokens": ("2", "defaults", "max_new_tokens"),
    "--temperature": ("0.7", "defaults", "temperature"),
    "--top-k": ("5", "defaults", "top_k"),
    "--top-p": ("0.9", "defaults", "top_p"),
    "--min-p": ("0.1", "defaults", "min_p"),
    "--repetition-penalty": ("1.1", "defaults", "repetition_penalty"),
    "--presence-penalty": ("0.5", "defaults", "presence_penalty"),
    "--frequency-penalty": ("-0.5", "defaults", "frequency_penalty"),
}


@pytest.fixture
def told(monkeypatch):
    """A function of flags: what the command would serve, and with what."""

    def run(*flags):
        seen = {}
        engine = nullcontext(SimpleNamespace(tokenizer=object(), model_path=Path("m")))

        def load(model, **options):
            seen["load"] = SimpleNamespace(model=model, **options)
            seen["cache"] = options["cache"]
            return engine

        def service(engine, options, *, names, limit, defaults):
            seen.update(options=options, defaults=defaults)
            return SimpleNamespace(model=names[0])

        monkeypatch.setattr("cake_infer.engine.serving.room.warm_up", lambda engine: None)
        monkeypatch.setattr("cake_infer.engine.serving.room.arena_limit", lambda *_: 1 << 20)
        monkeypatch.setattr("cake_infer.engine.serving.service.Service", service)
        monkeypatch.setattr("cake_infer.engine.serving.server.Server", lambda service: service)
        monkeypatch.setattr("cake_infer.engine.serving.server.serve", lambda server, sock: None)
        monkeypatch.setattr("cake_infer.engine.serving.server.listen", lambda host, port: socket.socket())
        monkeypatch.delenv("CAKE_API_KEY", raising=False)
        assert main(["serve", *flags], load) == 0
        return seen

    return run


def long_flags(command):
    actions = build_parser(command)._actions
    return {name for action in actions for name in action.option_strings if name.startswith("--")}


def test_every_flag_arrives(told, capsys):
    own = long_flags("serve") - long_flags("chat")  # those of every model are observed in tests/test_cli.py
    assert own == {flag for flag, (_, where, _) in FLAGS.items() if where == "options"}
    assert long_flags("chat") - long_flags("serve") == {
        "--system",
        "--kv-memory",
        "--seed",
        "--stop",
        "--stream-prefill",
    }
    for flag, (value, where, name) in FLAGS.items():
        seen, without = told(flag, *([] if value is None else [value]))[where], told()[where]
        assert getattr(seen, name) != getattr(without, name), flag
        assert str(value or True) in str(getattr(seen, name)), flag
    assert "http://" in capsys.readouterr().err
    told("--quiet")
    assert capsys.readouterr().err == ""


def test_the_key_may_stand_in_the_environment(told, monkeypatch, capsys):
    monkeypatch.setattr("os.environ", {**os.environ, "CAKE_API_KEY": "secret"})
    parser = build_parser("serve")
    args = parser.parse_args(["--host", "0.0.0.0"])
    assert serve.conflict(args, {"host"}) is None
    assert args.api_key == "secret"


def test_the_thread_that_loaded_the_model_keeps_none_of_torchs_threads(serving, monkeypatch):
    from cake_infer.engine.serving import scheduler

    seen = []
    monkeypatch.setattr(
        scheduler, "release_workers", lambda: seen.append([one.name for one in threading.enumerate()].copy())
    )
    started = serving()
    assert len(seen) == 1
    assert "cake-infer-steps" not in seen[0], "before the steps' own thread begins"
    assert started.client().completions.create(model="tiny", prompt="x", max_tokens=2).usage.completion_tokens


@pytest.fixture
def command(tmp_path, write_checkpoint, write_byte_tokenizer):
    """A function of flags: the command's process, and its URL."""
    folder = write_checkpoint(tmp_path / "tiny-model", num_hidden_layers=1)
    write_byte_tokenizer(folder, 300)
    processes = []

    def start(*flags):
        process = subprocess.Popen(
            [*from_cli, "--model", str(folder), "--port", "0", "--step", "eager", "--parallel", "2", *flags],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "CAKE_API_KEY": "of the environment"},
        )
        processes.append(process)
        lines = []
        while not lines or "http://" not in lines[-1]:
            lines.append(process.stderr.readline())
            assert lines[-1], lines
        assert lines[-1].startswith("tiny-model at http://127.0.0.1:")
        assert "with a key" in lines[-1]
        return process, lines[-1].split(" at ")[1].split("/v1")[0]

    yield start
    for process in processes:
        process.kill()
        process.wait()
        process.stderr.close()


def asked(url, body):
    return urllib.request.Request(
        f"{url}/v1/completions", data=body, headers={"Authorization": "Bearer of the environment"}
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_serves_and_ends_when_it_is_asked_to(command, number):
    process, url = command("--grace", "0.5")
    with urllib.request.urlopen(asked(url, b'{"prompt": "x", "max_tokens": 2}'), timeout=30) as answer:
        assert b'"text_completion"' in answer.read()
    process.send_signal(number)
    assert process.wait(20) == 0
    rest = process.stderr.read()
    assert "Traceback" not in rest
    assert "error" not in rest


def test_asked_twice_the_command_ends_at_once_and_without_a_word(command):
    process, url = command("--grace", "60")
    with urllib.request.urlopen(
        asked(url, b'{"prompt": "x", "max_tokens": 4000, "ignore_eos": true, "stream": true}'), timeout=30
    ) as answer:
        assert answer.readline().startswith(b"data: ")
        process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)  # the reply may go on
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    assert process.stderr.read() == ""
