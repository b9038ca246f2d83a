"""LongBench's metrics (Bai et al., ACL 2024), each a score from 0 to 1, with the official normalisation.

Word overlap, counting and choosing are a few lines each; ROUGE is PyPI `rouge`, which the official code uses, the code
similarity `rapidfuzz`, and Chinese words are cut by `jieba` (extra `eval`).
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from ...errors import OptionError
from .longbench import FIRST_LINE

Metric = Callable[[str, str, Sequence[str]], float]  # prediction, answer, all classes

_CHINESE_MARKS = (
    "\uff01\uff1f\uff61\u3002\uff02\uff03\uff04\uff05\uff06\uff07\uff08\uff09\uff0a\uff0b\uff0c\uff0d\uff0f\uff1a\uff1b"
    "\uff1c\uff1d\uff1e\uff20\uff3b\uff3c\uff3d\uff3e\uff3f\uff40\uff5b\uff5c\uff5d\uff5e\uff5f\uff60\uff62\uff63\uff64"
    "\u3001\u3003\u300b\u300c\u300d\u300e\u300f\u3010\u3011\u3014\u3015\u3016\u3017\u3018\u3019\u301a\u301b\u301c\u301d"
    "\u301e\u301f\u3030\u303e\u303f\u2013\u2014\u2018\u2019\u201b\u201c\u201d\u201e\u201f\u2026\u2027\ufe4f."
)


def normalise(text: str) -> str:
    """Lower case, no ASCII punctuation, no articles, single spaces."""
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def normalise_chinese(text: str) -> str:
    """Lower case, no ASCII or Chinese punctuation, no spaces."""
    dropped = set(string.punctuation + _CHINESE_MARKS)
    return "".join("".join(character for character in text.lower() if character not in dropped).split())


def bag_f1(prediction: Sequence[str], answer: Sequence[str]) -> float:
    """F1 of two bags of words; 0 if they share none."""
    same = sum((Counter(prediction) & Counter(answer)).values())
    return 2 * same / (len(prediction) + len(answer)) if same else 0.0


def qa_f1(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """F1 of normalised words."""
    return bag_f1(normalise(prediction).split(), normalise(answer).split())


def qa_f1_chinese(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """F1 of the words that jieba finds, normalised one by one."""
    words = [[word for part in _cut(text) if (word := normalise_chinese(part))] for text in (prediction, answer)]
    return bag_f1(*words)


def rouge_l(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """ROUGE-L F of PyPI `rouge`; 0 for what it cannot score, such as an empty prediction."""
    rouge = _library("rouge").Rouge()
    try:
        return float(rouge.get_scores([prediction], [answer], avg=True)["rouge-l"]["f"])
    except (ValueError, RecursionError):
        return 0.0


def rouge_l_chinese(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """ROUGE-L F of the words that jieba finds."""
    return rouge_l(" ".join(_cut(prediction)), " ".join(_cut(answer)))


def classification(prediction: str, answer: str, classes: Sequence[str]) -> float:
    """1 over the number of class names in the prediction, if the answer is among them; names inside the answer's do
    not count. The official code changes the list that it walks, and so may skip one: as here."""
    found = [name for name in classes if name in prediction]
    for name in found:
        if name in answer and name != answer:
            found.remove(name)
    return 1.0 / len(found) if answer in found else 0.0


def retrieval(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """The share of the prediction's numbers that are the answer's paragraph."""
    wanted = re.findall(r"(?:Paragraph |\u6bb5\u843d)(\d+)", answer)
    return _share_of_numbers(prediction, wanted[0]) if wanted else 0.0


def count(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """The share of the prediction's numbers that are the answer."""
    return _share_of_numbers(prediction, answer)


def code_similarity(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """fuzzywuzzy's ratio of the first line that is neither a comment nor a fence."""
    lines = prediction.lstrip("\n").split("\n")
    line = next((one for one in lines if "`" not in one and "#" not in one and "//" not in one), "")
    ratio = _library("rapidfuzz.fuzz").ratio(line, answer)
    return round(float(ratio)) / 100


METRICS: dict[str, Metric] = {
    **dict.fromkeys(("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "triviaqa"), qa_f1),
    "multifieldqa_zh": qa_f1_chinese,
    **dict.fromkeys(("gov_report", "qmsum", "multi_news", "samsum"), rouge_l),
    **dict.fromkeys(("dureader", "vcsum"), rouge_l_chinese),
    **dict.fromkeys(("trec", "lsht"), classification),
    **dict.fromkeys(("passage_retrieval_en", "passage_retrieval_zh"), retrieval),
    "passage_count": count,
    **dict.fromkeys(("lcc", "repobench-p"), code_similarity),
}
NEEDED: dict[Metric, tuple[str, ...]] = {
    rouge_l: ("rouge",),
    rouge_l_chinese: ("rouge", "jieba"),
    qa_f1_chinese: ("jieba",),
    code_similarity: ("rapidfuzz",),
}


def score(task: str, prediction: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """The best score over a row's answers. Raises OptionError for a task that has no metric."""
    metric = metric_of(task)
    if task in FIRST_LINE:
        prediction = prediction.lstrip("\n").split("\n")[0]
    return max((metric(prediction, answer, classes) for answer in answers), default=0.0)


def metric_of(task: str) -> Metric:
    """Raises OptionError for a task that is none of LongBench's."""
    if task not in METRICS:
        raise OptionError(f"{task} is no task of LongBench: there are {', '.join(METRICS)}")
    return METRICS[task]


def check_libraries(tasks: Sequence[str]) -> None:
    """Raises OptionError where a task's metric needs a library that is not installed: before anything is run."""
    for task in tasks:
        for name in NEEDED.get(metric_of(task), ()):
            _library(name)


def _share_of_numbers(prediction: str, wanted: str) -> float:
    numbers = re.findall(r"\d+", prediction)
    return sum(number == str(wanted) for number in numbers) / len(numbers) if numbers else 0.0


def _cut(text: str) -> list[str]:
    return list(_library("jieba").cut(text, cut_all=False))


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        package = name.split(".")[0]
        raise OptionError(f"this metric needs {package}: pip install 'cake-infer[eval]'") from None
