"""`eval needle`, `eval longbench`, `eval speed` and `inspect` from the command line to what is on disk."""

from __future__ import annotations

import base64
import json
import os
import re
import sys

import pytest
from cake_infer import Engine, cli
from cake_infer.engine.apps import eval_speed
from cake_infer.engine.evaluation import replies, study
from cake_infer.engine.evaluation.inspection_page import is_inspection_page
from cake_infer.engine.evaluation.report import document

TEXT = "It was a fox that came to the sea. An owl flew over the hill. " * 6


@pytest.fixture
def go(tmp_path, model_folder):
    folder = model_folder()

    def run(command: str, *words: str) -> int:
        line = [*command.split(), "--model", str(folder), "--window", "8", "--step", "eager"]
        return cli.main([*line, *words], Engine.load)

    return run


def records(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_needles_are_scored_by_length_and_depth_and_a_rerun_reads_nothing(go, tmp_path, capsys, monkeypatch):
    asked = []

    def reply(runner, reading, kept, suffix, tokens, **options):
        """The full cache finds what it is asked for, a policy does not."""
        asked.append((reading.tokens, len(suffix), tokens))
        number = numbers.pop(0)
        return [[] if one is not None else number for one in kept]

    tokenizer = None
    read = study.read

    def reading(runner, ids, cells, **options):
        text = tokenizer.decode(ids)
        found = re.search(r"magic number of \w+ is (\d+)\.", text)
        numbers.append(tokenizer.encode(found[1], add_bos=False))
        return read(runner, ids, cells, **options)

    numbers: list[list[int]] = []
    monkeypatch.setattr(replies, "greedy_replies", reply)
    monkeypatch.setattr(study, "read", reading)
    load = Engine.load

    def loaded(*args, **options):
        nonlocal tokenizer
        engine = load(*args, **options)
        tokenizer = engine.text_tokenizer()
        return engine

    monkeypatch.setattr(Engine, "load", loaded)
    words = ("--lengths", "200", "400", "--depths", "0", "100", "--policy", "full", "cake", "--budget", "16")
    words += ("--tokens", "7", "--out", str(tmp_path / "out"), "--repeats", "2")
    assert go("eval needle", *words) == 0
    found = records(tmp_path / "out" / "needle.jsonl")
    assert len(found) == 2 * 2 * 2 * 2
    assert {(one["length"], one["depth"]) for one in found} == {(200, 0.0), (200, 100.0), (400, 0.0), (400, 100.0)}
    assert all(one["score"] == (one["policy"] == "full") for one in found)
    assert all(one[1:] == (0, 7) for one in asked)
    assert all(one["length"] * 0.7 < one["prompt_tokens"] < one["length"] + 150 for one in found)
    text = capsys.readouterr().out
    assert re.search(r"full +8 +100\.0 \(100\.0 to 100\.0\)", text)
    assert re.search(r"cake +8 +0\.0 .* worse", text)
    assert re.search(r"depth 100% +0 +0", text)
    asked.clear()
    assert go("eval needle", *words) == 0
    assert not asked
    assert capsys.readouterr().out == text
    assert (tmp_path / "out" / "needle-inside.html").exists()


def test_own_needles_and_texts(go, tmp_path, capsys, monkeypatch):
    (tmp_path / "hay.txt").write_text(TEXT)
    seen = []
    read = study.read
    monkeypatch.setattr(study, "read", lambda r, ids, *a, **k: (seen.append(ids), read(r, ids, *a, **k))[1])
    own = ("--needle", "The key is blue.", "--needle-question", "Which key?", "--needle-answer", "blue")
    words = (
        "--lengths",
        "200",
        "--depths",
        "50",
        "--policy",
        "cake",
        "--budget",
        "16",
        "--text",
        str(tmp_path / "hay.txt"),
    )
    words += ("--out", str(tmp_path / "out"), "--tokens", "3", "--question", "after", "--raw")
    assert go("eval needle", *words, *own) == 0
    (one,) = records(tmp_path / "out" / "needle.jsonl")
    assert one["suffix_tokens"] > 5
    text = Engine.load(tmp_path / "model", step="eager").text_tokenizer().decode(seen[0])
    assert "An owl flew over the hill. The key is blue. It was a fox" in text or "The key is blue. An owl" in text
    assert "Which key?" not in text
    capsys.readouterr()
    for flags, message in (
        (own[:2], "belong together"),
        ((*own, "--needles", "2"), "no effect with a --needle of your own"),
        (("--depths", "101"), "must be a number between 0 and 100"),
    ):
        assert go("eval needle", *words, *flags) == 2
        assert message in capsys.readouterr().err
    assert go("eval needle", *[word.replace("200", "9000") for word in words]) == 1
    assert "a haystack of 9,000 tokens with its question does not fit the context of 4,096" in capsys.readouterr().err


def test_longbench_replies_are_scored_by_task(go, tmp_path, capsys, monkeypatch):
    rows = [
        {
            "context": TEXT,
            "input": "Who?",
            "answers": ["a fox"],
            "dataset": task,
            "_id": f"{task}{i}",
            "all_classes": None,
        }
        for task in ("hotpotqa", "passage_count")
        for i in range(2)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = []

    def reply(runner, reading, kept, suffix, tokens, **options):
        asked.append(tokens)
        return [encode("fox") if one is None else [] for one in kept]

    load = Engine.load
    encode = None

    def loaded(*args, **options):
        nonlocal encode
        engine = load(*args, **options)
        encode = lambda text: engine.text_tokenizer().encode(text, add_bos=False)  # noqa: E731
        return engine

    monkeypatch.setattr(Engine, "load", loaded)
    monkeypatch.setattr(replies, "greedy_replies", reply)
    words = ("--rows", str(tmp_path / "rows.jsonl"), "--policy", "full", "cake", "--budget", "20%")
    assert go("eval longbench", *words, "--out", str(tmp_path / "out"), "--question", "after") == 0
    found = records(tmp_path / "out" / "longbench.jsonl")
    assert set(asked) == {32}
    scores = {(one["task"], one["policy"]): one["score"] for one in found}
    assert scores == {
        ("hotpotqa", "full"): 1.0,
        ("hotpotqa", "cake"): 0.0,
        ("passage_count", "full"): 0.0,
        ("passage_count", "cake"): 0.0,
    }
    text = capsys.readouterr().out
    assert re.search(r"policy +hotpotqa +passage_count +mean of tasks", text)
    assert re.search(r"full +100\.00 +0\.00 +50\.00", text)
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows[0] | {"dataset": "mine"}) + "\n")
    assert go("eval longbench", *words) == 1
    assert "mine is no task of LongBench" in capsys.readouterr().err


def test_speed_runs_each_policy_in_a_process_of_its_own_by_turns(tmp_path, write_checkpoint, capsys, monkeypatch):
    commands, model = [], write_checkpoint(tmp_path / "m")

    def one_run(command):
        commands.append(list(command))
        return {
            "prefill_s": 1.0,
            "decode_tokens_per_s": 20.0 + len(commands),
            "peak_memory": 2**30,
            "kept_bytes": 2**20,
        }

    monkeypatch.setattr(eval_speed, "one_run", one_run)
    words = ["eval", "speed", "--lengths", "100", "--tokens", "4", "--repeats", "2", "--out", str(tmp_path)]
    words += ["--policy", "full", "snapkv,allocation=cake,pool=9,kv_bits=4", "--budget", "64"]
    words += ["--quant", "int8", "--model", str(model)]
    assert cli.main(words) == 0
    assert len(commands) == 4
    names = [command[command.index("--policy") + 1] for command in commands]
    assert names == ["full", "snapkv", "full", "snapkv"]
    full, other = commands[:2]
    assert full[:3] == [sys.executable, "-m", "cake_infer"]
    assert "--budget" not in full
    line = " ".join(other)
    for part in (
        "--prompt-tokens 100",
        "--max-tokens 4",
        "--budget 64",
        "--allocation cake",
        "--policy-option pool=9",
        "--kv-bits 4",
        "--quant int8",
        f"--model {model}",
        "--tuning off",
    ):
        assert part in line, part
    assert cli.build_parser(None).parse_args(other[3:]).allocation == "cake"
    assert cli.build_parser(None).parse_args(full[3:]).policy == "full"
    out = capsys.readouterr().out
    assert re.search(r"full +2 +1\.00 \(1\.00 to 1\.00\) +22\.0", out)
    assert "1024" in out
    assert cli.main(words) == 0
    assert len(commands) == 4, "a rerun has nothing to run"


def test_more_runs_than_can_be_listed_are_refused(capsys):
    assert cli.main(["eval", "speed", "--repeats", "99999999999"]) == 2
    assert "must be a whole number between 1 and 1,000, not 99,999,999,999" in capsys.readouterr().err


def test_a_run_that_fails_says_why(tmp_path):
    with pytest.raises(cli.CakeError, match="no-such-model"):
        eval_speed.one_run([sys.executable, "-m", "cake_infer", "--model", "./no-such-model", "--prompt", "x"])


def test_the_page_says_of_every_token_which_rows_kept_it(go, tmp_path, capsys):
    (tmp_path / "doc.txt").write_text(TEXT)
    page = tmp_path / "page.html"
    words = ("--prompt-file", str(tmp_path / "doc.txt"), "--prompt", "Who </script> came?", "--out", str(page))
    assert go("inspect", *words, "--policy", "cake", "cake,heads=adaptive", "full", "--budget", "24") == 0
    assert is_inspection_page(page), "so that the next one may take its place"
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"(src|href)=|https?://|@import|url\(", text), "the page asks for something"
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])
    assert "".join(data["tokens"]).count("An owl flew over the hill.") == 6
    assert "Who </script> came?" in "".join(data["tokens"])
    assert data["tokens"][data["control"][0]] in ("<s>", "<|im_start|>")
    tokens, layers, heads = len(data["tokens"]), data["layers"], data["heads"]
    assert [cell["policy"] for cell in data["cells"]] == ["cake", "cake,heads=adaptive", "full"]
    for cell in data["cells"]:
        kept = 0
        for layer in range(layers):
            packed = base64.b64decode(cell["bits"][layer])
            stride = -(-tokens // 8)
            for head in range(heads):
                row = packed[head * stride : (head + 1) * stride]
                bits = [row[i >> 3] >> (i & 7) & 1 for i in range(tokens)]
                assert sum(bits) == cell["lengths"][layer][head]
                assert all(bits[-8:]), "the window is always kept"
                kept += sum(bits)
        assert kept == layers * heads * (tokens if cell["policy"] == "full" else 24)
        assert cell["share"] == pytest.approx(kept / (tokens * layers * heads))
    assert len(set(data["cells"][0]["preferences"])) == layers
    capsys.readouterr()
    assert go("inspect", *words, "--raw", "--system", "x") == 2
    assert "--system has no effect with --raw" in capsys.readouterr().err


def test_bits_are_not_accepted_where_they_would_not_be_applied(tmp_path, capsys):
    for words, reason in (
        (["eval", "fidelity", "--rows", str(tmp_path)], "no comparison packs the rows of a merging policy"),
        (["inspect", "--prompt", "a text"], "kv_bits has no effect here"),
    ):
        assert cli.main([*words, "--policy", "d2o,kv_bits=4", "--out", str(tmp_path / "out")]) == 2
        assert reason in capsys.readouterr().err


def test_a_page_takes_the_place_of_no_other_file(tmp_path, capsys):
    own, notes, report = tmp_path / "own.html", tmp_path / "notes.md", tmp_path / "report.html"
    own.write_text(document("What a model keeps", "", ""))
    notes.write_text("mine")
    report.write_text(document("The results", "", ""))
    for words, reason in (
        ([str(own), "--out", str(own)], "it is read with --prompt-file"),
        ([str(own), "--out", str(notes)], "what is there is no page that inspect wrote"),
        ([str(notes), "--out", str(notes)], "what is there is no page that inspect wrote"),
        ([str(notes), "--out", str(report)], "what is there is no page that inspect wrote"),
        ([str(notes), "--out", str(tmp_path / "new" / "page.html")], "there is no folder"),
    ):
        assert cli.main(["inspect", "--prompt-file", *words]) == 1
        error = capsys.readouterr().err
        assert reason in error
        assert error.count("\n") == 1
    assert notes.read_text() == "mine"
    assert not (tmp_path / "new").exists()


def test_a_page_that_cannot_be_written_leaves_the_old_one(go, tmp_path, capsys, monkeypatch):
    page = tmp_path / "page.html"
    page.write_text(document("What a model keeps", "", ""))
    before = page.read_bytes()
    monkeypatch.setattr(os, "fsync", full_disk)
    assert go("inspect", "--prompt", TEXT, "--budget", "24", "--out", str(page)) == 1
    assert f"cannot write {page}: No space left" in capsys.readouterr().err
    assert page.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def full_disk(descriptor):
    raise OSError(28, "No space left on device")


def test_a_haystack_beyond_the_context_is_refused_before_it_is_made_up(go, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("cake_infer.engine.apps.eval_needle.haystack", None)
    assert go("eval needle", "--lengths", "99999999", "--depths", "50", "--out", str(tmp_path / "out")) == 1
    assert "a haystack of 99,999,999 tokens with its question does not fit" in capsys.readouterr().err


def test_inspect_asks_for_a_prompt_before_it_loads_a_model(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert cli.main(["inspect", "--out", str(tmp_path / "a.html")], pytest.fail) == 1
    assert "the prompt is empty" in capsys.readouterr().err
