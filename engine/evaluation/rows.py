"""Prompts with reference answers, read from JSONL files: LongBench's rows, or `prompt` and `answer`. No torch here."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import PromptError
from ..text import check_text
from .longbench import PLAIN, PROMPTS

ENDS = (".jsonl", ".jsonl.gz")
WANTED = "a row has context, input and answers (LongBench), or prompt and answer"
PLACE = "{context}"


@dataclass(frozen=True)
class Row:
    """One prompt. `before` and `question` are its two parts, None where they cannot be told apart.

    task: LongBench's data set, else the file's name. plain: no chat template, whatever the model has.
    """

    name: str
    task: str
    before: str
    question: str | None
    answers: tuple[str, ...] = ()
    plain: bool = False
    classes: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return self.before + (self.question or "")


def read_rows(paths: list[str], limit: int | None = None) -> list[Row]:
    """The rows of files and of folders' JSONL files, at most `limit` of each file.

    Raises PromptError in one line, with file and line number, for what is no such row.
    """
    rows: list[Row] = []
    for file in [file for path in paths for file in files(Path(path))]:
        for count, row in enumerate(_file_rows(file)):
            if count == limit:
                break
            rows.append(row)
    if not rows:
        raise PromptError(f"there is no row in {', '.join(paths)}: {WANTED}")
    names = [row.name for row in rows]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise PromptError(f"two rows are called {twice!r}: give each an _id of its own")
    return rows


def files(path: Path) -> list[Path]:
    """The JSONL files that a path means. Raises PromptError if there are none."""
    if path.is_dir():
        found = sorted(file for file in path.iterdir() if file.name.endswith(ENDS))
        if not found:
            raise PromptError(f"{path} has no .jsonl file: {WANTED}")
        return found
    if not path.exists():
        raise PromptError(f"{path} does not exist: give a .jsonl file, or a folder with some")
    if not path.name.endswith(ENDS):
        raise PromptError(f"{path} is no .jsonl file: {WANTED}")
    return [path]


def _file_rows(file: Path) -> Iterator[Row]:
    stem = file.name.removesuffix(".gz").removesuffix(".jsonl")
    try:
        with gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _row(line, f"{file}, line {number}", stem, number)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise PromptError(f"cannot read {file}: {error}") from error


def _row(line: str, where: str, stem: str, number: int) -> Row:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        raise PromptError(f"{where} is not JSON: {WANTED}") from None
    if not isinstance(found, dict):
        raise PromptError(f"{where} is no JSON object: {WANTED}")
    for field in ("prompt", "context", "input"):
        if field in found and not isinstance(found[field], str):
            raise PromptError(f"{where} has no text as its {field}: {WANTED}")
        check_text(found.get(field, ""), f"{where}, {field}")
    task = str(found.get("dataset") or stem)
    name = str(found.get("_id") or f"{stem}-{number}")
    answers = _answers(found, where)
    if isinstance(found.get("prompt"), str):
        if not found["prompt"]:
            raise PromptError(f"{where} has an empty prompt")
        return Row(name, task, found["prompt"], None, answers)
    if not isinstance(found.get("context"), str) or not isinstance(found.get("input"), str):
        raise PromptError(f"{where} has {', '.join(map(str, found)) or 'nothing'}: {WANTED}")
    template = PROMPTS.get(task, "{context}\n\n{input}")
    before, _, after = template.partition(PLACE)
    classes = found.get("all_classes") or ()
    return Row(
        name,
        task,
        before + found["context"],
        after.replace("{input}", found["input"]),
        answers,
        plain=task in PLAIN,
        classes=tuple(str(one) for one in classes),
    )


def _answers(found: Mapping[str, Any], where: str) -> tuple[str, ...]:
    given = found.get("answers", found.get("answer", ()))
    given = (given,) if isinstance(given, str) else given
    if not isinstance(given, (list, tuple)) or not all(isinstance(one, str) for one in given):
        raise PromptError(f"{where} has answers that are no texts: {WANTED}")
    for one in given:
        check_text(one, f"{where}, answers")
    return tuple(given)
