"""The policies by name, and how an indicator, an allocation and a rule over heads become one. No torch here.

Every indicator is a policy of its own name, with equal shares for layers and heads; `NAMED` are the combinations that a
paper names. An indicator, allocation or rule over heads that is given by name takes the place of the policy's own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import OptionError
from ..allocations import ALLOCATIONS, HEADS
from ..holds import HOLDS
from ..indicators import INDICATORS
from ..merges import MERGES
from ..method import Method, Value
from .base import PolicyModel

if TYPE_CHECKING:
    from ..config import CacheConfig
    from ..holds.base import HoldRule
    from .base import Policy

__all__ = [
    "DOCUMENT_POLICY",
    "NAMED",
    "POLICIES",
    "Choice",
    "Named",
    "PolicyModel",
    "choose",
    "make_hold",
    "make_policy",
]


@dataclass(frozen=True)
class Named:
    """A combination with a name of its own. options: where they differ from the parts' own defaults. window: the
    paper's, where it is not the usual one."""

    indicator: str
    allocation: str = "uniform"
    heads: str = "equal"
    merge: str = "none"
    options: Mapping[str, Value] = field(default_factory=dict)
    paper: str = ""
    window: int | None = None


NAMED = {
    "cake": Named("cake", "cake", paper="CAKE, Qin et al., ICLR 2025, arXiv 2503.12491"),
    "auto": Named(
        "defensivekv",
        "cake",
        "adaptive",
        options={"norm": "l2"},
        paper="what lost less than CAKE (docs/methods.md): its shares of layers, DefensiveKV's scores, Ada-KV's heads",
    ),
    "document": Named(
        "defensivekv",
        "global",
        "own",
        options={"norm": "l2"},
        paper="what lost least where the question came later (docs/methods.md): Layer-DefensiveKV, lengths of values",
    ),
    "pyramidkv": Named("snapkv", "pyramid", paper="PyramidKV, Cai et al., arXiv 2406.02069", window=8),
    "ada-kv": Named("snapkv", "uniform", "adaptive", paper="Ada-KV, Feng et al., NeurIPS 2025, arXiv 2407.11550"),
    "vl-cache": Named("snapkv", "vl-cache", paper="VL-Cache, Tu et al., ICLR 2025, arXiv 2410.23317"),
    "xkv": Named("snapkv", "xkv", paper="in the spirit of XKV, Li et al., arXiv 2412.05896"),
    "squeeze": Named("streaming-llm", "squeeze", paper="SqueezeAttention, Wang et al., ICLR 2025, arXiv 2404.04793"),
    "d2o": Named("h2o", "d2o", merge="d2o", paper="D2O, Wan et al., ICLR 2025, arXiv 2406.13035"),
    "lava": Named("lava", "lava", "adaptive", paper="LAVa, Shen et al., arXiv 2509.09754"),
    "layer-defensivekv": Named(
        "defensivekv", "global", "own", paper="Layer-DefensiveKV, Feng et al., ICLR 2026, arXiv 2510.13334"
    ),
    "critical-cake": Named(
        "criticalkv",
        "cake",
        options={"base": "cake"},
        paper="CAKE's allocation and scores in CriticalKV's two stages; no paper's own",
    ),
}
DOCUMENT_POLICY = "document"  # for a document whose questions are not known: what loses least there (docs/methods.md)
DEFAULT_WINDOW = 32
KEEPS_SCORES = ("h2o", "g-kv")  # the hold rules that write to the slots' scores
POLICIES = (*NAMED, *(name for name in INDICATORS if name not in NAMED), "full")


@dataclass(frozen=True)
class Choice:
    """The parts that a configuration names and the options of each, complete and checked."""

    policy: str
    title: str
    indicator: Method
    allocation: Method
    heads: Method
    merge: Method
    base: Method | None  # of an indicator that wraps another one
    hold: Method | None  # where decoding holds rows at their limit
    options: Mapping[str, Mapping[str, Value]]  # by part: these names
    late: bool = False  # nothing is evicted before all layers of a piece are read
    window: int = DEFAULT_WINDOW  # the policy's own, unless another indicator or allocation takes its part

    @property
    def parts(self) -> dict[str, Method]:
        """By part; a base and a hold rule only where there is one."""
        named = ("indicator", "allocation", "heads", "merge", "base", "hold")
        return {name: part for name in named if (part := getattr(self, name)) is not None}

    @property
    def inputs(self) -> frozenset[str]:
        """Everything that a prefill works out for it beyond keys and positions."""
        return frozenset(name for part, method in self.parts.items() if part != "hold" for name in method.inputs)

    @property
    def spare(self) -> int:
        """By how many slots a held row may grow beyond its limit, the newcomer included; 0 where rows only grow."""
        return 0 if self.hold is None else int(self.options["hold"].get("interval") or 1)

    def check_files(self) -> None:
        """Raise OptionError where a part needs a file that was not named, or is not there."""
        for part, method in self.parts.items():
            for option in method.options:
                path = self.options[part].get(option.name)
                if option.file and path is None:
                    raise OptionError(
                        f"the {part} {method.name} needs the policy option {option.name}=PATH: {option.help}"
                    )
                if option.file and not Path(os.path.expanduser(str(path))).is_file():
                    raise OptionError(f"there is no file {path}, which the {part} {method.name} needs: {option.help}")


def choose(
    policy: str,
    *,
    indicator: str | None = None,
    allocation: str | None = None,
    heads: str | None = None,
    merge: str | None = None,
    hold: str | None = None,
    hold_options: Mapping[str, object] | None = None,
    schedule: str | None = None,
    options: Mapping[str, object] | None = None,
) -> Choice:
    """What a combination of names means; `hold_options` are the hold rule's alone. Raises OptionError for an unknown
    name, an option that no part has, or parts that do not go together."""
    if policy not in POLICIES or policy == "full":
        raise OptionError(f"unknown policy {policy!r}: choose one of {', '.join(POLICIES)}")
    named = NAMED.get(policy) or Named(policy)
    sharing = _find("allocation", named.allocation if allocation is None else allocation, ALLOCATIONS)
    kept = named.heads != "equal" and named.heads in sharing.heads  # else what the allocation usually goes with
    over_heads = heads if heads is not None else named.heads if kept else sharing.heads[0]
    given = dict(options or {})
    parts = {
        "indicator": _find("indicator", named.indicator if indicator is None else indicator, INDICATORS),
        "allocation": sharing,
        "heads": _find("rule over heads", over_heads, HEADS),
        "merge": _find("merge", named.merge if merge is None else merge, MERGES),
    }
    if over_heads not in sharing.heads:
        goes = " or ".join(sharing.heads)
        raise OptionError(f"the allocation {sharing.name} goes with the heads {goes}, not with {over_heads}")
    if sharing.late and schedule == "cascade":
        raise OptionError(
            f"the allocation {sharing.name} compares all layers, so nothing can be evicted before the last one is "
            "read: leave the option schedule out"
        )
    published = own_window(policy)
    as_named = (parts["indicator"].name, sharing.name) == (named.indicator, named.allocation)
    own = {part: getattr(named, part) for part in parts}
    changed = [f"{part} {method.name}" for part, method in parts.items() if method.name != own[part]]
    wraps = parts["indicator"].option("base")
    if wraps is not None:
        usual = (
            named.options.get("base", wraps.default) if parts["indicator"].name == named.indicator else wraps.default
        )
        base = wraps.read(given.pop("base", usual))
        parts["base"] = INDICATORS[str(base)]
        changed += [f"base {base}"] if base != named.options.get("base", wraps.default) else []
    late = schedule == "late" or sharing.late
    changed += ["schedule late"] if late and not sharing.late else []
    if hold is not None:
        parts["hold"] = _find("hold rule", hold, HOLDS)
        _check_remembers(parts)
    found: dict[str, dict[str, Value]] = {}
    for part, method in parts.items():
        found[part] = {option.name: option.default for option in method.options if option is not wraps}
        found[part].update({name: value for name, value in named.options.items() if name in found[part]})
    for name, value in given.items():
        having = [part for part in parts if name in found[part]]
        if not having:
            there = ", ".join(_having(name)[:3])
            raise OptionError(
                f"no part of the policy {policy} has the option {name!r}: {_existing(parts)}"
                + (f"; choose a policy that has it: {there}" if there else "")
            )
        for part in having:
            option = parts[part].option(name)
            assert option is not None
            found[part][name] = option.read(value)
    for name, value in (hold_options or {}).items() if hold is not None else ():
        option = parts["hold"].option(name)
        if option is None:
            exist = ", ".join(option.name for option in parts["hold"].options)
            raise OptionError(f"the hold rule {hold} has no option {name!r}: it has {exist}")
        if name in given:
            raise OptionError(f"{name} of the hold rule {hold} is given twice")
        found["hold"][name] = option.read(value)
    if hold is not None:
        interval = found["hold"]["interval"]
        by = f"hold by {hold}" if interval == 1 else f"hold by {hold} every {interval}"
        changed += [by] if (hold, interval) != ("attention", 1) else []
    return Choice(
        policy,
        ", ".join([policy, *changed]),
        parts["indicator"],
        parts["allocation"],
        parts["heads"],
        parts["merge"],
        parts.get("base"),
        parts.get("hold"),
        found,
        late,
        published if as_named else DEFAULT_WINDOW,
    )


def own_window(policy: str) -> int:
    """The window that a policy's paper takes."""
    found = NAMED[policy].window if policy in NAMED else INDICATORS[policy].window
    return DEFAULT_WINDOW if found is None else found


def _find(what: str, name: str, methods: Mapping[str, Method]) -> Method:
    if name not in methods:
        raise OptionError(f"unknown {what} {name!r}: choose one of {', '.join(methods)}")
    return methods[name]


def _check_remembers(parts: Mapping[str, Method]) -> None:
    """Two parts cannot both keep a number with each row, unless it is the same one."""
    keeps = [
        method.name for part, method in parts.items() if part in ("indicator", "base") and "carried" in method.inputs
    ]
    hold = parts["hold"].name
    if keeps and hold in KEEPS_SCORES and (keeps[0], hold) != ("h2o", "h2o"):
        raise OptionError(
            f"the indicator {keeps[0]} keeps a number with each row that the hold rule {hold} would write over: "
            "choose another one of the two"
        )


def _having(option: str) -> list[str]:
    """The named policies that have an option."""
    tables = ((INDICATORS, "indicator"), (ALLOCATIONS, "allocation"), (HEADS, "heads"))
    return [
        policy
        for policy, named in NAMED.items()
        if any(table[getattr(named, part)].option(option) is not None for table, part in tables)
    ]


def _existing(parts: Mapping[str, Method]) -> str:
    """What there is instead."""
    lists = [
        f"{part} {method.name} has {', '.join(option.name for option in method.options)}"
        for part, method in parts.items()
        if method.options
    ]
    return "; ".join(lists) or "none of its parts has options"


def make_policy(config: CacheConfig, model: PolicyModel, budget: int) -> Policy:
    """The policy of a configuration, for a model and a budget in tokens (constants may depend on both)."""
    choice = config.choice
    if choice is None:
        from .full import FullPolicy

        return FullPolicy()
    from .composed import ComposedPolicy

    choice.check_files()
    options: dict[str, dict[str, Any]] = {part: dict(values) for part, values in choice.options.items()}
    if choice.base is not None:
        options["indicator"]["base"] = _make(choice.base, options["base"], model, budget)
    made = {
        part: _make(choice.parts[part], options[part], model, budget)
        for part in ("indicator", "allocation", "heads", "merge")
    }
    title = choice.title if config.recascade is None else f"{choice.title}, recascade {config.recascade}"
    return ComposedPolicy(choice.policy, title, **made, waits=choice.late)


def make_hold(config: CacheConfig) -> HoldRule | None:
    """The rule by which decoding keeps rows at their limit; None for `attention` at every step, which every runner has
    built in where nothing is packed, and where rows only grow."""
    choice = config.choice
    if choice is None or choice.hold is None:
        return None
    options = dict(choice.options["hold"])
    if config.kv_bits is not None:
        from ..quantise import GROUP

        options["interval"] = GROUP
    elif choice.hold.name == "attention" and choice.spare == 1:
        return None
    rule: HoldRule = choice.hold.load()(**options)
    return rule


def _make(method: Method, options: Mapping[str, Any], model: PolicyModel, budget: int) -> Any:
    cls = method.load()
    create = getattr(cls, "create", None)
    return cls(**options) if create is None else create(model, budget, **options)
