"""What the comparing commands share: which policies at which budgets, on which rows, and where results go."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...cache.budget import Budget
from ...cache.config import CacheConfig
from ...cache.policies import DEFAULT_WINDOW
from ...errors import OptionError
from ..evaluation.combination import Combination, budgets, combinations, merging
from ..evaluation.ledger import KEY
from ..options import not_empty, positive_count
from .console import Console
from .loading import DEFAULT_MODEL, add_model_arguments, weights_conflict

if TYPE_CHECKING:
    from ..engine import Engine
    from ..evaluation.encoding import EncodedRow
    from ..evaluation.rows import Row

__all__ = ["KEY", "Comparison"]

DEFAULT_POLICIES = ("cake", "auto", "snapkv", "streaming-llm")
DEFAULT_BUDGETS = ("3.2%", "6.25%", "12.5%")
SHARED = ("kv_dtype",)  # what all policies of a comparison have in common, beside the window


def add_comparison_arguments(
    parser: argparse.ArgumentParser,
    *,
    policies: Sequence[str] = DEFAULT_POLICIES,
    budgets: Sequence[str] = DEFAULT_BUDGETS,
    baseline: bool = True,
    out: str = "cake-eval",
    what: str = "FOLDER",
) -> None:
    """Policies, budgets, the model, and where results go."""
    group = parser.add_argument_group("comparison")
    group.add_argument(
        "--policy",
        dest="policies",
        metavar="SPEC",
        nargs="+",
        default=list(policies),
        help="policies, each NAME or NAME,PART=NAME,OPTION=VALUE, as in snapkv,allocation=cake or cake,heads=adaptive "
        f"(default {' '.join(policies)})",
    )
    group.add_argument(
        "--budget",
        dest="budgets",
        metavar="N",
        nargs="+",
        default=list(budgets),
        help="budgets, in tokens per layer and KV head or in %% of the prompt "
        f"(default {' '.join(budgets).replace('%', '%%')})",
    )
    if baseline:
        group.add_argument(
            "--baseline", metavar="SPEC", help="the policy that the others are compared with (default the first one)"
        )
    add_window_argument(group)
    group.add_argument(
        "--own-windows",
        action="store_true",
        help="each policy with its paper's window, at equal budgets all the same",
    )
    more = "; a rerun continues" if what == "FOLDER" else ""
    group.add_argument(
        "--out", metavar=what, type=not_empty, default=out, help=f"where results go{more} (default {out})"
    )
    own = tuple(field.name for field in fields(CacheConfig) if field.name not in SHARED)
    # a comparison says itself which constants it compares
    add_model_arguments(parser, skip=(*own, "tuning"))
    parser.set_defaults(policy="full", tuning="off")


def add_window_argument(group: argparse._ActionsContainer) -> None:
    """One window for everything that is compared, where a run takes the policy's own."""
    group.add_argument(
        "--window",
        metavar="N",
        type=positive_count,
        default=DEFAULT_WINDOW,
        help="the last tokens of the prompt, always kept, whose queries vote, for all policies "
        f"(default {DEFAULT_WINDOW})",
    )


def add_row_arguments(parser: argparse.ArgumentParser) -> None:
    """Where prompts come from, and what is done with them."""
    group = parser.add_argument_group("prompts")
    group.add_argument(
        "--rows",
        metavar="PATH",
        nargs="+",
        required=True,
        type=not_empty,
        help="JSONL files, or folders of them: LongBench's rows (context, input, answers), or prompt and answer",
    )
    group.add_argument("--limit", metavar="N", type=positive_count, help="at most so many rows of each file")
    group.add_argument(
        "--max-prompt", metavar="N", type=positive_count, help="longer prompts lose their middle (default the context)"
    )
    group.add_argument(
        "--question",
        choices=("inside", "after"),
        default="inside",
        help="whether the question is in the prompt that is compressed, or comes after compression (default inside)",
    )
    group.add_argument("--raw", action="store_true", help="no chat template")


@dataclass(frozen=True)
class Comparison:
    """The flags, read and checked."""

    policies: list[Combination]
    budgets: list[Budget]
    baseline: str
    model: str
    out: Path
    window: int  # the widest: what the engine needs

    @classmethod
    def of(cls, args: argparse.Namespace) -> Comparison:
        """Raises OptionError or BudgetError."""
        window = None if args.own_windows else args.window
        policies = combinations(args.policies, window, decoding=getattr(args, "decoding", False))
        for choice in (one.config.choice for one in policies):
            if choice is not None:
                choice.check_files()
        widest = max(one.config.window for one in policies)
        names = [one.text for one in policies]
        given = getattr(args, "baseline", None)
        baseline = names[0] if given is None else Combination.parse(given, window).text
        if baseline not in names:
            raise OptionError(f"the baseline {baseline} is not among the policies {', '.join(names)}")
        name = args.random_weights or args.model or DEFAULT_MODEL
        stored = args.quant or args.dtype or "as stored"
        kept = f", KV {args.kv_dtype}" if args.kv_dtype else ""
        title = f"{name} ({stored}{kept})"
        return cls(policies, budgets(args.budgets, widest), baseline, title, Path(args.out), widest)

    @property
    def names(self) -> list[str]:
        return [one.text for one in self.policies]


def comparison_conflict(args: argparse.Namespace, given: set[str], *, real_runs: bool = False) -> str | None:
    """Why these flags do not go together, or None. real_runs: every policy runs as it would outside of a comparison."""
    if conflict := weights_conflict(args, given):
        return conflict
    if args.own_windows and "window" in given:
        return "--window and --own-windows both set the windows: give one"
    comparison = Comparison.of(args)
    for policy in [] if real_runs else merging(comparison.policies):
        if policy.config.kv_bits is not None:
            return f"no comparison packs the rows of a merging policy: leave kv_bits or the merge out of {policy.text}"
    return None


def base_key(what: str, args: argparse.Namespace, comparison: Comparison) -> dict[str, Any]:
    """The key fields that all results of a run share; a command adds its own."""
    return {
        "what": what,
        "model": comparison.model,
        "question": args.question,
        "window": "own" if args.own_windows else args.window,
        "new_tokens": 0,
        "answer_limit": 0,
    }


def console_progress(console: Console) -> Callable[[int, int, str], None]:
    """A campaign's progress as a bar."""
    return lambda done, total, title: console.progress.update("evaluate", done, total, title)


def encode_rows(
    engine: Engine, args: argparse.Namespace, rows: Sequence[Row], after: int, answer_tokens: int, console: Console
) -> list[tuple[Row, EncodedRow]]:
    """The rows as ids, with room for `after` more tokens in the context; says how many lost their middle."""
    from ..evaluation.encoding import encode_row

    room = engine.context - after
    limit = min(args.max_prompt or room, room)
    found = [
        (row, encode_row(engine, row, args.question, limit=limit, answer_tokens=answer_tokens, raw=args.raw))
        for row in rows
    ]
    if cut := sum(one.cut > 0 for _, one in found):
        console.notice(f"{cut} of {len(found)} prompts have more than {limit:,} tokens and lost their middle")
    return found
