"""`cake-infer inspect`: a page that shows, for one prompt, what every layer and head kept of it."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from ...cache.saved_file import check_target
from ...errors import CakeError
from ..evaluation.inspection_page import is_inspection_page
from ..whole_file import write_whole
from .comparison import DEFAULT_BUDGETS, Comparison, add_comparison_arguments, comparison_conflict
from .console import Console
from .loading import Load, add_output_arguments, open_engine
from .prompt import Prompt, add_prompt_arguments, prompt_conflict, read_prompt

if TYPE_CHECKING:
    from ..engine import Engine

DEFAULT_PAGE = "inspect.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    text = parser.add_argument_group("prompt")
    add_prompt_arguments(text, "read the text as it stands")
    add_comparison_arguments(
        parser, policies=("auto",), budgets=DEFAULT_BUDGETS[1:2], baseline=False, out=DEFAULT_PAGE, what="FILE"
    )
    add_output_arguments(parser.add_argument_group("output"))


def conflict(args: argparse.Namespace, given: set[str]) -> str | None:
    """Why these flags do not go together, or None."""
    if clash := prompt_conflict(args):
        return clash
    for policy in Comparison.of(args).policies:
        if policy.config.kv_bits is not None:
            return f"kv_bits has no effect here: {policy.text} keeps the tokens that it would keep without"
    return comparison_conflict(args, given)


def run(args: argparse.Namespace, load: Load | None = None) -> int:
    """Read the prompt once and write the page."""
    comparison = Comparison.of(args)
    args.window = comparison.window

    with Console(quiet=args.quiet, verbose=args.verbose) as console:
        out = check_target(comparison.out, is_inspection_page, "page that inspect wrote")
        if any(os.path.exists(name) and out.exists() and out.samefile(name) for name in args.prompt_file or ()):
            raise CakeError(f"cannot write {out}: it is read with --prompt-file; give another name")
        prompt = read_prompt(args, console) or Prompt()
        prompt.check()
        with open_engine(args, console, load) as engine:
            page = render(engine, prompt.ids(engine), comparison, console)
        try:
            write_whole(out, page.encode())
        except OSError as error:
            raise CakeError(f"cannot write {out}: {error.strerror or error}") from error
        console.notice(f"wrote {out}: open it in a browser")
    return 0


def render(engine: Engine, ids: list[int], comparison: Comparison, console: Console) -> str:
    """The page as text."""
    from ..evaluation.combination import make_cell
    from ..evaluation.inspection import shown_cell, token_texts
    from ..evaluation.inspection_page import TITLE, inspection_page
    from ..evaluation.memory import check_study
    from ..evaluation.study import read

    pairs = [(policy, budget) for policy in comparison.policies for budget in comparison.budgets]
    configs = [policy.config for policy in comparison.policies]
    console.notice(check_study(engine, len(ids), 1, configs, len(comparison.budgets)))
    cells = [make_cell(engine.runner, policy, budget, len(ids)) for policy, budget in pairs]
    layers, heads = engine.config.num_layers, engine.config.num_kv_heads

    def on_chunk(layer: int, done: int, total: int) -> None:
        console.progress.update("prefill", layer * total + done, layers * total, f"layer {layer + 1}/{layers}")

    reading = read(engine.runner, ids, cells, new_tokens=1, on_chunk=on_chunk, rows=False)
    texts, control = token_texts(engine.text_tokenizer(), ids)
    data = {
        "tokens": texts,
        "control": control,
        "layers": layers,
        "heads": heads,
        "cells": [
            shown_cell(policy.text, str(budget), kept, len(ids), layers, heads, policy.config.window)
            for (policy, budget), kept in zip(pairs, reading.kept, strict=True)
        ],
    }
    return inspection_page(f"{TITLE}{comparison.model.split(' (')[0]} keeps", data)
