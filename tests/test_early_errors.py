"""What is wrong whatever the weights are is told before torch, which takes seconds, is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# runs each command line of standard input, a JSON list of lists, in a process in which torch cannot be imported
SCRIPT = """
import contextlib, io, json, sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise AssertionError("torch is imported")
sys.meta_path.insert(0, NoTorch())
from cake_infer.cli import main
answers = []
for argv in json.load(sys.stdin):
    with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main(argv)
        except AssertionError as error:
            code = str(error)
    answers.append([code, err.getvalue()])
print(json.dumps(answers))
"""


@pytest.fixture
def model(tmp_path: Path, write_checkpoint: Callable[..., Path]) -> str:
    """A folder with a model whose context is 1,024 tokens."""
    return str(write_checkpoint(tmp_path / "model", max_position_embeddings=1024))


def test_what_needs_no_weights_is_told_before_torch_is_imported(tmp_path: Path, model: str) -> None:
    text, cut = tmp_path / "text.txt", tmp_path / "cut.cake"
    text.write_text("some words\n" * 40)
    cut.write_bytes(b"\x40\0\0\0\0\0\0\0{")
    here, none = ["--model", model, "--prompt", "x"], str(tmp_path / "none")
    compress = ["compress", "--model", model, "--prompt-file", str(text)]
    gone = "No such file or directory"
    cases = {
        (*here, "--prompt-file", none): f"cannot read {none}: {gone}",
        ("--prompt", "x", "--model", none): f"no folder {none}: check the path",
        ("--prompt", "x", "--model", str(tmp_path)): "has no config.json",
        ("--prompt", "x", "--model", "smollm-135"): "no model 'smollm-135': did you mean",
        ("--prompt", "x", "--random-weights", none): "has no config.json",
        ("--model", model, "--prompt", ""): "the prompt is empty",
        (*here, "--budget", "16"): "a budget of 16 tokens is below the window of 32",
        (*here, "--policy", "nothing"): "unknown policy 'nothing'",
        (*here, "--policy", "gate"): "the indicator gate needs the policy option file=PATH",
        (*here, "--allocation", "table", "--policy-option", f"table={none}"): f"there is no file {none}",
        (
            *here,
            "--context",
            "2048",
        ): "a context of 2,048 tokens is more than the model's 1,024: stretch it with --rope",
        (*here, "--rope-scaling", "longrope:4"): "longrope needs more than a factor",
        (*here, "--cache", none): f"cannot read {none}: {gone}",
        (*here, "--cache", str(text)): f"{text} is no saved cache",
        (*here, "--cache", str(cut)): f"{cut} is no saved cache, or only the beginning of one",
        (*compress, "-o", f"{none}/a.cake"): f"there is no folder {none}",
        (*compress, "-o", str(text)): f"cannot write {text}: what is there is no saved cache",
        ("inspect", *here, "--out", str(text)): f"cannot write {text}: what is there is no page",
        ("inspect", *here, "--policy", f"gate,file={none}"): f"there is no file {none}",
        ("chat", "--model", model, "--context", "2048"): "more than the model's 1,024",
        ("serve", "--model", none): f"no folder {none}",
        ("tune", "--model", model, "--text", none): f"cannot read {none}: {gone}",
        ("eval", "fidelity", "--model", model, "--rows", none): f"{none} does not exist",
        ("eval", "needle", "--model", model, "--text", none): f"cannot read {none}: {gone}",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], input=json.dumps(list(cases)), capture_output=True, text=True, check=True
    )
    answers = json.loads(done.stdout)
    assert len(answers) == len(cases)
    for (argv, message), (code, err) in zip(cases.items(), answers, strict=True):
        assert code in (1, 2), (argv, code)
        assert err.startswith("error: "), argv
        assert err.count("\n") == 1
        assert message in err, (argv, err)
