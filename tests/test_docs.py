"""What the documents say works: their Python runs, their command lines parse, what they name is there."""

from __future__ import annotations

import logging
import re
import shlex
from pathlib import Path

import pytest
import torch
from cake_infer.cli import COMMANDS, build_parser

ROOT = Path(__file__).resolve().parents[1]
TEXTS = (
    "README.md",
    *(f"docs/{name}.md" for name in ("embedding", "design", "methods", "options", "sampling", "serving", "tools")),
)
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LANGUAGE_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(name: str, *languages: str) -> list[tuple[int, str]]:
    """Line number and text of each block in one of the languages."""
    text = (ROOT / name).read_text(encoding="utf-8")
    found = LANGUAGE_BLOCK.finditer(text)
    return [(text[: block.start()].count("\n") + 2, block[2]) for block in found if block[1] in languages]


def command_lines() -> list[tuple[str, str]]:
    """Where and what: every line of a shell block, and the lines with a prompt of a console block."""
    found = []
    for name in TEXTS:
        found += [(name, line) for _, block in blocks(name, "sh") for line in block.splitlines()]
        consoles = [line for _, block in blocks(name, "console") for line in block.splitlines()]
        found += [(name, line.removeprefix("$ ")) for line in consoles if line.startswith("$ ")]
    return [(name, line) for name, line in found if line.strip()]


def words_of(program: str) -> list[list[str]]:
    """The words after a program, of each command line (or part of a pipe) that begins with it."""
    parts = [part for _, line in command_lines() for part in line.split(" | ")]
    split = [shlex.split(part, comments=True) for part in parts]
    return [words[1:] for words in split if words and words[0] == program]


@pytest.fixture
def model_folder(tmp_path, write_checkpoint, write_byte_tokenizer) -> Path:
    folder = write_checkpoint(tmp_path / "model", vocab_size=320, num_hidden_layers=2, max_position_embeddings=8192)
    write_byte_tokenizer(folder, 320, chat_template=CHAT_TEMPLATE)
    return folder


PYTHON = [(name, line, code) for name in TEXTS for line, code in blocks(name, "python")]


@pytest.mark.parametrize(("name", "line", "code"), PYTHON, ids=[f"{name}:{line}" for name, line, _ in PYTHON])
def test_examples_run_as_they_stand(
    name: str, line: int, code: str, model_folder: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    """On a tiny random model in the place of the default one, and on the beginning of the document."""
    document = (ROOT / "examples" / "harbour.md").read_text(encoding="utf-8")[:1500]
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "harbour.md").write_text(document, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    threads, logger = torch.get_num_threads(), logging.getLogger("cake_infer")
    level, handlers = logger.level, list(logging.root.handlers)
    assert '"smollm2-135m"' in code
    code = code.replace('"smollm2-135m"', repr(str(model_folder)))
    if "step=" not in code:  # compiling a kernel takes longer than all examples together
        code = code.replace(f"{str(model_folder)!r}", f'{str(model_folder)!r}, step="eager"')
    try:
        exec(compile("\n" * (line - 1) + code, ROOT / name, "exec"), {"__name__": "__main__"})
    finally:
        torch.set_num_threads(threads)
        logger.setLevel(level)
        logging.root.handlers[:] = handlers
    assert "print(" not in code or capsys.readouterr().out


def test_every_command_line_of_the_documents_parses() -> None:
    lines = [*words_of("cake-infer"), *words_of(".venv/bin/cake-infer")]
    assert len(lines) >= 7
    for words in lines:
        size = next((size for size in (2, 1) if " ".join(words[:size]) in COMMANDS), 0)  # "eval fidelity" is one of two
        build_parser(" ".join(words[:size]) or None).parse_args(words[size:])


def test_what_make_is_asked_for_is_there() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    asked = words_of("make")
    assert ["demo"] in asked
    assert ["test"] in asked
    for words in asked:
        for word in words:
            name, setting, _ = word.partition("=")
            assert re.search(rf"^{name} \?=" if setting else rf"^{name}:", makefile, re.MULTILINE), word


def test_make_demo_runs_the_command_that_is_shown() -> None:
    settings = dict(re.findall(r"^(\w+) \?= (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    shown = {tuple(words) for words in words_of("cake-infer")}
    expected = ("--model", "MODEL", "--prompt-file", "DOC", "--prompt", "QUESTION", "--budget", "BUDGET")
    assert tuple(settings.get(word, word) for word in expected) in shown


def test_extras_and_their_packages_are_those_of_the_package() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = project.split("[project.optional-dependencies]")[1].split("\n[")[0]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = readme.split("| extra |")[1].split("\n\n")[0]
    named = {name.replace("_", "-") for name in re.findall(r"^\| `([\w-]+)`", table, re.MULTILINE)}
    extras = set(re.findall(r"^([\w-]+) =", section, re.MULTILINE))
    assert named == extras
    # pip before 23.3, which Python 3.11 brings, finds no extra that is asked for with another spelling than this one
    assert {name for name in extras if not re.fullmatch(r"[a-z]+(-[a-z]+)*", name)} == set()
    asked = [*(ROOT / "docs").glob("*.md"), *(ROOT / "engine").rglob("*.py"), ROOT / "Makefile", ROOT / "README.md"]
    texts = "\n".join(path.read_text(encoding="utf-8") for path in asked)
    found = {name for names in re.findall(r"(?:cake-infer|\.)\[([\w,-]+)\]'", texts) for name in names.split(",")}
    assert {"demo", "lm-eval", "serve"} <= found
    assert found <= extras


def test_options_that_are_named_exist() -> None:
    # of pip, of git, and of lm_eval and llm, whose options stand in docs/tools.md
    known = {"--index-url", "--cached", "--tasks", "--limit", "--options", "--usage"}
    for script in (*(ROOT / "bench").glob("*.py"), ROOT / "tests" / "gpu" / "check.py"):
        known |= set(re.findall(r'add_argument\(\s*"(--[a-z-]+)"', script.read_text(encoding="utf-8")))
    known |= {"--apply"}  # _chat_template: a name ends before its underscore
    for command in (None, *COMMANDS):
        known |= {option for action in build_parser(command)._actions for option in action.option_strings}
    for name in TEXTS:
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", (ROOT / name).read_text(encoding="utf-8")))
        assert named <= known, (name, named - known)


@pytest.mark.parametrize("name", TEXTS)
def test_links_and_files_that_are_named_exist(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#\s]+)\)", text) if "://" not in link]
    for link in links:
        assert ((ROOT / name).parent / link).is_file(), link
    paths = re.findall(r"`((?:engine|models|cache|tests|bench|docs|examples)/[\w/.]*)`", text)
    for path in paths:
        assert (ROOT / path).exists(), path


def test_errors_that_are_told_are_all_that_can_be_imported() -> None:
    import cake_infer

    text = (ROOT / "docs" / "embedding.md").read_text(encoding="utf-8")
    table = text.split("| error |")[1].split("\n\n")[0]
    told = set(re.findall(r"`(\w+)`", table))
    family = {name for name in cake_infer.__all__ if name.endswith("Error") or name.endswith("Limit")}
    family |= {"ArenaFull", "ModelNotFound", "UnsupportedModel"}
    assert told == family - {"CakeError"}


def test_every_engine_keyword_named_in_the_text_is_one(model_folder: Path) -> None:
    """`Engine.load` takes what the text lists as keywords; wrong ones would raise."""
    import inspect
    from dataclasses import fields

    from cake_infer import CacheConfig, Engine

    text = (ROOT / "docs" / "embedding.md").read_text(encoding="utf-8")
    listed = re.findall(r"`(\w+)`", text.split("Keywords are those of the command line")[1].split("The cache's may")[0])
    accepted = {*inspect.signature(Engine.load).parameters, *(field.name for field in fields(CacheConfig))}
    assert listed
    assert set(listed) <= accepted
