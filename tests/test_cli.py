"""The command line: what reaches the engine, what comes out where, and with which exit code."""

from __future__ import annotations

import ast
import importlib.util
import io
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from cake_infer import cli
from cake_infer.cache.config import CacheConfig
from cake_infer.engine.generation import GenerationConfig
from cake_infer.engine.options import EngineOptions, spell_flags
from cake_infer.errors import BudgetError

FAKE = Path(__file__).parent / "engine" / "fake_engine.py"


@pytest.fixture(scope="module")
def fake() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fake_engine", FAKE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass
class Run:
    """One run of the command line on a fake engine."""

    code: int
    out: str
    err: str
    engine: Any

    def call(self, name: str) -> Any:
        found = [argument for called, argument in self.engine.calls if called == name]
        assert len(found) == 1, f"{name} was called {len(found)} times"
        return found[0]

    @property
    def prompt(self) -> str:
        """The text of the prompt, control tokens as <role>."""
        names = {256: "<bos>", 257: "<user>", 258: "<reply>", 259: "<system>", 260: "<end>"}
        data = b"".join(names[i].encode() if i in names else bytes([i]) for i in self.call("stream")["ids"])
        return data.decode()


class Stdin(io.TextIOWrapper):
    """Standard input with given bytes, as a pipe or as a terminal."""

    def __init__(self, data: bytes, terminal: bool) -> None:
        super().__init__(io.BytesIO(data))
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.fixture
def run(
    fake: ModuleType, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Run]:
    def go(*argv: str, stdin: bytes | None = None, terminal: bool = False, **engine: Any) -> Run:
        made = fake.FakeEngine(**engine)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", Stdin(stdin or b"", terminal))
            if stdin is not None:
                patch.setattr("cake_infer.engine.apps.prompt.stdin_is_data", lambda: True)
            code = cli.main(list(argv), made.load)
        captured = capfdbinary.readouterr()
        return Run(code, captured.out.decode(), captured.err.decode(), made)

    return go


def spawn(*argv: str, **keywords: Any) -> subprocess.CompletedProcess[bytes]:
    """The command line on a fake engine in a process of its own."""
    environment = {**os.environ, **keywords.pop("env", {})}
    return subprocess.run(
        [sys.executable, str(FAKE), *argv], capture_output=True, timeout=60, env=environment, check=False, **keywords
    )


def start(*argv: str, **environment: object) -> subprocess.Popen[bytes]:
    """The same, not waited for; `environment` sets the fake engine's pace."""
    return subprocess.Popen(
        [sys.executable, str(FAKE), *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **{name: str(value) for name, value in environment.items()}},
    )


def wait_for_marks(path: Path, marks: str) -> None:
    """Until the fake engine has come that far."""
    deadline = time.monotonic() + 30
    while not path.exists() or not path.read_text().startswith(marks):
        assert time.monotonic() < deadline, f"the engine did not come as far as {marks}"
        time.sleep(0.02)


# -- every flag -------------------------------------------------------------------------------------------------------

# flag -> (arguments, where it arrives, what arrives there); everything else stays as without the flag
Observation = tuple[Sequence[str], Callable[[Run], Any], Any]


def loaded(name: str) -> Callable[[Run], Any]:
    return lambda seen: seen.call("load")[name]


def cached(name: str) -> Callable[[Run], Any]:
    return lambda seen: getattr(seen.call("load")["cache"], name)


def asked(name: str) -> Callable[[Run], Any]:
    """A field of the GenerationConfig, of a one-shot run or of a chat's turn."""

    def look(seen: Run) -> Any:
        found = [argument["config"] for called, argument in seen.engine.calls if called in ("stream", "send")]
        return getattr(found[0], name)

    return look


MODEL_FLAGS: dict[str, Observation] = {
    "--model": (["--model", "mistral-7b"], loaded("model"), "mistral-7b"),
    "--revision": (["--revision", "v1"], loaded("revision"), "v1"),
    "--random-weights": (
        ["--random-weights", "c.json"],
        lambda seen: [seen.call("load")[key] for key in ("model", "random_weights")],
        ["c.json", True],
    ),
    "--dtype": (["--dtype", "float16"], loaded("dtype"), "float16"),
    "--device": (["--device", "cuda:1"], loaded("device"), "cuda:1"),
    "--threads": (["--threads", "3"], loaded("threads"), 3),
    "--context": (["--context", "77"], loaded("context"), 77),
    "--rope-scaling": (["--rope-scaling", "yarn:2"], loaded("rope_scaling"), "yarn:2"),
    "--chunk": (["--chunk", "64"], loaded("chunk"), 64),
    "--attention": (["--attention", "sdpa"], loaded("attention"), "sdpa"),
    "--step": (["--step", "eager"], loaded("step"), "eager"),
    "--quant": (["--quant", "int8"], loaded("quant"), "int8"),
    "--tuning": (["--tuning", "off"], loaded("tuning"), "off"),
    "--budget": (["--budget", "3.2%"], cached("budget"), "3.2%"),
    "--kv-memory": (["--kv-memory", "5MiB"], cached("kv_memory"), "5MiB"),
    "--policy": (["--policy", "full"], cached("policy"), "full"),
    "--window": (["--window", "8"], cached("window"), 8),
    "--indicator": (["--indicator", "snapkv"], cached("indicator"), "snapkv"),
    "--allocation": (["--allocation", "uniform"], cached("allocation"), "uniform"),
    "--heads": (["--policy", "cake", "--heads", "equal"], cached("heads"), "equal"),
    "--merge": (["--merge", "d2o"], cached("merge"), "d2o"),
    "--hold-by": (["--decode-policy", "hold", "--hold-by", "h2o,interval=4"], cached("hold_by"), "h2o,interval=4"),
    "--schedule": (["--schedule", "late"], cached("schedule"), "late"),
    "--recascade": (["--policy", "cake", "--decode-policy", "hold", "--recascade", "5"], cached("recascade"), 5),
    "--policy-option": (
        ["--policy-option", "mass=0.8", "--policy-option", "pool=3"],
        cached("policy_options"),
        ("mass=0.8", "pool=3"),
    ),
    "--decode-policy": (["--decode-policy", "hold"], cached("decode_policy"), "hold"),
    "--tau1": (["--policy", "cake", "--tau1", "0.5"], cached("tau1"), 0.5),
    "--tau2": (["--policy", "cake", "--tau2", "0.7"], cached("tau2"), 0.7),
    "--gamma": (["--policy", "cake", "--gamma", "10"], cached("gamma"), 10.0),
    "--kv-bits": (["--kv-bits", "4"], cached("kv_bits"), 4),
    "--kv-dtype": (["--kv-dtype", "bfloat16"], cached("kv_dtype"), "bfloat16"),
}
REPLY_FLAGS: dict[str, Observation] = {
    "--max-tokens": (["--max-tokens", "2"], lambda seen: seen.out.split("] ")[-1], "one two\n"),
    "--temperature": (["--temperature", "0.7"], asked("temperature"), 0.7),
    "--top-k": (["--top-k", "5"], asked("top_k"), 5),
    "--top-p": (["--top-p", "0.9"], asked("top_p"), 0.9),
    "--min-p": (["--min-p", "0.1"], asked("min_p"), 0.1),
    "--repetition-penalty": (["--repetition-penalty", "1.1"], asked("repetition_penalty"), 1.1),
    "--presence-penalty": (["--presence-penalty", "0.5"], asked("presence_penalty"), 0.5),
    "--frequency-penalty": (["--frequency-penalty", "-0.5"], asked("frequency_penalty"), -0.5),
    "--seed": (["--seed", "7"], asked("seed"), 7),
    "--stop": (["--stop", "a", "--stop", "b"], asked("stop"), ("a", "b")),
}
OUTPUT_FLAGS: dict[str, Observation] = {
    "--quiet": (["--quiet"], lambda seen: seen.err, ""),
    "--verbose": (["--verbose"], lambda seen: "layer   1" in seen.err, True),
}
FLAGS: dict[str | None, dict[str, Observation]] = {
    None: MODEL_FLAGS
    | REPLY_FLAGS
    | OUTPUT_FLAGS
    | {
        "--prompt": (["--prompt", "why?"], lambda seen: seen.prompt, "<user>why?<end><reply>"),
        "--prompt-file": (["--prompt-file", "doc.txt"], lambda seen: seen.prompt, "<user>doc\n\nhi<end><reply>"),
        "--system": (["--system", "be"], lambda seen: seen.prompt, "<system>be<end><user>hi<end><reply>"),
        "--raw": (["--raw"], lambda seen: seen.prompt, "hi"),
        "--stream-prefill": (
            ["--stream-prefill", "64"],
            lambda seen: (seen.prompt, seen.call("stream")["stream_prefill"]),
            ("<user>hi<end><reply>", 64),
        ),
        "--prompt-tokens": (["--prompt-tokens", "9"], lambda seen: len(seen.call("stream")["ids"]), 9),
        "--logprobs": (
            ["--json", "--logprobs", "2"],
            lambda seen: json.loads(seen.out).get("logprobs", [{}])[0],
            {"id": 0, "logprob": -0.5, "top": [{"id": 0, "logprob": -1.5}, {"id": 1, "logprob": -1.5}]},
        ),
        "--cache": (
            ["--cache", "a.cake"],
            lambda seen: [argument for name, argument in seen.engine.calls if name == "load_document"],
            ["a.cake"],
        ),
        "--json": (
            ["--json"],
            lambda seen: seen.out.startswith("{") and json.loads(seen.out)["text"],
            "one two three four five six",
        ),
    },
    "chat": MODEL_FLAGS
    | REPLY_FLAGS
    | OUTPUT_FLAGS
    | {
        "--system": (["--system", "be"], lambda seen: seen.call("chat"), "be"),
        "--stream-prefill": (["--stream-prefill"], lambda seen: seen.call("chat in pieces"), 2048),
    },
    "compress": {
        name: seen for name, seen in MODEL_FLAGS.items() if name not in ("--decode-policy", "--recascade", "--hold-by")
    }
    | OUTPUT_FLAGS
    | {
        "--prompt-file": (
            ["--prompt-file", "doc.txt"],
            lambda seen: seen.call("compress"),
            [{"role": "user", "content": "doc"}],
        ),
        "--system": (["--system", "be"], lambda seen: seen.call("compress")[0], {"role": "system", "content": "be"}),
        "--raw": (["--raw"], lambda seen: seen.call("compress"), "hello"),
        "--stream-prefill": (["--stream-prefill", "64"], lambda seen: seen.call("compress in pieces"), 64),
        "--output": (["--output", "b.cake"], lambda seen: seen.call("save"), Path("b.cake")),
    },
}
# those of plan are in tests/engine/test_plan.py, the others' below: they have no engine
WITHOUT_ENGINE = {"plan", "policies", "models", "import-gguf"}
COMPARING = {name for name in cli.COMMANDS if name.startswith("eval ")} | {
    "inspect",
    "tune",
    "serve",
}  # every flag of theirs is observed in tests/engine/evaluation, and in tests/engine/serving


def flags_of(command: str | None) -> set[str]:
    """Every flag that a command's parser knows, but for those that print and exit."""
    actions = cli.build_parser(command)._actions
    names = {name for action in actions for name in action.option_strings if name.startswith("--")}
    assert not [action for action in actions if not action.option_strings], "a positional is not looked at here"
    return names - {"--help", "--version"}


@pytest.mark.parametrize("command", sorted(set(cli.COMMANDS) - WITHOUT_ENGINE - COMPARING | {""}))
def test_every_flag_of_a_command_has_an_observation(command: str) -> None:
    assert flags_of(command or None) == set(FLAGS[command or None])


def test_every_command_is_covered_by_a_table() -> None:
    assert set(cli.COMMANDS) == {name for name in FLAGS if name} | WITHOUT_ENGINE | COMPARING


@pytest.mark.parametrize(
    ("command", "flag"), [(command, flag) for command, observations in FLAGS.items() for flag in observations]
)
def test_a_flag_changes_what_reaches_the_engine_or_the_output(
    command: str | None, flag: str, run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("doc.txt").write_text("doc\n")
    arguments, look, expected = FLAGS[command][flag]

    def go(more: Sequence[str]) -> Run:
        if command == "chat":
            return run("chat", *more, stdin=b"hello\n")
        if command == "compress":
            out = () if "--output" in more else ("-o", "a.cake")
            return run("compress", *out, *more, stdin=b"hello\n")
        prompt = [] if flag in ("--prompt", "--prompt-tokens") and more else ["--prompt", "hi"]
        return run(*prompt, *more)

    base = ["--json"] if flag == "--logprobs" else []
    seen, without = go(arguments), go(base)
    assert seen.code == 0, seen.err
    assert look(seen) == expected
    assert look(without) != expected


def test_every_flag_of_models_is_applied(capsys: pytest.CaptureFixture[str]) -> None:
    assert flags_of("models") == {"--json"}
    assert cli.main(["models"]) == 0
    assert "smollm2-135m" in capsys.readouterr().out
    assert cli.main(["models", "--json"]) == 0
    assert "smollm2-135m" in {entry["name"] for entry in json.loads(capsys.readouterr().out)}


def test_every_argument_of_import_gguf_is_applied(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    actions = cli.build_parser("import-gguf")._actions
    assert {action.dest for action in actions} - {"help"} == {"file", "out", "dtype", "quiet"}
    calls: list[tuple[str, str, str]] = []

    def take(path: str, out: str, *, dtype: str, on_progress: object) -> Path:
        calls.append((path, out, dtype))
        return Path(out)

    monkeypatch.setattr("cake_infer.models.gguf_import.import_gguf", take)
    assert cli.main(["import-gguf", "a.gguf", "folder"]) == 0
    seen = capsys.readouterr()
    assert seen.out == "folder\n"
    assert "folder" in seen.err
    assert cli.main(["import-gguf", "a.gguf", "folder", "--dtype", "float32", "--quiet"]) == 0
    assert capsys.readouterr().err == ""
    assert calls == [("a.gguf", "folder", "bfloat16"), ("a.gguf", "folder", "float32")]


@pytest.mark.parametrize("cls", [CacheConfig, GenerationConfig])
def test_defaults_of_the_command_line_are_those_of_the_dataclasses(cls: type, run: Callable[..., Run]) -> None:
    seen = run("--prompt", "hi")
    given = seen.call("load")["cache"] if cls is CacheConfig else seen.call("stream")["config"]
    assert given == cls()


@pytest.mark.parametrize("command", [["--prompt", "hi"], ["chat"]])
def test_a_policy_that_nobody_chose_is_told_from_the_same_one_that_somebody_did(
    command: list[str], run: Callable[..., Run]
) -> None:
    assert not run(*command, stdin=b"hi\n").call("load")["cache"].policy_given
    assert run(*command, "--policy", "cake", stdin=b"hi\n").call("load")["cache"].policy_given


def test_engine_options_have_the_defaults_of_engine_load(run: Callable[..., Run]) -> None:
    from cake_infer.engine.engine import Engine

    parameters = signature(Engine.load).parameters
    for field in fields(EngineOptions):
        assert parameters[field.name].default == field.default, field.name
    reached = run("--prompt", "hi").call("load")
    assert set(reached) <= set(parameters), "Engine.load takes every keyword that the command line gives"


def test_a_new_field_of_a_config_cannot_be_forgotten_on_the_command_line() -> None:
    names = {action.dest for action in cli.build_parser(None)._actions}
    for cls in (CacheConfig, GenerationConfig, EngineOptions):
        assert {field.name for field in fields(cls)} - {"pool"} <= names


# -- flags that exclude one another, and wrong values -----------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["--prompt-tokens", "5", "--prompt", "x"],
        ["--prompt-tokens", "5", "--prompt-file", "x"],
        ["--prompt-tokens", "5", "--system", "x"],
        ["--prompt-tokens", "5", "--raw"],
        ["--prompt", "x", "--raw", "--system", "y"],
        ["--prompt", "x", "--logprobs", "2"],
        ["--prompt-file", "-", "--prompt-file", "-"],
        ["--prompt", "x", "--random-weights", "c.json", "--model", "m"],
        ["--prompt", "x", "--random-weights", "c.json", "--revision", "m"],
        ["--prompt", "x", "--budget", "1024", "--kv-memory", "1MiB"],
        ["--prompt", "x", "--policy", "full", "--budget", "1024"],
        ["--prompt", "x", "--policy", "full", "--window", "32"],
        ["--prompt", "x", "--policy", "full", "--decode-policy", "hold"],
        ["--prompt", "x", "--policy", "full", "--gamma", "200"],
        ["--prompt", "x", "--policy", "full", "--tau1", "1"],
        ["--prompt", "x", "--policy", "full", "--tau2", "1"],
        ["--prompt", "x", "--policy", "full", "--indicator", "cake"],
        ["--prompt", "x", "--policy", "full", "--allocation", "cake"],
        ["--prompt", "x", "--policy", "full", "--heads", "equal"],
        ["--prompt", "x", "--policy", "full", "--hold-by", "h2o"],
        ["--prompt", "x", "--policy", "full", "--schedule", "late"],
        ["--prompt", "x", "--policy", "full", "--decode-policy", "hold", "--recascade", "9"],
        ["--prompt", "x", "--cache", "a.cake", "--decode-policy", "hold", "--recascade", "9"],
        ["--prompt", "x", "--cache", "a.cake", "--window", "16"],
        ["--prompt", "x", "--recascade", "9"],
        ["--prompt", "x", "--hold-by", "h2o"],
        ["--prompt", "x", "--hold-by", ""],
        ["--prompt", "x", "--policy", "full", "--merge", "none"],
        ["--prompt", "x", "--policy", "full", "--kv-bits", "4", "--budget", "64"],
        ["inspect", "--raw", "--system", "x"],
        ["inspect", "--prompt-file", "-", "--prompt-file", "-"],
        ["inspect", "--random-weights", "c.json", "--model", "m"],
        ["--prompt", "x", "--policy", "full", "--policy-option", "gamma=200"],
        ["--prompt", "x", "--policy", "snapkv", "--gamma", "200"],
        ["--prompt", "x", "--allocation", "uniform", "--tau1", "1"],
        ["--prompt", "x", "--policy", "full", "--stream-prefill"],
        ["--prompt", "x", "--budget", "10%", "--stream-prefill"],
        ["--prompt", "x", "--cache", "a.cake", "--stream-prefill"],
        ["plan", "--batch", "2", "--stream-prefill"],
        ["compress", "-o", "a.cake", "--policy", "full", "--stream-prefill"],
    ],
)
def test_a_flag_that_would_have_no_effect_is_refused(arguments: list[str], run: Callable[..., Run]) -> None:
    seen = run(*arguments)
    assert seen.code == 2
    assert seen.err.startswith("error: --")
    assert seen.err.count("\n") == 1
    assert words_of_the_library(seen.err) == []
    assert seen.engine.calls == []


@pytest.mark.parametrize("flag", ["--raw", "--json", "--verbose"])
def test_flags_of_a_prompt_are_refused_where_a_chat_begins(flag: str, run: Callable[..., Run]) -> None:
    seen = run(flag, terminal=True)
    expected = 0 if flag == "--verbose" else 2
    assert seen.code == expected, seen.err
    assert seen.err.count("\n") == 1 or expected == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["--max-tokens", "many"],
        ["--max-tokens", "-1"],
        ["--chunk", "0"],
        ["--temperature", "warm"],
        ["--top-p", "nan"],
        ["--decode-policy", "shrink"],
        ["--dtype", "int4"],
        ["--stop", ""],
        ["--no-such-flag"],
        ["--promp", "x"],
        ["chatt"],
        ["--prompt"],
        ["chat", "--raw"],
        ["--prompt", "x", "chat"],
        ["plan", "--batch", "99999999999"],
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_code_2(arguments: list[str], run: Callable[..., Run]) -> None:
    seen = run(*arguments)
    assert (seen.code, seen.out) == (2, "")
    assert seen.err.startswith("error: ")
    assert seen.err.count("\n") == 1
    assert "--help" in seen.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--temperature", "-1"],
        ["--top-p", "1.5"],
        ["--repetition-penalty", "0"],
        ["--budget", "lots"],
        ["--budget", "5"],
        ["--budget", "5MiB"],
        ["--policy", "magic"],
        ["--indicator", "magic"],
        ["--indicator", ""],
        ["--allocation", ""],
        ["--heads", ""],
        ["--merge", ""],
        ["--decode-policy", "hold", "--hold-by", "magic"],
        ["--decode-policy", "hold", "--hold-by", ""],
        ["--decode-policy", "hold", "--recascade", "8", "--policy", "snapkv"],
        ["--kv-bits", "3"],
        ["--policy-option", "gamma=1", "--gamma", "2"],
        ["--policy-option", "gamma=1", "--policy-option", "gamma=2"],
        ["--policy-option", "sinks"],
        ["--policy-option", "sinks=4"],
        ["--gamma", "-1"],
        ["--gamma", "10"],
        ["--policy", "document", "--heads", "adaptive"],
        ["--decode-policy", "hold", "--recascade", "8"],
        ["--tau1", "0"],
        ["--window", "100000"],
        ["--kv-memory", "much"],
        ["--seed", "-1"],
        ["--min-p", "2"],
        ["--presence-penalty", "3"],
        ["--device", "toaster"],
        ["--attention", "magic"],
        ["--threads", "5000"],
        ["--rope-scaling", "yarn"],
        ["--rope-scaling", "yarn:0.5"],
        ["--rope-scaling", "yarn:1e308"],
        ["--quant", "int8", "--dtype", "float32"],
    ],
)
@pytest.mark.parametrize("command", [[], ["chat"], ["plan"]])
def test_a_wrong_value_is_one_line_and_exit_code_2_before_anything_is_read(
    command: list[str], arguments: list[str], run: Callable[..., Run]
) -> None:
    if command == ["plan"] and f"`{arguments[0]}" not in plan_options():
        return
    prompt = [] if command else ["--prompt-file", "there-is-none.txt"]
    seen = run(*command, *prompt, *arguments, stdin=b"hi\n")
    assert (seen.code, seen.out) == (2, "")
    assert seen.err.startswith("error: ")
    assert "there-is-none" not in seen.err
    assert "--help" in seen.err
    assert seen.err.count("\n") == 1
    assert words_of_the_library(seen.err) == []
    assert seen.engine.calls == []


def plan_options() -> str:
    from cake_infer.engine.apps.reference import markdown

    return markdown().split("## cake-infer plan\n")[1].split("## ")[0]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--prompt-file", "there-is-none.txt"],
        ["--prompt", "x" * 5000],  # longer than the context
        ["--prompt", ""],
    ],
)
def test_what_turns_out_in_the_run_is_exit_code_1(arguments: list[str], run: Callable[..., Run]) -> None:
    seen = run(*arguments)
    assert seen.code == 1
    assert seen.err.startswith("error: ")


@pytest.mark.parametrize(
    ("arguments", "begins"),
    [
        (["--top-p", "1.5"], "error: --top-p must be"),
        (["--max-tokens", "5", "--min-p", "2"], "error: --min-p must be"),
        (["--budget", "5MiB"], "error: cannot read the budget '5MiB': give tokens (1024) or a percentage"),
    ],
)
def test_a_wrong_value_is_blamed_on_its_flag(arguments: list[str], begins: str, run: Callable[..., Run]) -> None:
    assert run("--prompt", "x", *arguments).err.startswith(begins)


def test_options_in_messages_are_spelled_as_flags_here_and_as_names_in_the_library(run: Callable[..., Run]) -> None:
    with pytest.raises(BudgetError, match=r"goes to the option kv_memory$"):
        CacheConfig(budget="5MiB")
    assert "goes to --kv-memory;" in run("--prompt", "x", "--budget", "5MiB").err
    assert spell_flags("set the option max_new_tokens, or the option kv_bits") == "set --max-tokens, or --kv-bits"


def words_of_the_library(message: str) -> list[str]:
    """What only somebody who writes Python would know."""
    names = [field.name for cls in (CacheConfig, GenerationConfig, EngineOptions) for field in fields(cls)]
    return re.findall(
        "|".join([r"the option [a-z]\w*", r"\w+Config\(", *(name for name in names if "_" in name)]), message
    )


def test_every_option_that_a_message_names_is_a_flag_of_some_command() -> None:
    root = Path(cli.__file__).parent
    texts = [
        text for part in ("cache", "engine", "models") for path in (root / part).rglob("*.py") for text in strings(path)
    ]
    named = {match for text in texts for match in re.findall(r"\bthe option ([a-z][a-z0-9_]*)\b", text)}
    assert len(named) >= 20
    flags = {
        flag
        for command in (None, *cli.COMMANDS)
        for a in cli.build_parser(command)._actions
        for flag in a.option_strings
    }
    assert {name for name in named if spell_flags(f"the option {name}") not in flags} == set()


def strings(path: Path) -> list[str]:
    """Every text in a source file but the docstrings."""
    tree = ast.parse(path.read_text())
    scopes = (ast.Module, ast.ClassDef, ast.FunctionDef)
    documented = [node for node in ast.walk(tree) if isinstance(node, scopes) and ast.get_docstring(node)]
    docstrings = {id(node.body[0].value) for node in documented if isinstance(node.body[0], ast.Expr)}
    constants = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in docstrings]
    return [node.value for node in constants if isinstance(node.value, str)]


def test_no_message_of_the_library_names_a_flag() -> None:
    root = Path(cli.__file__).parent
    files = [path for part in ("models", "cache") for path in (root / part).rglob("*.py")]
    files += [path for path in (root / "engine").glob("*.py") if path.name != "options.py"]
    flags = set().union(*(flags_of(command) for command in FLAGS))
    found = [
        (path.name, text)
        for path in files
        for text in strings(path)
        if any(re.search(rf"{flag}\b", text) for flag in flags)
    ]
    # arguments for pip and for llama-gguf-split are no flags of ours
    assert [entry for entry in found if entry[0] not in ("embedded.py", "gguf_file.py")] == []


# -- prompts ----------------------------------------------------------------------------------------------------------


def test_documents_come_first_and_the_question_after_a_blank_line(run: Callable[..., Run], tmp_path: Path) -> None:
    first, second = tmp_path / "a.txt", tmp_path / "b.txt"
    first.write_bytes(b"eins\n")
    second.write_bytes(b"zwei\r\n")
    seen = run("--prompt", "was?", "--prompt-file", str(first), "--prompt-file", str(second))
    assert seen.prompt == "<user>eins\n\nzwei\n\nwas?<end><reply>"


def test_piped_text_is_the_document_of_a_question(run: Callable[..., Run]) -> None:
    assert run("--prompt", "q", stdin=b"doc\n").prompt == "<user>doc\n\nq<end><reply>"


def test_piped_text_alone_is_the_prompt(run: Callable[..., Run]) -> None:
    assert run(stdin="drei →\n".encode()).prompt == "<user>drei →<end><reply>"


def test_an_empty_pipe_leaves_the_question_alone(run: Callable[..., Run]) -> None:
    assert run("--prompt", "q", stdin=b"").prompt == "<user>q<end><reply>"


def test_a_dash_is_standard_input_wherever_it_stands(run: Callable[..., Run], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("A")
    seen = run("--prompt-file", "-", "--prompt-file", str(tmp_path / "a.txt"), stdin=b"S\n")
    assert seen.prompt == "<user>S\n\nA<end><reply>"


def test_a_pipe_that_stays_silent_is_waited_for_and_said_so() -> None:
    with subprocess.Popen(
        [sys.executable, str(FAKE), "--prompt", "q", "--json"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        assert b"waiting for text on standard input" in process.stderr.readline()
        out, _ = process.communicate(b"doc", timeout=20)
    assert json.loads(out)["prompt_tokens"] == len("<doc\n\nq><")


def test_standard_input_that_is_no_document_is_left_alone() -> None:
    seen = spawn("--prompt", "q", "--json", stdin=subprocess.DEVNULL)
    assert json.loads(seen.stdout)["prompt_tokens"] == len("<q><")


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="no such device")
def test_what_is_neither_a_file_nor_a_pipe_is_no_document(run: Callable[..., Run], tmp_path: Path) -> None:
    for name, reason in (("/dev/zero", "it is neither a file nor a pipe"), (str(tmp_path), "it is a folder")):
        seen = run("--prompt-file", name)
        assert (seen.code, seen.err) == (1, f"error: cannot read {name}: {reason}\n")


def test_a_document_has_a_greatest_size(
    run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cake_infer.engine.apps.prompt.BLOCK", 2)
    monkeypatch.setattr("cake_infer.engine.apps.prompt.LONGEST", 4)
    (tmp_path / "four").write_text("four")
    (tmp_path / "fives").write_text("fives")
    assert run("--prompt-file", str(tmp_path / "four"), "--raw").prompt.endswith("four")
    for seen in (run("--prompt-file", str(tmp_path / "fives")), run("--prompt-file", "-", stdin=b"fives")):
        assert seen.code == 1
        assert "too many for a text" in seen.err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no such device")
@pytest.mark.parametrize("command", [["policies"], ["policies", "--json"], ["models"]])
def test_a_list_that_cannot_be_written_is_one_line(command: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        seen = subprocess.run(
            [sys.executable, "-m", "cake_infer", *command], stdout=full, stderr=subprocess.PIPE, timeout=60, check=False
        )
    assert seen.returncode == 1
    assert seen.stderr.startswith(b"error: cannot write to standard output: ")
    assert seen.stderr.count(b"\n") == 1


def test_the_first_word_of_some_commands_lists_them(run: Callable[..., Run]) -> None:
    names = ("eval fidelity", "eval needle", "eval longbench", "eval generation", "eval speed")
    asked = run("eval", "--help")
    assert asked.code == 0
    assert all(f"  {name} " in asked.out for name in names)
    for words, begin in (([], "eval alone is no command"), (["much"], "no such command: 'eval much'")):
        seen = run("eval", *words)
        assert (seen.code, seen.err) == (2, f"error: {begin} (there are {', '.join(names)})\n")


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["--model=", "--prompt", "hello"], "--model"),
        (["--revision=", "--prompt", "hello"], "--revision"),
        (["--random-weights=", "--prompt", "hello"], "--random-weights"),
        (["--cache=", "--prompt", "hello"], "--cache"),
        (["inspect", "--prompt", "hello", "--out="], "--out"),
        (["eval", "fidelity", "--rows", "a.jsonl", "--out="], "--out"),
        (["eval", "fidelity", "--rows="], "--rows"),
        (["eval", "generation", "--text="], "--text"),
        (["eval", "needle", "--text="], "--text"),
        (["tune", "--text="], "--text"),
        (["serve", "--host="], "--host"),
        (["import-gguf", "", "out"], "FILE"),
        (["import-gguf", "a.gguf", ""], "OUT"),
    ],
)
def test_an_empty_name_is_no_default(words: list[str], name: str, run: Callable[..., Run]) -> None:
    seen = run(*words)
    assert seen.code == 2
    assert f"argument {name}: the value is empty" in seen.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prompt", "a", "--prompt", "b"], "--prompt is given twice: give it once"),
        (["--prompt", "a", "--budget=64", "--budget", "64"], "--budget is given twice: give it once"),
        (["compress", "-o", "a.cake", "--output", "b.cake"], "--output is given twice: give it once"),
        (
            ["eval", "fidelity", "--rows", "a.jsonl", "--policy", "cake", "--policy", "snapkv"],
            "--policy is given twice: give all its values behind one",
        ),
    ],
)
def test_no_value_is_dropped_for_a_second_one(words: list[str], message: str, run: Callable[..., Run]) -> None:
    seen = run(*words)
    assert (seen.code, seen.engine.calls) == (2, [])
    assert seen.err.startswith(f"error: {message}; see ")


@pytest.mark.parametrize("more", [["--decode-policy", "hold"], ["--kv-bits", "8"]])
def test_a_window_may_be_given_with_a_cache_where_a_reply_evicts_or_packs(more: list[str]) -> None:
    words = ["--cache", "a.cake", "--prompt", "x", "--window", "16", *more]
    parser = cli.build_parser(None)
    assert cli.app(None).conflict(parser.parse_args(words), cli.given_flags(parser, words)) is None


def test_a_flag_without_a_value_twice_and_lists_of_values_are_fine(run: Callable[..., Run]) -> None:
    assert run("--prompt", "a", "--quiet", "--quiet", "--stop", "b", "--stop", "c").code == 0


def test_a_value_that_begins_with_a_dash_can_be_given_and_the_message_says_how(run: Callable[..., Run]) -> None:
    assert "is written behind =, as in --prompt=-1" in run("--prompt", "-5 degrees?", "--budget", "-3%").err
    assert run("--prompt=-why?").prompt.endswith("<user>-why?<end><reply>")


@pytest.mark.parametrize(
    "words",
    [
        ["compress", "--prompt-file", "{text}", "-o", "{long}"],
        ["inspect", "--prompt-file", "{text}", "--out", "{long}"],
        ["--cache", "{long}", "--prompt", "x"],
        ["--prompt-file", "{long}"],
        ["--model", "{long}", "--prompt", "x"],
        ["--random-weights", "{long}", "--prompt", "x"],
        ["import-gguf", "{long}", "out"],
        ["eval", "fidelity", "--rows", "{long}.jsonl"],
        ["eval", "fidelity", "--rows", "{rows}", "--out", "{long}"],
        ["tune", "--text", "{long}"],
    ],
)
def test_a_name_that_is_too_long_is_one_line(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    (tmp_path / "text").write_text("hello")
    names = {"text": tmp_path / "text", "rows": tmp_path / "rows.jsonl", "long": str(tmp_path / ("a" * 300))}
    assert cli.main([word.format(**names) for word in words]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert "too long" in error.lower()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
@pytest.mark.parametrize("words", [["--cache", "{pipe}", "--prompt", "x"], ["import-gguf", "{pipe}", "out"]])
def test_a_pipe_is_not_waited_for_where_a_file_is_mapped(words: list[str], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    line = [word.format(pipe=tmp_path / "pipe") for word in words]
    seen = subprocess.run([sys.executable, "-m", "cake_infer", *line], capture_output=True, timeout=60, check=False)
    assert (seen.returncode, seen.stdout) == (1, b"")
    assert seen.stderr.endswith(b"it is no ordinary file\n")


def test_a_file_that_nobody_expected_to_be_odd_is_one_line(run: Callable[..., Run], monkeypatch: Any) -> None:
    def broken(*args: Any) -> None:
        raise OSError(5, "Input/output error", "weights.bin")

    monkeypatch.setattr("cake_infer.engine.apps.generate.read_prompt", broken)
    seen = run("--prompt", "x")
    assert (seen.code, seen.err) == (1, "error: cannot use weights.bin: Input/output error\n")


def test_compress_needs_a_file_and_a_document(run: Callable[..., Run], tmp_path: Path) -> None:
    for name in ("-", ""):
        seen = run("compress", "-o", name, stdin=b"hello")
        assert seen.code == 2
        assert "-o needs a file" in seen.err
    seen = run("compress", "-o", str(tmp_path / "a.cake"), stdin=b"")
    assert seen.code == 1
    assert "there is no document: give --prompt-file FILE or text on standard input" in seen.err
    assert not list(tmp_path.iterdir())


def test_raw_text_gets_no_template_and_keeps_its_inner_newlines(run: Callable[..., Run]) -> None:
    assert run("--raw", stdin=b"a\n\nb\n").prompt == "a\n\nb"


def test_an_empty_prompt_is_refused_before_weights_are_loaded(run: Callable[..., Run], tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_bytes(b"")
    for arguments in (
        ["--prompt", ""],
        ["--raw", "--prompt", ""],
        ["--prompt-file", str(tmp_path / "empty.txt")],
        [],
    ):
        seen = run(*arguments)
        assert seen.code == 1
        assert "empty" in seen.err
        assert seen.err.count("\n") == 1
        assert ("weights", None) not in seen.engine.calls


def test_an_empty_raw_prompt_runs_where_the_tokenizer_adds_a_token(run: Callable[..., Run]) -> None:
    assert run("--raw", "--prompt", "", bos=True).prompt == "<bos>"


def test_blank_text_is_a_prompt(run: Callable[..., Run]) -> None:
    assert run("--raw", "--prompt", " ").prompt == " "


def test_no_new_tokens_give_an_empty_text_and_whole_statistics(run: Callable[..., Run]) -> None:
    seen = run("--prompt", "x", "--max-tokens", "0", "--json")
    document = json.loads(seen.out)
    assert (seen.code, document["text"], document["finish_reason"], document["new_tokens"]) == (0, "", "length", 0)
    plain = run("--prompt", "x", "--max-tokens", "0")
    assert (plain.code, plain.out) == (0, "")
    assert "0 tok" in plain.err


def test_a_model_without_template_asks_for_raw(run: Callable[..., Run]) -> None:
    seen = run("--prompt", "x", template=False)
    assert seen.code == 1
    assert "--raw" in seen.err
    assert ("weights", None) not in seen.engine.calls
    assert run("--prompt", "x", "--raw", template=False).code == 0


def test_a_prompt_beyond_the_context_is_refused_with_both_numbers_before_weights_are_loaded(
    run: Callable[..., Run],
) -> None:
    seen = run("--raw", "--prompt", "x" * 120, context=100)
    assert seen.code == 1
    assert "120" in seen.err
    assert "100" in seen.err
    assert ("weights", None) not in seen.engine.calls


def test_random_tokens_need_no_tokenizer_and_no_control_token_is_among_them(run: Callable[..., Run]) -> None:
    first = run("--prompt-tokens", "2000", "--seed", "3").call("stream")["ids"]
    again = run("--prompt-tokens", "2000", "--seed", "3").call("stream")["ids"]
    other = run("--prompt-tokens", "2000", "--seed", "4").call("stream")["ids"]
    assert first == again != other
    assert set(first) <= set(range(256))
    assert len(set(first)) > 200


@pytest.mark.parametrize("source", ["file", "stdin", "dash"])
def test_broken_utf8_is_one_line_with_the_byte_offset(source: str, run: Callable[..., Run], tmp_path: Path) -> None:
    broken = b"abc\xff\xfe def"
    (tmp_path / "doc").write_bytes(broken)
    arguments = {"file": ["--prompt-file", str(tmp_path / "doc")], "stdin": [], "dash": ["--prompt-file", "-"]}[source]
    seen = run(*arguments, stdin=broken)
    assert seen.code == 1
    assert seen.err.count("\n") == 1
    assert "3" in seen.err
    assert seen.engine.calls == []


def test_a_file_that_cannot_be_read_is_one_line(run: Callable[..., Run], tmp_path: Path) -> None:
    for path in (tmp_path / "missing.txt", tmp_path):
        seen = run("--prompt-file", str(path))
        assert seen.code == 1
        assert str(path) in seen.err
        assert seen.err.count("\n") == 1


# -- output -----------------------------------------------------------------------------------------------------------


def test_text_goes_to_stdout_and_one_line_of_statistics_to_stderr(run: Callable[..., Run]) -> None:
    seen = run("--prompt", "x")
    assert (seen.code, seen.out) == (0, "one two three four five six\n")
    assert seen.err.count("\n") == 1
    assert seen.err.startswith("prompt ")


def test_a_reply_that_was_cut_says_so(run: Callable[..., Run]) -> None:
    assert "cut" in run("--prompt", "x", "--max-tokens", "3").err
    assert "cut" not in run("--prompt", "x").err


def test_json_is_one_object_with_text_ids_and_statistics(run: Callable[..., Run]) -> None:
    document = json.loads(run("--prompt", "x", "--json").out)
    assert document["text"] == "one two three four five six"
    assert document["finish_reason"] == "stop"
    assert document["ids"] == [0, 1, 2, 3, 4, 5]
    assert document["prompt_tokens"] == 4
    assert document["new_tokens"] == 6
    assert document["stats"]["kept_tokens"] == 3
    assert "logprobs" not in document


def test_output_is_utf8_whatever_the_locale() -> None:
    seen = spawn(
        "--prompt", "é", env={"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "FAKE_TOKENS": "→🙂"}
    )
    assert (seen.returncode, seen.stdout) == (0, "→🙂\n".encode())


def test_a_prompt_is_utf8_whatever_the_locale() -> None:
    locale = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    seen = spawn("--raw", "--json", "--prompt", "é→", env=locale)
    assert seen.returncode == 0, seen.stderr
    assert json.loads(seen.stdout)["prompt_tokens"] == len("é→".encode())


def test_every_piece_is_there_as_soon_as_it_is_made() -> None:
    ask, step = os.pipe()
    with subprocess.Popen(
        [sys.executable, str(FAKE), "--prompt", "x"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pass_fds=[ask],
        env={**os.environ, "FAKE_STEPS": str(ask)},
    ) as process:
        assert process.stdout is not None
        for text in (b"one", b" two", b" three"):
            os.write(step, b".")
            assert select.select([process.stdout], [], [], 30)[0], "it is kept back until more is there"
            assert os.read(process.stdout.fileno(), 100) == text
        process.kill()
    os.close(ask)
    os.close(step)


def test_a_reader_that_goes_away_ends_the_run_quietly() -> None:
    command = f"{sys.executable} {FAKE} --prompt x | head -c 5; echo ${{PIPESTATUS[0]}}"
    environment = {**os.environ, "FAKE_TOKENS": "word", "FAKE_ENDLESS": "t"}
    seen = subprocess.run(["bash", "-c", command], capture_output=True, timeout=60, env=environment, check=False)
    assert seen.stdout == b"word " + b"141\n" or seen.stdout == b"word\n141\n" or seen.stdout.endswith(b"141\n")
    assert seen.stderr == b""


def test_standard_error_that_is_closed_does_not_end_a_run() -> None:
    seen = subprocess.run(
        ["bash", "-c", f"{sys.executable} {FAKE} --prompt x 2>&-"], capture_output=True, timeout=60, check=False
    )
    assert (seen.returncode, seen.stdout) == (0, b"one two three four five six\n")


@pytest.mark.parametrize("json_flag", [[], ["--json"]])
def test_ctrl_c_keeps_the_partial_text_and_exits_with_130(json_flag: list[str], tmp_path: Path) -> None:
    process = start("--prompt", "x", *json_flag, FAKE_ENDLESS="t", FAKE_TOKENS="word", FAKE_MARKS=tmp_path / "m")
    wait_for_marks(tmp_path / "m", "pttt")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert b"Traceback" not in err
    assert out.endswith(b"\n")
    text = json.loads(out)["text"] if json_flag else out.decode().removesuffix("\n")
    assert text.startswith("word word word")
    if json_flag:
        assert json.loads(out)["finish_reason"] == "interrupted"


def test_ctrl_c_in_the_prefill_exits_with_130_and_no_text(tmp_path: Path) -> None:
    process = start("--prompt", "x", FAKE_ENDLESS="p", FAKE_MARKS=tmp_path / "m")
    wait_for_marks(tmp_path / "m", "p")
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=20) == (b"", b"")
    assert process.returncode == 130


@pytest.mark.parametrize("module", ["cake_infer.cli", "argparse", "cake_infer.engine.options", "torch"])
def test_ctrl_c_while_the_command_is_imported_exits_with_130_without_a_word(module: str) -> None:
    code = f"""
import runpy, sys

class Struck:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            raise KeyboardInterrupt

sys.modules.pop({module!r}, None)
sys.meta_path.insert(0, Struck())
sys.argv = ["cake-infer", "--prompt-tokens", "3"]
runpy.run_module("cake_infer", run_name="__main__")
"""
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False)
    assert (seen.returncode, seen.stdout, seen.stderr) == (130, b"", b"")


# -- starting ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--help"], *([*name.split(), "--help"] for name in cli.COMMANDS)])
def test_help_imports_neither_torch_nor_numpy_nor_tokenizers(arguments: list[str]) -> None:
    code = (
        "import sys; from cake_infer.cli import main; code = main(sys.argv[1:]);"
        "heavy = {'torch', 'tokenizers', 'numpy', 'jinja2', 'huggingface_hub'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    seen = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, timeout=60, check=False)
    assert seen.returncode == 0, seen.stderr
    assert seen.stdout.startswith(b"usage: cake-infer")


def test_only_commands_that_exist_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name, (module, _) in cli.COMMANDS.items():
        assert f"  {name} " in shown
        assert importlib.util.find_spec(f"cake_infer.engine.apps.{module}") is not None


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    from cake_infer import __version__

    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"cake-infer {__version__}\n"
    seen = subprocess.run([sys.executable, "-m", "cake_infer", "--version"], capture_output=True, text=True, check=True)
    assert seen.stdout == f"cake-infer {__version__}\n"


def test_the_written_options_are_those_of_the_parsers() -> None:
    from cake_infer.engine.apps.reference import markdown

    written = Path(__file__).parent.parent / "docs" / "options.md"
    assert written.read_text(encoding="utf-8") == markdown(), (
        "write it anew: python -m cake_infer.engine.apps.reference > docs/options.md"
    )
    for command in cli.COMMANDS:
        for flag in flags_of(command) if command != "import-gguf" else {"--dtype"}:
            assert f"`{flag}" in markdown().split(f"## cake-infer {command}\n")[1].split("## ")[0]


def test_help_of_raw_says_that_control_tokens_count(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["--help"])
    assert "control tokens" in " ".join(capsys.readouterr().out.split())
