"""Policies as the comparing commands spell them: a name, and what differs from it. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...cache.budget import Budget
from ...cache.config import KV_BITS, CacheConfig
from ...errors import OptionError
from ...ranges import POSITIVE, shown

if TYPE_CHECKING:
    from ..runner import Runner
    from .study import Cell

PARTS = ("indicator", "allocation", "heads", "merge", "schedule")


@dataclass(frozen=True)
class Combination:
    """`cake`, `snapkv,allocation=cake`, `cake,heads=adaptive,gamma=100`, `full,kv_bits=4`, `cake,pieces=2048`,
    `cake,hold_by=h2o,interval=16`, `cake,recascade=64`: a policy and its name in tables. piece: it reads a prompt in
    pieces of so many tokens, None whole. What is given up while decoding means hold."""

    text: str
    config: CacheConfig
    piece: int | None = None

    @classmethod
    def parse(cls, text: str, window: int | None) -> Combination:
        """Raises OptionError for an unknown name, part or option. window: None for the policy's own."""
        name, *changes = (part.strip() for part in text.split(","))
        parts: dict[str, str] = {}
        options: dict[str, object] = {}
        for change in changes:
            key, equals, value = (piece.strip() for piece in change.partition("="))
            if not key or not equals or not value:
                raise OptionError(f"cannot read the policy {shown(text)}: give NAME or NAME,PART=NAME,OPTION=VALUE")
            if key in parts or key in options:
                raise OptionError(f"the policy {shown(text)} gives {key} twice")
            (parts if key in PARTS else options)[key] = value
        pieces = options.pop("pieces", None)
        bits = options.pop("kv_bits", None)
        hold_by, recascade = options.pop("hold_by", None), options.pop("recascade", None)
        if bits is not None and bits not in [str(known) for known in KV_BITS]:
            raise OptionError(f"the policy {shown(text)} has no known kv_bits: {', '.join(map(str, KV_BITS))} are")
        config = CacheConfig(
            policy=name,
            window=window,  # type: ignore[arg-type]
            policy_options=options,
            kv_bits=None if bits is None else int(str(bits)),
            decode_policy="grow" if hold_by is None and recascade is None else "hold",
            hold_by=None if hold_by is None else str(hold_by),
            recascade=None if recascade is None else _tokens(text, "recascade", recascade),
            **parts,  # type: ignore[arg-type]
        )
        piece = options_piece(text, pieces, config)
        return cls(",".join([name, *(change.replace(" ", "") for change in changes)]), config, piece)


def options_piece(text: str, pieces: object, config: CacheConfig) -> int | None:
    """The tokens of a piece. Raises OptionError."""
    if pieces is None:
        return None
    piece = _tokens(text, "pieces", pieces)
    if config.policy == "full" or config.kv_bits is not None:
        raise OptionError(f"the policy {shown(text)} is not compared in pieces: leave them out")
    return piece


def _tokens(text: str, name: str, value: object) -> int:
    try:
        return int(POSITIVE.parse(str(value)))
    except ValueError as error:
        raise OptionError(f"{name} of the policy {shown(text)} {error}") from None


def combinations(texts: list[str], window: int | None, *, decoding: bool = False) -> list[Combination]:
    """Several, each once. decoding: whether it is compared what they give up while decoding; else that is refused."""
    found = [Combination.parse(text, window) for text in texts]
    for one in found:
        if one.config.decode_policy == "hold" and not decoding:
            raise OptionError(
                f"the policy {one.text!r} says what is given up while a reply is written, which is not compared here: "
                "leave hold_by and recascade out (`eval generation` compares them)"
            )
    names = [one.text for one in found]
    for name in names:
        if names.count(name) > 1:
            raise OptionError(f"the policy {name!r} is given twice")
    return found


def merging(policies: Sequence[Combination]) -> list[Combination]:
    """Those that fold evicted values into kept ones: no other prefill can stand for their own."""
    return [one for one in policies if one.config.choice is not None and one.config.choice.merge.name != "none"]


def read_alone(policies: Sequence[Combination]) -> list[Combination]:
    """Those whose rows are not the full cache's, so that each prompt is read once more: merging, or in pieces."""
    return [one for one in policies if one in merging(policies) or one.piece is not None]


def budgets(texts: list[str], window: int) -> list[Budget]:
    """Several, each once; raises BudgetError for one below the window, or that does not parse."""
    found = [Budget.parse(text) for text in texts]
    for budget in found:
        budget.tokens(1, window)
        if found.count(budget) > 1:
            raise OptionError(f"the budget {budget} is given twice")
    return found


def make_cell(runner: Runner, combination: Combination, budget: Budget, prompt_tokens: int) -> Cell:
    """What a prefill of so many tokens would be told."""
    from ...cache.policies import make_policy
    from .study import Cell

    tokens = budget.tokens(prompt_tokens, runner.cache.window)
    config = combination.config
    policy = make_policy(config, runner.model, tokens)
    return Cell(policy, tokens, bits=config.kv_bits, window=config.window, piece=combination.piece, config=config)
