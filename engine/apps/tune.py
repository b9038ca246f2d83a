"""`cake-infer tune`: CAKE's constants for one model, by grid search over a user's own texts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import TYPE_CHECKING

from ...cache.budget import Budget
from ...cache.config import DEFAULT_POLICY, CacheConfig
from ...cache.policies import NAMED
from ...errors import PromptError
from ..evaluation.bootstrap import Interval, bootstrap, paired
from ..evaluation.combination import budgets
from ..evaluation.table import show
from ..options import not_empty, of_range, positive_count
from .comparison import SHARED, add_window_argument
from .console import Console
from .loading import Load, add_model_arguments, add_output_arguments, open_engine
from .prompt import read_document

if TYPE_CHECKING:
    from ...cache.tuned import Tuned
    from ..engine import Engine

TAUS = (0.4, 0.6, 0.8, 1.0, 1.4, 2.0)
SHOWN = 8
TUNED = tuple(name for name, named in NAMED.items() if named.allocation == "cake")  # what has the constants


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    group = parser.add_argument_group("search")
    group.add_argument(
        "--text",
        metavar="FILE",
        nargs="+",
        required=True,
        type=not_empty,
        help="UTF-8 texts like those that the model will read",
    )
    group.add_argument(
        "--max-prompt", metavar="N", type=positive_count, default=4096, help="tokens read of each text (default 4096)"
    )
    group.add_argument(
        "--tokens",
        metavar="N",
        type=positive_count,
        default=64,
        help="tokens of the full cache's continuation that are compared (default 64)",
    )
    group.add_argument(
        "--budget",
        dest="budgets",
        metavar="N",
        nargs="+",
        default=["12.5%"],
        help="budgets to tune for, in tokens per layer and KV head or in %% of a prompt (default 12.5%%)",
    )
    group.add_argument(
        "--policy",
        dest="tuned_policy",
        choices=TUNED,
        default=str(DEFAULT_POLICY),
        help=f"the policy that is tuned (default {DEFAULT_POLICY})",
    )
    for name in ("tau1", "tau2"):
        group.add_argument(
            f"--{name}",
            dest=f"{name}s",
            metavar="X",
            nargs="+",
            type=of_range(CacheConfig.numbers[name]),
            default=list(TAUS),
            help=f"values of {name} to try (default {' '.join(map(str, TAUS))})",
        )
    group.add_argument(
        "--gamma",
        dest="gammas",
        metavar="X",
        nargs="+",
        type=of_range(CacheConfig.numbers["gamma"]),
        help="values of gamma to try, with --policy cake or critical-cake; without, gamma stays what it is",
    )
    add_window_argument(group)
    own = tuple(field.name for field in fields(CacheConfig) if field.name not in SHARED)
    add_model_arguments(parser, skip=(*own, "tuning"))
    parser.set_defaults(policy="full", tuning="off")
    add_output_arguments(parser.add_argument_group("output"))


def conflict(args: argparse.Namespace, given: set[str]) -> str | None:
    """Why these flags do not go together, or None."""
    if args.random_weights is not None:
        return "random weights have nothing to be tuned for: give a --model"
    budgets(args.budgets, args.window)
    grid(args)
    return None


@dataclass(frozen=True)
class Point:
    """One set of constants; None means what a run without them takes."""

    tau1: float | None = None
    tau2: float | None = None
    gamma: float | None = None

    def config(self, window: int, policy: str) -> CacheConfig:
        """Raises OptionError for a value that cannot be."""
        options = {} if self.gamma is None else {"gamma": self.gamma}
        return CacheConfig(window=window, policy=policy, tau1=self.tau1, tau2=self.tau2, policy_options=options)

    def __str__(self) -> str:
        if self.tau1 is None:
            return "as it is"
        gamma = "" if self.gamma is None else f", gamma {self.gamma:g}"
        return f"tau {self.tau1:g}/{self.tau2:g}{gamma}"


def grid(args: argparse.Namespace) -> list[Point]:
    """What is used without tuning, and then every point."""
    points = [Point(*values) for values in product(args.tau1s, args.tau2s, args.gammas or [None])]
    found = list(dict.fromkeys([Point(), *points]))
    for point in found:
        point.config(args.window, args.tuned_policy)
    return found


def run(args: argparse.Namespace, load: Load | None = None) -> int:
    """Search, say what was found, and write it where the model will find it."""
    points = grid(args)
    wanted = budgets(args.budgets, args.window)
    texts = [(name, read_document(name)) for name in args.text]
    with Console(quiet=args.quiet, verbose=args.verbose) as console, open_engine(args, console, load) as engine:
        from ..tuning import write_tuning

        losses, tokens = search(engine, args, texts, points, wanted, console)
        found = []
        for number_of, budget in enumerate(wanted):
            best = choose(losses[number_of], points, str(budget), console)
            if best is not None:
                found.append(row_of(best, round(sum(tokens[number_of]) / len(tokens[number_of]))))
        if found:
            path = write_tuning(engine.model_path, found)
            console.notice(f"wrote {path}: runs of this model with CAKE's allocation use it from now on")
        else:
            console.notice("no point of the grid is better than what is used now: nothing was written")
    return 0


def search(
    engine: Engine,
    args: argparse.Namespace,
    texts: Sequence[tuple[str, str]],
    points: Sequence[Point],
    wanted: Sequence[Budget],
    console: Console,
) -> tuple[list[list[list[float]]], list[list[int]]]:
    """Mean KL by budget, point and text, and the budgets in tokens by budget and text; one prefill for each text."""
    from ...cache.policies import make_policy
    from ..evaluation.fidelity import Example, fidelity
    from ..evaluation.memory import check_study
    from ..evaluation.study import Cell

    runner, tokenizer = engine.runner, engine.text_tokenizer()
    limit = min(args.max_prompt, engine.context - args.tokens)
    encoded = [(name, tokenizer.encode(text, allow_special=False)[:limit]) for name, text in texts]
    for name, ids in encoded:
        if len(ids) <= 2 * args.window:
            raise PromptError(f"{name} has {len(ids):,} tokens, too few to evict any: give a longer text")
    configs = [point.config(args.window, args.tuned_policy) for point in points]
    longest = max(len(ids) for _, ids in encoded)
    console.notice(check_study(engine, longest, args.tokens, configs, len(wanted)))
    losses: list[list[list[float]]] = [[[] for _ in points] for _ in wanted]
    sizes: list[list[int]] = [[] for _ in wanted]
    whole, read = sum(len(ids) for _, ids in encoded), 0
    for name, ids in encoded:
        counts = [budget.tokens(len(ids), args.window) for budget in wanted]
        cells = [Cell(make_policy(config, runner.model, count), count) for count in counts for config in configs]

        def on_chunk(layer: int, done: int, total: int, read: int = read, name: str = name) -> None:
            console.progress.update("evaluate", read + (layer * total + done) // engine.config.num_layers, whole, name)

        results = fidelity(runner, Example(tuple(ids)), cells, tokens=args.tokens, on_chunk=on_chunk)
        read += len(ids)
        for place, result in enumerate(results):
            if result.kl is not None:
                losses[place // len(points)][place % len(points)].append(result.kl)
        for place, count in enumerate(counts):
            sizes[place].append(count)
    return losses, sizes


def choose(losses: Sequence[Sequence[float]], points: Sequence[Point], budget: str, console: Console) -> Point | None:
    """The point with the least mean; None if that is what is used anyway. Shows the best ones."""
    means = [bootstrap(values) for values in losses]
    order = sorted(range(len(points)), key=lambda i: float("inf") if (found := means[i]) is None else found.mean)
    lines = []
    for place in dict.fromkeys([*order[:SHOWN], 0]):
        difference = paired(losses[place], losses[0]) if place else None
        lines.append([str(points[place]), _text(means[place]), _text(difference, sign=True)])
    count = len(losses[0])
    title = f"KL (nats) at budget {budget}, {count} {'text' if count == 1 else 'texts'}, {len(points)} points"
    console.text(show(title, ["constants", "KL", "minus as it is"], lines) + "\n")
    return points[order[0]] if order[0] else None


def row_of(point: Point, budget: int) -> Tuned:
    """What is written."""
    from ...cache.tuned import Tuned

    assert point.tau1 is not None
    assert point.tau2 is not None
    return Tuned(budget, point.tau1, point.tau2, point.gamma)


def _text(interval: Interval | None, *, sign: bool = False) -> str:
    if interval is None:
        return ""
    form = "+.4f" if sign else ".4f"
    return f"{interval.mean:{form}} ({interval.low:{form}} to {interval.high:{form}})"
