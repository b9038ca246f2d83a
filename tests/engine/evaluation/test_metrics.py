"""LongBench's metrics, each against the official definition worked by hand or in another way."""

from __future__ import annotations

import difflib
import sys

import pytest
from cake_infer.engine.evaluation import metrics
from cake_infer.engine.evaluation.longbench import NEW_TOKENS, PLAIN, PROMPTS
from cake_infer.engine.evaluation.metrics import METRICS, check_libraries, score
from cake_infer.errors import OptionError


def test_every_task_has_a_prompt_a_length_and_a_metric() -> None:
    assert set(PROMPTS) == set(NEW_TOKENS) == set(METRICS)
    assert len(PROMPTS) == 21
    assert set(PLAIN) < set(PROMPTS)


@pytest.mark.parametrize(
    ("prediction", "answers", "expected"),
    [
        ("The Eiffel Tower!", ["eiffel tower"], 1.0),
        ("It is a tower in Paris", ["the tower of Paris"], 2 * (2 / 5) * (2 / 3) / (2 / 5 + 2 / 3)),
        ("yes yes no", ["yes"], 2 * (1 / 3) * 1 / (1 / 3 + 1)),
        ("London", ["Paris", "london"], 1.0),
        ("", ["Paris"], 0.0),
    ],
)
def test_words_are_normalised_and_the_best_answer_counts(prediction, answers, expected) -> None:
    assert score("hotpotqa", prediction, answers) == pytest.approx(expected)


def test_only_the_first_line_of_a_few_shot_reply_counts() -> None:
    assert score("triviaqa", "\n\nParis\nQuestion: more", ["Paris"]) == 1.0
    assert score("hotpotqa", "Paris\nQuestion: more", ["Paris"]) == pytest.approx(0.5)


def test_classes_that_are_parts_of_the_answer_do_not_count() -> None:
    classes = ["Food", "Food and drink", "Plant"]
    assert score("trec", "Food and drink", ["Food and drink"], classes) == 1.0
    assert score("trec", "Food or Plant", ["Plant"], classes) == 0.5
    assert score("trec", "Plant", ["Food"], classes) == 0.0


def test_numbers_are_counted() -> None:
    assert score("passage_retrieval_en", "Paragraph 7, or 8, not 7", ["Paragraph 7"]) == pytest.approx(2 / 3)
    assert score("passage_retrieval_en", "none", ["Paragraph 7"]) == 0.0
    assert score("passage_count", "There are 12 of 13", ["12"]) == 0.5


def test_code_is_compared_by_its_first_real_line() -> None:
    pytest.importorskip("rapidfuzz")
    prediction, answer = "\n```python\n# a comment\nreturn left + right\nmore", "return left - right"
    ratio = difflib.SequenceMatcher(None, "return left + right", answer).ratio()
    assert score("lcc", prediction, [answer]) == pytest.approx(round(100 * ratio) / 100)
    assert score("lcc", "# nothing", [answer]) == 0.0


def longest_common(one: list[str], other: list[str]) -> int:
    table = [[0] * (len(other) + 1) for _ in range(len(one) + 1)]
    for i, left in enumerate(one):
        for j, right in enumerate(other):
            table[i + 1][j + 1] = table[i][j] + 1 if left == right else max(table[i][j + 1], table[i + 1][j])
    return table[-1][-1]


def test_rouge_is_the_f_of_the_longest_common_subsequence() -> None:
    pytest.importorskip("rouge")
    prediction, answer = "the cat sat on a mat today", "a cat sat on the mat"
    same = longest_common(prediction.split(), answer.split())
    precision, recall = same / 7, same / 6
    assert score("gov_report", prediction, [answer]) == pytest.approx(
        2 * precision * recall / (precision + recall), abs=1e-6
    )
    assert score("gov_report", "", [answer]) == 0.0
    assert score("gov_report", "...", [answer]) == 0.0


def test_chinese_words_are_cut() -> None:
    pytest.importorskip("jieba")
    assert score("multifieldqa_zh", "\u5317\u4eac\u3002", ["\u5317\u4eac"]) == 1.0
    assert score("multifieldqa_zh", "\u4e0a\u6d77", ["\u5317\u4eac"]) == 0.0


def test_chinese_rouge_is_that_of_the_words_and_not_of_the_characters() -> None:
    pytest.importorskip("jieba")
    pytest.importorskip("rouge")
    prediction, answer = "\u6211\u4eec\u559c\u6b22\u5317\u4eac", "\u6211\u4eec\u53bb\u8fc7\u5317\u4eac"
    # we | like | Beijing and we | went to | Beijing: two of three words in order, but four of six characters
    assert metrics._cut(prediction) == ["\u6211\u4eec", "\u559c\u6b22", "\u5317\u4eac"]
    assert len(metrics._cut(answer)) == 3
    assert score("vcsum", prediction, [answer]) == pytest.approx(2 / 3, abs=1e-6)
    assert score("dureader", prediction, ["\u5317\u4eac", answer]) == pytest.approx(2 / 3, abs=1e-6)


def test_a_missing_library_or_metric_is_said_before_anything_is_run(monkeypatch) -> None:
    with pytest.raises(OptionError, match="mine is no task of LongBench"):
        check_libraries(["mine"])
    monkeypatch.setitem(sys.modules, "rouge", None)
    with pytest.raises(OptionError, match=r"needs rouge: pip install 'cake-infer\[eval\]'"):
        check_libraries(["hotpotqa", "gov_report"])
    assert metrics.NEEDED
