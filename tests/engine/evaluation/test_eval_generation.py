"""`cake-infer eval generation` from texts to a report: what is on disk, what is shown, and that a rerun goes on."""

from __future__ import annotations

import json

import pytest
from cake_infer import Engine, cli
from cake_infer.engine.evaluation import generation as module
from cake_infer.engine.evaluation.excerpts import excerpts
from cake_infer.errors import PromptError

TEXT = "It was a fox that came to the sea. An owl flew over the hill, and nobody knew of it until the evening. " * 12
POLICIES = ("cake,hold_by=attention", "cake,recascade=5", "snapkv,hold_by=streaming-llm,interval=4")


@pytest.fixture
def command(tmp_path, model_folder):
    folder = model_folder()
    for name in ("one.txt", "two.txt"):
        (tmp_path / name).write_text(f"{name}: {TEXT}", encoding="utf-8")

    def run(*words: str) -> int:
        line = ["eval", "generation", "--model", str(folder), "--out", str(tmp_path / "out"), "--step", "eager"]
        line += [] if "--text" in words else ["--text", str(tmp_path / "one.txt"), str(tmp_path / "two.txt")]
        for flag, value in (("--window", "8"), ("--prompt-tokens", "60"), ("--tokens", "12"), ("--budget", "16")):
            line += [] if flag in words else [flag, value]
        return cli.main([*line, *([] if "--policy" in words else ["--policy", *POLICIES]), *words], Engine.load)

    return run


def results(tmp_path):
    return [json.loads(line) for line in (tmp_path / "out" / "generation.jsonl").read_text().splitlines()]


def test_every_excerpt_policy_and_budget_has_a_result_tables_and_a_page(command, tmp_path, capsys):
    assert command("--budget", "16", "40%", "--excerpts", "2") == 0
    found = results(tmp_path)
    assert len(found) == 2 * 2 * 3 * 2
    tokenizer = Engine.load(tmp_path / "model", step="eager").text_tokenizer()
    half = len(tokenizer.encode(f"one.txt: {TEXT}", add_bos=False)) // 2
    assert {(one["text"], one["first"]) for one in found} == {
        (name, first) for name in ("one.txt", "two.txt") for first in (0, half)
    }
    for record in found:
        budget = 24 if record["budget"] == "40%" else 16
        over = 3 if record["policy"].startswith("snapkv") else 0
        assert record["most_slots"] == 6 * (budget + over)
        assert (record["prompt_tokens"], record["tokens"], record["new_tokens"]) == (60, 12, 12)
        assert record["kl"] == pytest.approx(sum(record[f"kl_{quarter}"] for quarter in range(1, 5)) / 4)
        assert record["kl"] > 0
    out = capsys.readouterr()
    for word in (
        "budget 16, 12 tokens after 60",
        "by quarter, budget 40%",
        "minus cake,hold_by=attention",
        "quarter 4",
    ):
        assert word in out.out
    assert "with 7 caches side by side" in out.err
    page = (tmp_path / "out" / "generation.html").read_text(encoding="utf-8")
    assert "snapkv,hold_by=streaming-llm,interval=4" in page
    assert "what each held at most" in page
    assert 'src="http' not in page


def test_the_curve_over_the_quarters_is_drawn(command, tmp_path):
    pytest.importorskip("matplotlib")
    assert command() == 0
    image = (tmp_path / "out" / "generation-quarters-16.png").read_bytes()
    assert image.startswith(b"\x89PNG")


def test_a_rerun_decodes_only_what_is_missing(command, tmp_path, capsys, monkeypatch):
    assert command() == 0
    whole, table = results(tmp_path), capsys.readouterr().out
    path = tmp_path / "out" / "generation.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    asked = []
    drift = module.drift
    monkeypatch.setattr(module, "drift", lambda *a, **k: (asked.append(len(a[3])), drift(*a, **k))[1])
    assert command() == 0
    assert asked == [1]
    out = capsys.readouterr()
    assert out.out == table
    assert "1 of 2 prompts are in" in out.err
    assert results(tmp_path) == whole
    assert command("--tokens", "13") == 0
    assert asked == [1, 3, 3]


def test_a_baseline_can_be_any_of_them(command, capsys):
    assert command("--policy", *POLICIES, "--baseline", POLICIES[1]) == 0
    assert f"minus {POLICIES[1]}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--tokens", "3"], 2, "--tokens is at least 4, a token for each quarter, not 3"),
        (["--policy", "cake,hold_by=nothing"], 2, "unknown hold rule 'nothing'"),
        (["--policy", "cake,recascade=0"], 2, "must be a whole number between 1 and"),
        (["--policy", "cake,recascade=some"], 2, "must be a whole number between 1 and"),
        (["--policy", "cake,hold_by=tova,recascade=4"], 2, "has no form for hold by tova"),
        (["--policy", "full,hold_by=tova"], 2, "no effect with the policy full"),
        (["--policy", "cake,kv_bits=4"], 2, "leave kv_bits out of cake,kv_bits=4"),
        (["--policy", "cake,kv_bits=4,hold_by=tova,interval=32"], 2, "leave kv_bits out of cake,kv_bits=4"),
        (["--budget", "4"], 2, "below the window of 8"),
        (["--text", "no-such.txt"], 1, "no-such.txt"),
        (["--prompt-tokens", "5000"], 1, "do not fit the context of 4,096"),
        (["--excerpts", "90"], 1, "excerpts, or shorter ones"),
    ],
)
def test_what_cannot_be_compared_is_one_line(command, capsys, words, code, message):
    assert command(*words) == code
    err = capsys.readouterr().err
    assert message in err
    assert err.strip().splitlines()[-1].startswith("error: ")


@pytest.mark.parametrize("name", ["eval fidelity", "eval needle", "eval longbench", "eval speed", "inspect"])
def test_commands_that_do_not_decode_by_a_rule_refuse_one(name, capsys, tmp_path):
    words = {"eval fidelity": ["--rows", str(tmp_path)], "eval longbench": ["--rows", str(tmp_path)]}.get(name, [])
    words += ["--prompt", "x"] if name == "inspect" else []
    for policy in ("cake,hold_by=tova", "cake,recascade=4"):
        assert cli.main([*name.split(), *words, "--policy", policy, "--out", str(tmp_path / "out.html")]) == 2
        assert "which is not compared here: leave hold_by and recascade out" in " ".join(
            capsys.readouterr().err.split()
        )


def test_excerpts_are_apart_and_named_by_where_they_begin():
    found = excerpts([("a", "x" * 100), ("b", "y" * 31)], 3, 10, lambda text: list(range(len(text))))
    assert [(one.name, one.ids) for one in found] == [
        ("a from 0", tuple(range(10))),
        ("a from 33", tuple(range(33, 43))),
        ("a from 66", tuple(range(66, 76))),
        ("b from 0", tuple(range(10))),
        ("b from 10", tuple(range(10, 20))),
        ("b from 20", tuple(range(20, 30))),
    ]
    with pytest.raises(PromptError, match="b has 31 tokens, fewer than 4 x 10: take at most 3 excerpts"):
        excerpts([("b", "y" * 31)], 4, 10, lambda text: list(range(len(text))))
    with pytest.raises(PromptError, match="take shorter excerpts, or leave it out"):
        excerpts([("b", "y" * 31)], 1, 32, lambda text: list(range(len(text))))
    with pytest.raises(PromptError, match="two texts are called 'a'"):
        excerpts([("a", "x" * 100), ("a", "x" * 100)], 1, 10, lambda text: list(range(len(text))))
