"""What the user says about the cache, checked before anything is loaded. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ..errors import BudgetError, OptionError
from ..ranges import MOST, POSITIVE, Range, check_numbers, shown
from .budget import DEFAULT_BUDGET, Budget, check_budget, parse_bytes
from .method import WIDEST, parse_given
from .policies import DEFAULT_WINDOW, POLICIES, Choice, choose
from .schedules import SCHEDULES

DECODE_POLICIES = ("grow", "hold")
KV_BITS = (8, 4, 2)
KV_GROUP = 32  # slots that are packed together, see quantise.py, which imports torch
PACKED_HOLDS = ("attention", "tova", "cake")  # hold rules by which groups can be compared, and not at every step
KV_DTYPES = ("float32", "bfloat16", "float16")
DEFAULT_POOL = 5
NUMBERS = {
    "window": POSITIVE,
    "tau1": Range(0, MOST, float, above=True),
    "tau2": Range(0, MOST, float, above=True),
    "gamma": Range(0, MOST, float),
    "pool": Range(1, WIDEST, odd=True),
    "recascade": POSITIVE,
}


class Unsaid(str):
    """A default that nobody chose: equal to the same word where somebody did."""


DEFAULT_POLICY = Unsaid("auto")


@dataclass(frozen=True)
class CacheConfig:
    """The cache's options. Raises `BudgetError` or `OptionError` for values that cannot be applied.

    budget: tokens per layer and KV head on average, window included (1024, "1024"), or a percentage of the first
        prompt ("3.2%").
    policy: what decides which rows stay, see `cache.policies` and `cake-infer policies`.
    indicator, allocation, heads: another indicator, sharing over layers or rule over heads than the policy's own.
    merge: what kept values take over of evicted ones, in place of the policy's own, see `cache.merges`.
    policy_options: parameters of these, by name: {"sinks": 4} or ("sinks=4",).
    window: the last tokens that are always kept and whose queries vote; None for what the policy's paper takes, which
        is 32 for most.
    decode_policy: "grow" keeps new tokens until the reserved room is used, "hold" replaces the least wanted row.
    hold_by: the rule by which hold chooses, None for attention; its options may follow ("h2o,interval=16"); see
        `cache.holds`.
    kv_memory: the whole arena, bookkeeping included ("512MiB"), or None for what the budget needs.
    kv_dtype: how kept rows are stored ("float32", "bfloat16", "float16"), or None for the engine's choice.
    kv_bits: 8, 4 or 2 packs what is kept outside of the window and the latest tokens, see `cache/quantise.py`; None
        keeps all of it in kv_dtype.
    tau1, tau2: temperatures of dispersion and shift, above 0, or None for the authors' table.
    gamma: weight of the variance in a token's score, None for 200 or what `tune` found.
    pool: odd width of the pooling over neighbouring positions.
    schedule: when a prefill evicts, None for the policy's own; see `cache.schedules`.
    recascade: with hold, after how many new tokens CAKE's layers share anew; None for never.
    """

    budget: str | int = DEFAULT_BUDGET
    policy: str = DEFAULT_POLICY
    window: int = None  # type: ignore[assignment]  # resolved below
    decode_policy: str = "grow"
    kv_memory: str | int | None = None
    kv_dtype: str | None = None
    tau1: float | None = None
    tau2: float | None = None
    gamma: float | None = None
    pool: int = DEFAULT_POOL
    indicator: str | None = None
    allocation: str | None = None
    heads: str | None = None
    merge: str | None = None
    policy_options: tuple[str, ...] | Mapping[str, object] = ()
    hold_by: str | None = None
    schedule: str | None = None
    kv_bits: int | None = None
    recascade: int | None = None

    numbers: ClassVar[Mapping[str, Range]] = NUMBERS

    def __post_init__(self) -> None:
        _check_choice("policy", self.policy, POLICIES)
        _check_choice("decode policy", self.decode_policy, DECODE_POLICIES)
        if self.kv_dtype is not None:
            _check_choice("KV dtype", self.kv_dtype, KV_DTYPES)
        if self.schedule is not None:
            _check_choice("schedule", self.schedule, tuple(SCHEDULES))
        check_numbers(self)
        if self.hold_by is not None and self.decode_policy != "hold":
            raise OptionError(
                f"the option hold_by has no effect with the decode policy {self.decode_policy}: "
                "choose hold, or leave it out"
            )
        if self.recascade is not None:
            self._check_recascade()
        given = parse_given(self.policy_options)
        object.__setattr__(self, "policy_options", tuple(f"{name}={value}" for name, value in given.items()))
        own = DEFAULT_WINDOW
        if self.policy == "full":
            self._refuse_unused()
        else:
            own = self._choose().window
        if self.window is None:
            object.__setattr__(self, "window", own)
        if self.kv_bits is not None:
            self._check_bits()
        budget = Budget.parse(self.budget)
        if budget == Budget(count=DEFAULT_BUDGET):
            # not what is wrong: it may not have been given, and memory or the policy may decide in its place
            if self.window > DEFAULT_BUDGET and self.kv_memory is None and self.policy != "full":
                raise BudgetError(
                    f"a window of {self.window:,} tokens, which are always kept, does not fit a budget of "
                    f"{DEFAULT_BUDGET:,}: take a smaller window, or a budget of at least {self.window:,}"
                )
        elif budget.count is not None:
            check_budget(budget.count, self.window)
        if self.kv_memory is not None:
            parse_bytes(self.kv_memory)

    @property
    def policy_given(self) -> bool:
        """Whether somebody chose the policy, if only by the name of the default one."""
        return not isinstance(self.policy, Unsaid)

    @property
    def choice(self) -> Choice | None:
        """The parts that the names mean; None for the full cache."""
        return None if self.policy == "full" else self._choose()

    @property
    def spare(self) -> int:
        """Slots of a held row behind its limit; 0 where rows only grow."""
        if self.decode_policy != "hold":
            return 0
        choice = self.choice
        return 1 if choice is None else choice.spare

    @property
    def late(self) -> bool:
        """Whether nothing is evicted before all layers are read, so that a prefill holds the whole cache."""
        choice = self.choice
        return choice is not None and choice.late

    def _choose(self) -> Choice:
        options = parse_given(self.policy_options)
        fields = {
            "tau1": self.tau1,
            "tau2": self.tau2,
            "gamma": self.gamma,
            "pool": self.pool if self.pool != DEFAULT_POOL else None,
        }
        for name, value in fields.items():
            if value is not None and options.setdefault(name, value) is not value:
                raise OptionError(f"the option {name} is given twice, as itself and as a policy option")
        hold, *hold_options = [
            part.strip() for part in ("attention" if self.hold_by is None else self.hold_by).split(",")
        ]
        return choose(
            self.policy,
            indicator=self.indicator,
            allocation=self.allocation,
            heads=self.heads,
            merge=self.merge,
            hold=hold if self.decode_policy == "hold" else None,
            hold_options=parse_given(hold_options),
            schedule=self.schedule,
            options=options,
        )

    def _check_bits(self) -> None:
        if not _is_int(self.kv_bits) or self.kv_bits not in KV_BITS:
            raise OptionError(
                f"the option kv_bits must be one of {', '.join(map(str, KV_BITS))}, not {shown(self.kv_bits)}: leave "
                "it out to keep 16 or 32 bits"
            )
        if self.decode_policy == "hold":
            self._check_packed_hold()

    def _check_packed_hold(self) -> None:
        """Packed rows give up groups of 32 tokens, by what these are worth together when it is time."""
        if self.recascade is not None:
            raise OptionError(
                "the option recascade moves single slots from layer to layer and has no form for the option kv_bits: "
                "leave one of the two out"
            )
        choice = self.choice
        if choice is None or choice.hold is None:
            return  # refused with the budget that is missing
        if choice.hold.name not in PACKED_HOLDS:
            raise OptionError(
                f"hold by {choice.hold.name} has no form for the option kv_bits, with which groups of {KV_GROUP} "
                f"tokens go by the attention that they get then: hold by {', '.join(PACKED_HOLDS)}, or leave it out"
            )
        given = parse_given(self.policy_options) | parse_given((self.hold_by or "").split(",")[1:])
        if "interval" in given and choice.spare != KV_GROUP:
            raise OptionError(
                f"packed rows are cut every {KV_GROUP} tokens, not every {choice.spare}: leave interval out, or the "
                "option kv_bits"
            )

    def _check_recascade(self) -> None:
        """What is measured again must be what CAKE shares by, and rows must hold their lengths one by one."""
        if self.decode_policy != "hold":
            raise OptionError(
                f"the option recascade has no effect with the decode policy {self.decode_policy}: "
                "choose hold, or leave it out"
            )
        choice = self.choice
        if choice is None:
            return  # refused with the other options of the policy full
        wrong = {
            f"the allocation {choice.allocation.name}": choice.allocation.name != "cake",
            f"the heads {choice.heads.name}": choice.heads.name != "equal",
            f"the indicator {choice.indicator.name}": not choice.inputs <= {"window_queries"},
            f"the merge {choice.merge.name}": choice.merge.name != "none",
            f"hold by {self.hold_by}": choice.hold is None or choice.hold.name != "attention" or choice.spare != 1,
        }
        for what, is_wrong in wrong.items():
            if is_wrong:
                raise OptionError(
                    f"the option recascade measures CAKE's preferences again and has no form for {what}: take the "
                    "policy cake and hold by attention, or leave it out"
                )

    def _refuse_unused(self) -> None:
        """No option is accepted and then not applied: these mean nothing to the policy full."""
        given = {
            "tau1": self.tau1 is not None,
            "tau2": self.tau2 is not None,
            "gamma": self.gamma is not None,
            "pool": self.pool != DEFAULT_POOL,
            "indicator": self.indicator is not None,
            "allocation": self.allocation is not None,
            "heads": self.heads is not None,
            "merge": self.merge is not None,
            "policy_options": bool(self.policy_options),
            "hold_by": self.hold_by is not None,
            "schedule": self.schedule is not None,
            "recascade": self.recascade is not None,
        }
        for name, is_given in given.items():
            if is_given:
                raise OptionError(
                    f"the option {name} has no effect with the policy full, which keeps everything: leave it out"
                )
        if self.decode_policy == "grow" and Budget.parse(self.budget) != Budget(count=DEFAULT_BUDGET):
            raise OptionError(f"the policy {self.policy} keeps everything, a budget has no effect: leave it out")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_choice(what: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise OptionError(f"unknown {what} {shown(value)}: choose one of {', '.join(choices)}")
