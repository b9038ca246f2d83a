"""`cake-infer policies` says of every method what the registry and its class say, and computes nothing."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cake_infer import cli
from cake_infer.cache.allocations import ALLOCATIONS, HEADS
from cake_infer.cache.holds import HOLDS
from cake_infer.cache.indicators import INDICATORS
from cake_infer.cache.inputs import INPUTS
from cake_infer.cache.method import Method
from cake_infer.cache.policies import NAMED, POLICIES

TOLD = {"sinks", "lag", "pool", "gamma", "block", "chunk", "mix", "share", "decay", "smoothing", "mass"}  # on the page
METHODS = [*INDICATORS.values(), *ALLOCATIONS.values(), *HEADS.values(), *HOLDS.values()]


def test_the_table_names_every_method_with_its_inputs_cost_defaults_and_paper(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["policies"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for method in METHODS:
        for part in (method.name, method.summary, method.cost, method.paper, *method.inputs):
            assert " ".join(part.split()) in text, method.name
        for option in method.options:
            assert f"{option.name}={'' if option.default is None else option.default}: {option.help}" in text
    assert all(name in text for name in POLICIES)


def test_the_document_has_the_same_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["policies", "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in document["policies"]] == list(POLICIES)
    methods = {(entry["class"], entry["name"]): entry for entry in document["methods"]}
    assert methods["indicator", "streaming-llm"]["defaults"] == {"sinks": 4}
    assert methods["allocation", "cake"]["inputs"] == ["window_queries"]
    cake = document["policies"][POLICIES.index("cake")]
    assert (cake["indicator"], cake["allocation"], cake["heads"]) == ("cake", "cake", "equal")
    assert set(document["inputs"]) == set(INPUTS)
    found = {entry["name"]: (entry["window"], entry["schedule"]) for entry in document["policies"]}
    assert found["cake"] == found["auto"] == (32, "cascade")
    assert (found["pyramidkv"], found["tova"], found["squeeze"]) == ((8, "cascade"), (1, "cascade"), (32, "late"))
    assert [entry["name"] for entry in document["methods"] if entry["class"] == "schedule"] == ["cascade", "late"]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: f"{method.where}")
def test_a_method_and_its_class_agree(method: Method) -> None:
    """The registry is what the command line reads without torch: it may not say anything else than the class."""
    cls = method.load()
    assert set(method.inputs) <= set(INPUTS)
    made = cls.create if hasattr(cls, "create") else cls
    wanted = set(inspect.signature(made).parameters) - {"model", "budget"}
    assert wanted == {option.name for option in method.options}
    for field in dataclasses.fields(cls):
        option = method.option(field.name)
        if option is not None and option.default is not None and field.name != "base":
            assert field.default == option.default, f"{method.name}: {field.name}"
    for option in method.options:
        if option.default is not None:
            assert option.read(option.default) == option.default
    # a wrapper needs what its base needs as well
    assert frozenset(method.inputs) == (cls.own_needs if isinstance(cls.needs, property) else cls.needs)


def test_no_two_parts_of_a_policy_have_an_option_of_one_name() -> None:
    names = [
        {option.name for method in part.values() for option in method.options}
        for part in (INDICATORS, ALLOCATIONS, HEADS)
    ]
    assert not names[0] & names[1]
    assert not (names[0] | names[1]) & names[2]
    for name, named in NAMED.items():
        parts = (INDICATORS[named.indicator], ALLOCATIONS[named.allocation], HEADS[named.heads])
        for option in named.options:
            assert any(part.option(option) is not None for part in parts), (name, option)


def test_the_page_of_methods_has_every_one_of_them_with_its_defaults() -> None:
    page = (Path(__file__).parents[2] / "docs" / "methods.md").read_text(encoding="utf-8")
    for method in METHODS:
        assert f"`{method.name}`" in page, method.name
    for method in [*INDICATORS.values(), *HOLDS.values()]:
        row = next(line for line in page.splitlines() if line.startswith(f"| `{method.name}` |"))
        numbers = {float(word) for word in re.findall(r"\d+\.?\d*", row)}
        for option in method.options:
            value = option.default
            if isinstance(value, (int, float)) and option.name in TOLD:
                assert float(value) in numbers, (method.name, option.name)


def test_listing_the_methods_imports_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; from cake_infer.cli import main; main(['policies']); print({'torch', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"
