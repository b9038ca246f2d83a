"""`cake-infer eval fidelity` from rows to a report: what is on disk, what is shown, and that a rerun goes on."""

from __future__ import annotations

import json
from functools import partial

import pytest
from cake_infer import Engine, cli
from cake_infer.engine.evaluation import fidelity as module

ROWS = [
    {"context": f"It was {animal} that came to the sea. " * 8, "input": "Who came?", "answers": [animal], "_id": animal}
    for animal in ("a fox", "an owl", "a cat")
]


@pytest.fixture
def command(tmp_path, model_folder):
    folder = model_folder()
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")

    def run(*words: str) -> int:
        line = ["eval", "fidelity", "--model", str(folder), "--out", str(tmp_path / "out"), "--step", "eager", *words]
        usual = {"--rows": str(rows), "--tokens": "6", "--window": "8"}
        if "--own-windows" in words:
            del usual["--window"]
        for flag, value in usual.items():
            line += [] if flag in words else [flag, value]
        return cli.main(line, partial(Engine.load))

    return run


def results(tmp_path):
    return [json.loads(line) for line in (tmp_path / "out" / "fidelity.jsonl").read_text().splitlines()]


def test_every_prompt_policy_and_budget_has_a_result_a_table_and_a_page(command, tmp_path, capsys):
    assert command("--policy", "cake", "snapkv,heads=adaptive", "full", "--budget", "16", "10%") == 0
    found = results(tmp_path)
    assert len(found) == 3 * 3 * 2
    by_policy = {}
    for record in found:
        by_policy.setdefault(record["policy"], []).append(record)
        share = 1.0 if record["policy"] == "full" else record["budget_tokens"] / record["prompt_tokens"]
        assert record["kept"] == pytest.approx(share)
    assert all(record["kl"] == pytest.approx(0, abs=1e-9) for record in by_policy["full"])
    assert all(record["kl"] > 0 for record in by_policy["cake"])
    out = capsys.readouterr()
    for word in ("budget 16", "budget 10%", "snapkv,heads=adaptive", "minus cake", "KL (nats)", "answer loss"):
        assert word in out.out
    assert "3 prompts" not in out.out
    assert "needs" in out.err
    page = (tmp_path / "out" / "fidelity-inside.html").read_text(encoding="utf-8")
    assert "snapkv,heads=adaptive" in page
    assert 'src="http' not in page
    assert "href" not in page


def test_a_rerun_measures_only_what_is_missing(command, tmp_path, capsys, monkeypatch):
    words = ("--policy", "cake", "snapkv", "--budget", "16", "24")
    assert command(*words) == 0
    whole, table = results(tmp_path), capsys.readouterr().out
    path = tmp_path / "out" / "fidelity.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    asked = []
    measure = module.fidelity
    monkeypatch.setattr(module, "fidelity", lambda *a, **k: (asked.append(len(a[2])), measure(*a, **k))[1])
    assert command(*words) == 0
    assert asked == [1]
    out = capsys.readouterr()
    assert out.out == table
    assert "last line is damaged" in out.err
    assert "2 of 3 prompts are in" in out.err
    assert results(tmp_path) == whole
    assert command("--policy", "cake", "snapkv", "tova", "--budget", "16", "24") == 0
    assert asked == [1, 2, 2, 2]
    assert len(results(tmp_path)) == len(whole) + 6


def test_the_question_after_compression_is_another_measurement(command, tmp_path):
    assert command("--policy", "cake", "--budget", "16") == 0
    assert command("--policy", "cake", "--budget", "16", "--question", "after") == 0
    inside, after = results(tmp_path)[:3], results(tmp_path)[3:]
    for one, other in zip(inside, after, strict=True):
        assert other["suffix_tokens"] > 10
        assert one["prompt_tokens"] == other["prompt_tokens"] + other["suffix_tokens"]
        assert other["tokens"] == one["tokens"] + 1
        assert one["kl"] != other["kl"]
    assert (tmp_path / "out" / "fidelity-after.html").exists()


def test_a_policy_that_merges_is_read_on_its_own_and_the_user_is_told(command, tmp_path, capsys):
    assert command("--policy", "cake", "cake,merge=d2o", "--budget", "16", "24") == 0
    err = capsys.readouterr().err
    assert (
        "cake,merge=d2o: what is kept is not the full cache's, so that each prompt is read once more for each budget"
        in err
    )
    kl = {(record["policy"], record["prompt"], record["budget"]): record["kl"] for record in results(tmp_path)}
    pairs = [(value, kl["cake", *key[1:]]) for key, value in kl.items() if key[0] == "cake,merge=d2o"]
    assert len(pairs) == 6
    assert all(merged != plain for merged, plain in pairs)


def test_own_windows_are_those_of_the_papers_at_equal_budgets(command, tmp_path, capsys):
    policies = ("cake", "pyramidkv", "tova")
    assert command("--policy", *policies, "--budget", "40", "--own-windows") == 0
    own = {record["policy"]: record for record in results(tmp_path) if record["prompt"].startswith(ROWS[0]["_id"])}
    assert {record["window"] for record in own.values()} == {"own"}
    for policy, window in zip(policies, (32, 8, 1), strict=True):
        assert command("--policy", policy, "--budget", "40", "--window", str(window)) == 0
        same = [one for one in results(tmp_path) if (one["policy"], one["window"]) == (policy, window)]
        assert own[policy]["kl"] == pytest.approx(same[0]["kl"], rel=1e-4)
        assert own[policy]["kept"] == same[0]["kept"]
    capsys.readouterr()
    assert command("--own-windows", "--policy", "tova", "--budget", "31") == 0
    assert command("--own-windows", "--policy", *policies, "--budget", "31") == 2
    assert "below the window of 32" in capsys.readouterr().err
    assert command("--own-windows", "--window", "8") == 2
    assert "give one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--policy", "nothing"], 2, "unknown policy 'nothing'"),
        (["--budget", "4"], 2, "below the window of 8"),
        (["--baseline", "tova"], 2, "the baseline tova is not among the policies"),
        (["--rows", "no-such.jsonl"], 1, "no-such.jsonl does not exist"),
        (["--tokens", "0"], 2, "--tokens must be a whole number between 1 and 2,147,483,647, not 0"),
        (["--max-prompt", "3"], 1, "cannot lose"),
    ],
)
def test_what_cannot_be_measured_is_one_line(command, capsys, words, code, message):
    assert command(*words) == code
    err = capsys.readouterr().err
    assert message in err
    assert err.strip().splitlines()[-1].startswith("error: ")
