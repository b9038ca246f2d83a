"""Cache options are checked when they are given, in words that say what to do."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError, asdict, replace
from typing import Any

import pytest
from cake_infer.cache.config import CacheConfig
from cake_infer.errors import BudgetError, OptionError


def test_defaults_are_those_of_the_paper_but_for_the_policy_that_loses_less() -> None:
    config = CacheConfig()
    assert (config.budget, config.policy, config.window, config.decode_policy) == (1024, "auto", 32, "grow")
    assert (config.gamma, config.pool, config.tau1, config.tau2) == (None, 5, None, None)
    with pytest.raises(FrozenInstanceError):
        config.window = 4  # type: ignore[misc]


@pytest.mark.parametrize(
    "options",
    [
        {"budget": "3.2%"},
        {"budget": 32},
        {"budget": "8", "window": 8},
        {"kv_memory": "512MiB"},
        {"kv_dtype": "float16"},
        {"policy": "full"},
        {"policy": "full", "decode_policy": "hold", "budget": 64},
        {"policy": "cake", "tau1": 1.6, "tau2": 0.4},
        {"policy": "cake", "tau1": 2},
        {"policy": "cake", "gamma": 0},
        {"pool": 1},
        {"decode_policy": "hold"},
        {"policy": "streaming-llm", "policy_options": ("sinks=8",)},
        {"indicator": "snapkv", "allocation": "cake", "heads": "equal", "tau1": 0.5},
        {"policy": "snapkv", "pool": 3},
        {"policy": "h2o", "decode_policy": "hold", "hold_by": "h2o"},
        {"decode_policy": "hold", "hold_by": "g-kv", "policy_options": ("interval=3",)},
        {"decode_policy": "hold", "hold_by": "g-kv,interval=3"},
        {"decode_policy": "hold", "policy_options": ("interval=3",)},
        {"policy": "squeeze", "schedule": "late"},
    ],
)
def test_what_can_be_applied_is_accepted(options: dict[str, Any]) -> None:
    config = CacheConfig(**options)
    assert all(getattr(config, name) == value for name, value in options.items())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"budget": 31}, "minimum is 32"),
        ({"window": 100_000}, "a window of 100,000 tokens.*take a smaller window"),
        ({"budget": "7", "window": 8}, "minimum is 8"),
        ({"budget": 0}, "must be a whole number between 1 and"),
        ({"budget": "abc"}, r"3\.2%"),
        ({"kv_memory": "much"}, "512MiB"),
        ({"kv_memory": 0}, "must be between 1 byte and"),
    ],
)
def test_budgets_that_cannot_hold_are_budget_errors(options: dict[str, Any], says: str) -> None:
    with pytest.raises(BudgetError, match=says):
        CacheConfig(**options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"policy": "h3o"}, "cake, .*full"),
        ({"policy": None}, "cake, .*full"),
        ({"decode_policy": "shrink"}, "grow, hold"),
        ({"kv_dtype": "int8"}, "float32, bfloat16, float16"),
        ({"window": 0}, "window must be a whole number between 1 and"),
        ({"window": 3.5}, "whole number"),
        ({"window": True}, "whole number"),
        ({"tau1": 0}, "tau1 must be a number above 0"),
        ({"tau2": -1.0}, "tau2 must be a number above 0"),
        ({"tau2": float("nan")}, "tau2"),
        ({"tau1": float("inf")}, "tau1"),
        ({"tau1": "1"}, "tau1"),
        ({"policy": "cake", "gamma": 1e300}, r"gamma must be a number between 0 and 1e\+30, not 1e\+300"),
        (
            {"policy": "capkv", "policy_options": ("temperature=1e39",)},
            r"temperature must be a number between 0 and 1e\+30, not .1e39",
        ),
        (
            {"policy": "streaming-llm", "policy_options": (f"sinks={'9' * 400}",)},
            "sinks must be a whole number between 0 and 2,147,483,647",
        ),
        ({"indicator": "magic"}, "unknown indicator 'magic': choose one of cake, "),
        ({"allocation": "magic"}, "unknown allocation 'magic': choose one of uniform, cake"),
        ({"heads": "magic"}, "unknown rule over heads 'magic': choose one of equal"),
        ({"hold_by": "h2o"}, "hold_by has no effect with the decode policy grow"),
        ({"decode_policy": "hold", "hold_by": "magic"}, "unknown hold rule 'magic': choose one of attention, tova"),
        ({"policy_options": ("interval=3",)}, "has the option 'interval'"),
        ({"decode_policy": "hold", "hold_by": "h2o,pool=3"}, "hold rule h2o has no option 'pool': it has recent"),
        ({"decode_policy": "hold", "hold_by": "h2o,interval=0"}, "interval must be a whole number between 1 and"),
        ({"decode_policy": "hold", "hold_by": "h2o,interval"}, "give NAME=VALUE"),
        ({"hold_by": "h2o,interval=3"}, "hold_by has no effect with the decode policy grow"),
        (
            {"decode_policy": "hold", "hold_by": "h2o,interval=3", "policy_options": ("interval=3",)},
            "interval of the hold rule h2o is given twice",
        ),
        ({"schedule": "early"}, "unknown schedule 'early': choose one of cascade, late"),
        ({"policy": "squeeze", "schedule": "cascade"}, "squeeze compares all layers"),
        ({"policy": "full", "schedule": "late"}, "schedule has no effect with the policy full"),
        ({"policy": "h2o", "decode_policy": "hold", "hold_by": "g-kv"}, "indicator h2o keeps .* hold rule g-kv would"),
        ({"policy": "full", "indicator": "cake"}, "indicator has no effect with the policy full"),
        ({"policy": "full", "policy_options": {"sinks": 4}}, "policy_options has no effect"),
        (
            {"policy": "streaming-llm", "gamma": 10.0},
            "no part of the policy streaming-llm has the option 'gamma': .*sinks",
        ),
        ({"policy": "snapkv", "tau1": 1.0}, "no part of the policy snapkv has the option 'tau1': .*pool"),
        (
            {"policy": "cake", "policy_options": ("sinks=4",)},
            "cake has the option .sinks.: .*gamma, pool.*tau1, tau2",
        ),
        (
            {"policy": "document", "tau1": 1.0},
            "the policy document has the option 'tau1': .*; choose a policy that has it: cake, auto, critical-cake",
        ),
        ({"policy": "streaming-llm", "policy_options": ("sinks",)}, "cannot read the policy option 'sinks'"),
        ({"policy": "streaming-llm", "policy_options": ("sinks=a",)}, "sinks must be a whole number between 0 and"),
        ({"policy": "streaming-llm", "policy_options": ("sinks=-1",)}, "sinks must be a whole number between 0 and"),
        ({"policy": "streaming-llm", "policy_options": {"sinks": 1.5}}, "sinks must be a whole number"),
        ({"policy": "streaming-llm", "policy_options": {"sinks": float("nan")}}, "sinks must be a whole number"),
        ({"policy": "streaming-llm", "policy_options": ("sinks=1", "sinks=2")}, "given twice"),
        ({"gamma": 10.0, "policy_options": ("gamma=20",)}, "given twice"),
        ({"policy": "snapkv", "policy_options": ("pooling=sum",)}, "pooling must be one of max, avg"),
        ({"policy": "snapkv", "policy_options": ("pool=4",)}, "pool must be an odd whole number between 1 and 1,023"),
        ({"gamma": -1}, "gamma"),
        ({"gamma": float("nan")}, "gamma"),
        ({"pool": 4}, "odd"),
        ({"pool": 0}, "odd"),
    ],
)
def test_other_values_that_cannot_be_applied_are_option_errors(options: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        CacheConfig(**options)


@pytest.mark.parametrize("options", [{"tau1": 1.0}, {"tau2": 1.0}, {"gamma": 100.0}, {"pool": 3}, {"budget": 64}])
def test_options_that_the_full_cache_would_not_apply_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="leave it out"):
        CacheConfig(policy="full", **options)


def test_reading_the_options_does_not_import_torch() -> None:
    code = "import sys; import cake_infer.cache.config, cake_infer.cache.cascade; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_options_of_a_policy_reach_the_part_that_has_them() -> None:
    given = CacheConfig(policy="streaming-llm", policy_options={"sinks": 8})
    assert given == CacheConfig(policy="streaming-llm", policy_options=("sinks=8",))
    assert given.choice is not None
    assert given.choice.options == {"indicator": {"sinks": 8}, "allocation": {}, "heads": {}, "merge": {}}
    mixed = CacheConfig(
        indicator="snapkv", allocation="cake", tau1=0.5, policy_options=("pool=3", "pooling=avg")
    ).choice
    assert mixed is not None
    assert mixed.options["indicator"] == {"pool": 3, "pooling": "avg"}
    assert mixed.options["allocation"] == {"tau1": 0.5, "tau2": None}
    assert CacheConfig(policy="full").choice is None


@pytest.mark.parametrize("options", [{"kv_memory": "1GiB"}, {"policy": "full"}, {"budget": "10%"}, {"budget": 4000}])
def test_a_wide_window_is_fine_where_the_default_budget_does_not_count(options: dict[str, Any]) -> None:
    assert CacheConfig(window=2000, **options).window == 2000


def test_options_of_a_hold_rule_reach_the_rule_alone() -> None:
    given = CacheConfig(policy="cake", decode_policy="hold", hold_by="cake, pool=3, interval=16")
    assert given.choice is not None
    assert given.choice.options["hold"] == {"pool": 3, "interval": 16}
    assert given.choice.options["indicator"]["pool"] == 5
    assert given.spare == 16
    assert given.choice.title == "cake, hold by cake every 16"
    assert CacheConfig(decode_policy="hold").choice.title == "auto"  # type: ignore[union-attr]


def test_a_late_schedule_is_told_where_it_is_not_the_allocations_own() -> None:
    titles = {
        name: CacheConfig(policy=policy, schedule=schedule).choice.title  # type: ignore[union-attr]
        for name, policy, schedule in (
            ("own", "cake", None),
            ("cascade", "cake", "cascade"),
            ("late", "snapkv", "late"),
            ("squeeze", "squeeze", "late"),
        )
    }
    assert titles == {"own": "cake", "cascade": "cake", "late": "snapkv, schedule late", "squeeze": "squeeze"}
    assert [CacheConfig(schedule=one).late for one in (None, "cascade", "late")] == [False, False, True]
    assert CacheConfig(policy="squeeze").late


def test_a_policy_takes_the_window_of_its_paper_unless_another_one_is_given_or_a_part_is_not_its_own() -> None:
    windows = {
        "pyramidkv": CacheConfig(policy="pyramidkv").window,
        "tova": CacheConfig(policy="tova").window,
        "cake": CacheConfig().window,
        "snapkv": CacheConfig(policy="snapkv").window,
        "full": CacheConfig(policy="full").window,
        "given": CacheConfig(policy="tova", window=16).window,
        "another allocation": CacheConfig(policy="tova", allocation="cake").window,
        "another indicator": CacheConfig(policy="pyramidkv", indicator="cake").window,
        "the same parts by name": CacheConfig(policy="pyramidkv", allocation="pyramid", heads="adaptive").window,
    }
    assert windows == {
        "pyramidkv": 8,
        "tova": 1,
        "cake": 32,
        "snapkv": 32,
        "full": 32,
        "given": 16,
        "another allocation": 32,
        "another indicator": 32,
        "the same parts by name": 8,
    }
    assert CacheConfig(policy="tova", budget=2).budget == 2
    with pytest.raises(BudgetError, match="below the window of 8"):
        CacheConfig(policy="pyramidkv", budget=7)


def test_a_policy_that_was_named_is_told_from_the_default_though_they_are_equal() -> None:
    default, named = CacheConfig(budget=64), CacheConfig(budget=64, policy="auto")
    assert default == named
    assert not default.policy_given
    assert named.policy_given
    assert not replace(default, budget=128).policy_given
    assert not CacheConfig(**asdict(default)).policy_given
    assert replace(default, policy="auto").policy_given
