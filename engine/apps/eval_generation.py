"""`cake-infer eval generation`: what each rule of decoding loses over a long continuation, step by step."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import OptionError
from ..evaluation.encoding import EncodedRow
from ..evaluation.excerpts import Excerpt, excerpts
from ..evaluation.summary import Measure, summarise
from ..options import not_empty, positive_count
from .comparison import Comparison, add_comparison_arguments, comparison_conflict
from .comparison_run import Records, Setting, budget_table, compare, publish
from .console import Console
from .loading import Load, add_output_arguments

if TYPE_CHECKING:
    from ..engine import Engine
    from ..evaluation.campaign import Item
    from ..evaluation.study import Cell
    from ..prefill import OnChunk

MIB = 2**20
POLICIES = (
    "cake,hold_by=attention",
    "cake,recascade=128",
    "cake,hold_by=tova,interval=16",
    "cake,hold_by=streaming-llm,interval=16",
)
BUDGETS = ("12.5%", "25%")
MEASURES = (
    Measure("kl", "KL (nats)", 4),
    Measure("top1", "top-1 (%)", 1, lower=False, scale=100.0),
    Measure("loss", "text loss (nats/token)", 4),
    Measure("bytes", "most KV cache (MiB)", 2, scale=1 / MIB),
)
QUARTERS = tuple(Measure(f"kl_{number}", f"KL, quarter {number}", 4) for number in range(1, 5))
ABOUT = (
    "Means over texts with 95% percentile bootstrap intervals (10,000 resamples of texts). A difference is paired, "
    "text by text; it is marked where its interval leaves out 0. All caches were fed the same tokens; what each "
    "held at most is in the last column."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    group = parser.add_argument_group("texts")
    group.add_argument(
        "--text",
        metavar="FILE",
        nargs="+",
        required=True,
        type=not_empty,
        help="UTF-8 texts like those that the model will write",
    )
    group.add_argument(
        "--excerpts", metavar="N", type=positive_count, default=1, help="excerpts of each text (default 1)"
    )
    group.add_argument(
        "--prompt-tokens",
        metavar="N",
        type=positive_count,
        default=1024,
        help="tokens of an excerpt that are read as a prompt (default 1024)",
    )
    group.add_argument(
        "--tokens",
        metavar="N",
        type=positive_count,
        default=1024,
        help="tokens after them that are fed one by one, at least 4 (default 1024)",
    )
    add_comparison_arguments(parser, policies=POLICIES, budgets=BUDGETS)
    parser.set_defaults(decoding=True, question="none")
    add_output_arguments(parser.add_argument_group("output"))


def conflict(args: argparse.Namespace, given: set[str]) -> str | None:
    """Why these flags do not go together, or None."""
    if args.tokens < len(QUARTERS):
        return f"--tokens is at least {len(QUARTERS)}, a token for each quarter, not {args.tokens}"
    for policy in Comparison.of(args).policies:
        if policy.config.kv_bits is not None:
            return f"caches are compared here as they are decoded, side by side: leave kv_bits out of {policy.text}"
    return comparison_conflict(args, given)


def run(args: argparse.Namespace, load: Load | None = None) -> int:
    """Decode what is missing in the results, then print and write the report."""
    from .prompt import read_document

    texts = [(Path(name).name, read_document(name)) for name in args.text]
    return compare("generation", args, load, lambda setting: measure(setting, texts), report)


def measure(setting: Setting, texts: Sequence[tuple[str, str]]) -> Records:
    """The records of this run, old ones and new ones."""
    from ..evaluation.campaign import Item
    from ..evaluation.generation import check_drift, drift

    engine, args = setting.engine, setting.args
    tokenizer = engine.text_tokenizer()
    begin = (tokenizer.bos_id,) if tokenizer.adds_bos and tokenizer.bos_id is not None else ()
    length = args.prompt_tokens + args.tokens + 1
    if length > engine.context:
        raise OptionError(
            f"{args.prompt_tokens:,} tokens and {args.tokens:,} after them do not fit the context of "
            f"{engine.context:,}: give fewer, or stretch it with the option rope_scaling (KIND:FACTOR)"
        )
    found = excerpts(
        texts,
        args.excerpts,
        length - len(begin),
        lambda text: tokenizer.encode(text, add_bos=False, allow_special=False),
    )

    def item(one: Excerpt) -> Item:
        ids = (*begin, *one.ids)
        encoded = EncodedRow(ids[: args.prompt_tokens], (), ids[args.prompt_tokens :])
        return Item(one.name, encoded, {"text": one.text, "first": one.first})

    def compute(item: Item, cells: list[Cell], on_chunk: OnChunk) -> Records:
        prompt, layers = item.encoded.prefix, engine.config.num_layers

        def tell(share: float) -> None:
            layer, done = divmod(int(share * layers * len(prompt)), len(prompt))
            on_chunk(layer, done, len(prompt))

        return drift(engine.runner, prompt, item.encoded.answer, cells, on_share=tell)

    def check(engine: Engine, prompt: int, cells: list[Cell]) -> str:
        return check_drift(engine, prompt, args.tokens, cells)

    return setting.fill([item(one) for one in found], compute, after=args.tokens, check=check, new_tokens=args.tokens)


def report(
    records: Sequence[dict[str, Any]], args: argparse.Namespace, comparison: Comparison, console: Console
) -> None:
    """The tables on standard output, and plots and a page beside the results."""
    from ..evaluation.plots import over_parts

    budgets = [str(budget) for budget in comparison.budgets]
    entries = summarise(records, (*MEASURES, *QUARTERS), comparison.names, budgets, comparison.baseline)
    tables, images = [], []
    after = f"{args.tokens:,} tokens after {args.prompt_tokens:,}, {comparison.model}"
    for budget in budgets:
        tables.append(budget_table(f"budget {budget}, {after}", entries, MEASURES, comparison, budget))
        tables.append(budget_table(f"by quarter, budget {budget}, {after}", entries, QUARTERS, comparison, budget))
        own = [one for one in entries if one.budget == budget]
        images.append((f"quarters-{budget.replace('%', 'pc')}", over_parts(own, QUARTERS, MEASURES[0].title)))
    publish(console, comparison, "generation", MEASURES, entries, tables, images=images, about=ABOUT)
