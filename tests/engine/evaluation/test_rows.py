"""Rows of JSONL files: LongBench's and plain ones; anything else is one clear line."""

from __future__ import annotations

import gzip
import json

import pytest
from cake_infer.engine.evaluation.rows import read_rows
from cake_infer.errors import PromptError

ROW = {
    "context": "A long {input} story.",
    "input": "Who?",
    "answers": ["Ann", "Bob"],
    "dataset": "hotpotqa",
    "_id": "x1",
}


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_a_longbench_row_gets_the_official_prompt_in_two_parts(tmp_path):
    (row,) = read_rows([write(tmp_path / "any.jsonl", ROW)])
    assert row.before == (
        "Answer the question based on the given passages. Only give me the answer and do not output any other words."
        "\n\nThe following are given passages.\nA long {input} story."
    )
    assert row.question == (
        "\n\nAnswer the question based on the given passages. Only give me the answer and do not output any other "
        "words.\n\nQuestion: Who?\nAnswer:"
    )
    assert (row.name, row.task, row.answers, row.plain) == ("x1", "hotpotqa", ("Ann", "Bob"), False)


def test_few_shot_and_code_tasks_are_plain_and_classes_are_read(tmp_path):
    trec = ROW | {"dataset": "trec", "_id": "t", "all_classes": ["Food", "Plant"]}
    code = ROW | {"dataset": "repobench-p", "_id": "c"}
    first, second = read_rows([write(tmp_path / "any.jsonl", trec, code)])
    assert first.plain
    assert first.classes == ("Food", "Plant")
    assert second.text == "Please complete the code given below. \nA long {input} story.Who?Next line of code:\n"


def test_plain_rows_other_tasks_and_names(tmp_path):
    own = {"context": "Text.", "input": "Why?", "answers": []}
    plain = {"prompt": "Say x.", "answer": "x"}
    first, second = read_rows([write(tmp_path / "mine.jsonl", own, plain)])
    assert (first.before, first.question, first.task, first.name) == ("Text.", "\n\nWhy?", "mine", "mine-1")
    assert (second.before, second.question, second.answers, second.name) == ("Say x.", None, ("x",), "mine-2")


def test_folders_and_packed_files_in_order_of_name_with_a_limit(tmp_path):
    write(tmp_path / "b.jsonl", *[ROW | {"_id": f"b{i}"} for i in range(4)])
    with gzip.open(tmp_path / "a.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write("\n" + json.dumps(ROW | {"_id": "a0"}) + "\n")
    (tmp_path / "notes.txt").write_text("no rows")
    assert [row.name for row in read_rows([str(tmp_path)], limit=2)] == ["a0", "b0", "b1"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"file.jsonl, line 1 is not JSON: a row has context, input and answers"),
        ("[1]", "line 1 is no JSON object"),
        ('{"question": "a", "reply": "b"}', "line 1 has question, reply: a row has context, input and answers"),
        ('{"context": "a"}', "line 1 has context: a row has"),
        ('{"prompt": ""}', "line 1 has an empty prompt"),
        ('{"prompt": 5, "answer": "x"}', "line 1 has no text as its prompt"),
        ('{"context": "a", "input": null}', "line 1 has no text as its input"),
        ('{"prompt": "a", "answer": 3}', "answers that are no texts"),
        ('{"prompt": "a\\ud800"}', "line 1, prompt: .*lone surrogate U.D800 at byte 1"),
        ('{"context": "a", "input": "\\ud800"}', "line 1, input: .*lone surrogate"),
        ('{"prompt": "a", "answers": ["b", "\\ud800"]}', "line 1, answers: .*lone surrogate"),
        ("[" * 100_000, "line 1 is not JSON"),
        ("", "there is no row in"),
    ],
)
def test_anything_else_is_refused_in_one_line(tmp_path, text, message):
    (tmp_path / "file.jsonl").write_text(text)
    with pytest.raises(PromptError, match=message) as caught:
        read_rows([str(tmp_path / "file.jsonl")])
    assert "\n" not in str(caught.value)


def test_paths_that_are_no_rows(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    for path, message in ((tmp_path / "a.txt", "is no .jsonl file"), (tmp_path / "none", "does not exist")):
        with pytest.raises(PromptError, match=message):
            read_rows([str(path)])
    with pytest.raises(PromptError, match=r"has no \.jsonl file"):
        read_rows([str(tmp_path)])
    path = write(tmp_path / "twice.jsonl", ROW, ROW)
    with pytest.raises(PromptError, match="two rows are called 'x1'"):
        read_rows([path])
    (tmp_path / "bad.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(PromptError, match="cannot read"):
        read_rows([str(tmp_path / "bad.jsonl.gz")])
