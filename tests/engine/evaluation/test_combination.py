"""Policies as they are spelt on the command line."""

from __future__ import annotations

import pytest
from cake_infer.cache.budget import Budget
from cake_infer.engine.evaluation.combination import Combination, budgets, combinations, merging, read_alone
from cake_infer.errors import BudgetError, OptionError


def test_a_name_with_parts_and_options():
    found = Combination.parse(" snapkv, allocation=cake,pool = 9 ", 16)
    assert found.text == "snapkv,allocation=cake,pool=9"
    assert (found.config.policy, found.config.allocation, found.config.window) == ("snapkv", "cake", 16)
    assert found.config.choice.options["indicator"]["pool"] == 9
    assert found.config.choice.allocation.name == "cake"


def test_bits_go_with_any_policy():
    for text in ("full,kv_bits=2", "cake,heads=adaptive,kv_bits=2"):
        found = Combination.parse(text, 16)
        assert (found.text, found.config.kv_bits, found.config.window) == (text, 2, 16)
    assert Combination.parse("cake", 16).config.kv_bits is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "unknown policy 'nothing'"),
        ("cake,heads", "cannot read the policy 'cake,heads'"),
        ("cake,heads=", "cannot read the policy"),
        ("cake,heads=wide", "unknown rule over heads 'wide'"),
        ("cake,sinks=3", "no part of the policy cake has the option 'sinks'"),
        ("cake,gamma=1,gamma=2", "gives gamma twice"),
        ("full,gamma=2", "no effect with the policy full"),
        ("cake,kv_bits=3", "no known kv_bits: 8, 4, 2"),
    ],
)
def test_what_means_nothing_is_refused(text, message):
    with pytest.raises(OptionError, match=message):
        Combination.parse(text, 32)


def test_policies_that_merge_are_told_apart():
    found = combinations(["cake", "cake,merge=cam", "d2o", "d2o,merge=none"], 32)
    assert [one.text for one in merging(found)] == ["cake,merge=cam", "d2o"]


def test_each_once():
    with pytest.raises(OptionError, match="'cake,heads=equal' is given twice"):
        combinations(["cake,heads=equal", "cake, heads=equal"], 32)
    with pytest.raises(OptionError, match=r"3\.2% is given twice"):
        budgets(["3.2%", "3.20%"], 32)
    with pytest.raises(BudgetError, match="minimum is 32"):
        budgets(["64", "16"], 32)
    assert budgets(["64", "5%"], 32) == [Budget(count=64), Budget(percent=5.0)]


def test_pieces_are_part_of_a_policy_and_read_alone():
    plain, pieces, merging = combinations(["cake", "cake, pieces=2048", "cake,merge=d2o"], 32)
    assert [plain.piece, pieces.piece, merging.piece] == [None, 2048, None]
    assert pieces.text == "cake,pieces=2048"
    assert pieces.config == plain.config
    assert read_alone([plain, pieces, merging]) == [pieces, merging]
    for wrong in ("cake,pieces=0", "cake,pieces=many", "full,pieces=64", "cake,kv_bits=4,pieces=64"):
        with pytest.raises(OptionError, match="pieces"):
            Combination.parse(wrong, 32)
