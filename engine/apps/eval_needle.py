"""`cake-infer eval needle`: are facts in a long text found again, by length, depth, policy and budget?"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...errors import OptionError
from ...ranges import Range
from ..evaluation.haystack import CITIES, Hunt, Needle, haystack, hide, magic_numbers, sentences
from ..evaluation.rows import Row
from ..evaluation.summary import Measure, summarise
from ..options import not_empty, of_range, positive_count
from .comparison import Comparison, add_comparison_arguments, comparison_conflict
from .comparison_run import Records, Setting, budget_table, compare, publish
from .console import Console
from .loading import Load, add_output_arguments

if TYPE_CHECKING:
    from ..evaluation.campaign import Item
    from ..evaluation.study import Cell
    from ..prefill import OnChunk

MEASURES = (Measure("score", "found (%)", 1, lower=False, scale=100.0),)
MOST_REPEATS = 1000
LENGTHS, DEPTHS = (1024, 2048, 4096), (0, 25, 50, 75, 100)
BEFORE = "Read the text and answer the question after it.\n\n"
OWN = ("needle", "needle_question", "needle_answer")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    group = parser.add_argument_group("haystack")
    group.add_argument(
        "--text",
        metavar="FILE",
        nargs="+",
        type=not_empty,
        help="the haystack, instead of the built-in filler; repeated if too short",
    )
    group.add_argument(
        "--lengths",
        metavar="N",
        nargs="+",
        type=positive_count,
        default=list(LENGTHS),
        help=f"tokens of the haystack (default {' '.join(map(str, LENGTHS))})",
    )
    group.add_argument(
        "--depths",
        metavar="PERCENT",
        nargs="+",
        type=of_range(Range(0, 100, float)),
        default=list(DEPTHS),
        help=f"where the first needle is, 0 to 100 (default {' '.join(map(str, DEPTHS))})",
    )
    group.add_argument(
        "--needles", metavar="N", type=of_range(Range(1, len(CITIES))), default=1, help="built-in needles (default 1)"
    )
    group.add_argument(
        "--repeats",
        metavar="N",
        type=of_range(Range(1, MOST_REPEATS)),
        default=1,
        help="haystacks of each length and depth (default 1)",
    )
    group.add_argument(
        "--needle", metavar="TEXT", type=not_empty, help="a needle of your own; with both of the next two"
    )
    group.add_argument("--needle-question", metavar="TEXT", type=not_empty, help="what is asked about it")
    group.add_argument("--needle-answer", metavar="TEXT", type=not_empty, help="the words that a reply must have")
    group.add_argument(
        "--question",
        choices=("inside", "after"),
        default="inside",
        help="whether the question is in the prompt that is compressed, or comes after compression (default inside)",
    )
    group.add_argument(
        "--tokens", metavar="N", type=positive_count, default=32, help="most tokens of a reply (default 32)"
    )
    group.add_argument("--raw", action="store_true", help="no chat template")
    add_comparison_arguments(parser)
    add_output_arguments(parser.add_argument_group("output"))


def conflict(args: argparse.Namespace, given: set[str]) -> str | None:
    """Why these flags do not go together, or None."""
    own = [name for name in OWN if getattr(args, name) is not None]
    if own and len(own) < len(OWN):
        return "--needle, --needle-question and --needle-answer belong together: give all three"
    if own and "needles" in given:
        return "--needles has no effect with a --needle of your own"
    return comparison_conflict(args, given)


def run(args: argparse.Namespace, load: Load | None = None) -> int:
    """Hunt for what is missing in the results, then print and write the report."""
    from .prompt import read_document

    hay = [one for file in args.text for one in sentences(read_document(file))] if args.text else None
    return compare("needle", args, load, lambda setting: measure(setting, hay), report)


def hunt_of(args: argparse.Namespace, seed: int) -> Hunt:
    """The needles of one haystack."""
    if args.needle is None:
        return magic_numbers(args.needles, seed)
    return Hunt((Needle(args.needle, args.needle_answer),), args.needle_question)


def _too_long(length: int, context: int) -> OptionError:
    return OptionError(
        f"a haystack of {length:,} tokens with its question does not fit the context of {context:,}: "
        "give shorter lengths"
    )


def measure(setting: Setting, hay: Sequence[str] | None) -> Records:
    """The records of this run, old ones and new ones."""
    from ..evaluation.campaign import Item
    from ..evaluation.encoding import encode_row
    from ..evaluation.replies import greedy_replies
    from ..evaluation.study import read

    engine, args = setting.engine, setting.args
    tokenizer = engine.text_tokenizer()
    room = engine.context - args.tokens
    hunts: dict[str, Hunt] = {}
    items = []
    for length in args.lengths:
        if length > room:  # told before so long a text is made up
            raise _too_long(length, engine.context)
        for repeat in range(args.repeats):
            straw = haystack(hay, length, repeat, lambda text: len(tokenizer.encode(text, add_bos=False)))
            for at in args.depths:
                hunt = hunt_of(args, seed=repeat * 1000 + length)
                text = BEFORE + hide(straw, hunt, at / 100)
                name = f"{length} tokens, depth {at:g}%, haystack {repeat}"
                row = Row(name, "needle", text, f"\n\n{hunt.question}", (hunt.answer,))
                encoded = encode_row(engine, row, args.question, limit=room, answer_tokens=64, raw=args.raw)
                if encoded.cut:
                    raise _too_long(length, engine.context)
                hunts[name] = hunt
                items.append(Item(name, encoded, {"length": length, "depth": at, "needles": len(hunt.needles)}))

    def compute(item: Item, cells: list[Cell], on_chunk: OnChunk) -> Records:
        suffix = list(item.encoded.suffix)
        reading = read(
            engine.runner, list(item.encoded.prefix), cells, new_tokens=len(suffix) + args.tokens, on_chunk=on_chunk
        )
        said = greedy_replies(engine.runner, reading, reading.kept, suffix, args.tokens, stop_ids=engine.stop_ids)
        replies = [tokenizer.decode(ids) for ids in said]
        return [{"reply": reply, "score": hunts[item.name].score(reply)} for reply in replies]

    return setting.fill(items, compute, after=args.tokens, new_tokens=args.tokens, replies=True)


def report(
    records: Sequence[dict[str, Any]], args: argparse.Namespace, comparison: Comparison, console: Console
) -> None:
    """The tables on standard output, and heat maps and a page beside the results."""
    from ..evaluation.heatmap import grid, heat_map

    budgets = [str(budget) for budget in comparison.budgets]
    entries = summarise(records, MEASURES, comparison.names, budgets, comparison.baseline)
    tables, images = [], []
    for budget in budgets:
        title = f"needles found, budget {budget}, question {args.question}, {comparison.model}"
        tables.append(budget_table(title, entries, MEASURES, comparison, budget))
        grids = {
            policy: grid([one for one in records if one["policy"] == policy and one["budget"] == budget])
            for policy in comparison.names
        }
        for policy, found in grids.items():
            head = [f"{policy}, {budget}", *(f"{length:,}" for length in found.lengths)]
            body = [
                [f"depth {at:g}%", *(f"{100 * value:.0f}" for value in line)]
                for at, line in zip(found.depths, found.values, strict=True)
            ]
            tables.append((f"found (%) by depth and length: {policy}, budget {budget}", head, body))
        images.append((f"map-{budget.replace('%', 'pc')}", heat_map(grids, budget)))
    publish(console, comparison, f"needle-{args.question}", MEASURES, entries, tables, images=images)
