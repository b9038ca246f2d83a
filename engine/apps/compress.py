"""`cake-infer compress`: read a document once, and save what is kept of it for questions to come."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from ...cache.policies import DOCUMENT_POLICY
from ...cache.saved_file import check_target
from ...errors import PromptError
from .console import Console
from .interrupt import Interrupt
from .loading import (
    Load,
    add_model_arguments,
    add_output_arguments,
    add_pieces_argument,
    open_engine,
    pieces_conflict,
    usage_conflict,
)
from .prompt import add_prompt_arguments, prompt_conflict, read_prompt

if TYPE_CHECKING:
    from ..engine import Engine

COST = f"""\
What is kept is chosen before a question is known: what a question would have wanted may be gone, more of it the smaller
the budget. Without --policy it is `{DOCUMENT_POLICY}`, which lost least of the answers where the question came
afterwards: 0.28 nats per token at 12.5% of the text and 0.67 at 3.2%, where `cake` lost 0.43 and 0.70 (SmolLM2-135M, 53
prompts; `cake-infer eval fidelity --question after` measures it on texts of your own). The file and the statistics line
of each answer name the policy. Where an answer matters, keep more (--budget 20%), or read the document with its
question."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = f"{parser.description}\n\n{COST}"
    text = parser.add_argument_group("document")
    add_prompt_arguments(text, "read the text as it stands", question=False)
    text.add_argument(
        "-o", "--output", metavar="FILE", required=True, help="the file to write, in place of one that may be there"
    )
    add_model_arguments(parser, skip=("decode_policy", "hold_by", "recascade", "policy"))
    parser.add_argument(
        "--policy",
        metavar="NAME",
        default=DOCUMENT_POLICY,
        help=f"what decides which tokens are kept, see `policies` (default {DOCUMENT_POLICY})",
    )
    add_pieces_argument(text, "read the document")
    add_output_arguments(parser.add_argument_group("output"))


def conflict(args: argparse.Namespace, given: set[str]) -> str | None:
    """Why these flags do not go together, or None."""
    if clash := prompt_conflict(args):
        return clash
    if args.output in ("", "-"):
        return "-o needs a file: what is kept is written there"
    args.decode_policy, args.hold_by = "grow", None
    return pieces_conflict(args, length_known=True) or usage_conflict(args, given)


def run(args: argparse.Namespace, load: Load | None = None) -> int:
    """Reads, evicts and saves; the exit code. Raises CakeError."""
    from ...cache.budget import size_text
    from ..statistics import Statistics

    with Console(quiet=args.quiet, verbose=args.verbose) as console:
        target = check_target(args.output)
        prompt = read_prompt(args, console)
        if prompt is None or not (prompt.text or args.raw):
            raise PromptError("there is no document: give --prompt-file FILE or text on standard input")
        system = [] if prompt.system is None else [{"role": "system", "content": prompt.system}]
        messages = None if args.raw else [*system, {"role": "user", "content": prompt.text}]

        def before_weights(engine: Engine) -> None:
            engine.check_room(len(prompt.ids(engine)), stream_prefill=args.stream_prefill)

        with open_engine(args, console, load, before_weights) as engine, Interrupt() as interrupt:
            try:
                document = engine.compress(
                    prompt.text if args.raw else None,
                    messages=messages,
                    policy=args.policy,
                    stream_prefill=args.stream_prefill,
                    on_progress=interrupt.watch(console.progress),
                )
            finally:
                console.progress.clear()
            if interrupt.asked:
                raise KeyboardInterrupt
            document.save(target)
        if console.verbose:
            console.notice(Statistics(full_tokens=document.tokens, layer_lengths=document.layer_lengths).layers_text())
        share = document.kept_tokens / document.tokens
        console.notice(
            f"{target}: {size_text(os.path.getsize(target))}, kept {document.kept_tokens:,.0f} of {document.tokens:,} "
            f"tokens a layer ({share:.1%}) by {document.policy}; ask with --cache {target} --prompt TEXT"
        )
    return 0
