"""`cake-infer import-gguf FILE OUT`: a GGUF file becomes a model folder."""

from __future__ import annotations

import argparse

from ..options import not_empty
from .console import Console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    parser.add_argument(
        "file", metavar="FILE", type=not_empty, help="a GGUF file of a Llama, Mistral, Qwen2, Qwen3 or Gemma model"
    )
    parser.add_argument("out", metavar="OUT", type=not_empty, help="the folder to make; it must not exist, or be empty")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        default="bfloat16",
        help="how the weights are stored (default bfloat16)",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress")


def run(args: argparse.Namespace) -> int:
    """Import, with progress on a terminal's standard error, and print the folder on standard output."""
    from ...models.gguf_import import import_gguf

    with Console(quiet=args.quiet) as console:
        folder = import_gguf(args.file, args.out, dtype=args.dtype, on_progress=console.progress.update)
        console.notice(f"run it with: cake-infer --model {folder}")
        console.text(f"{folder}\n")
    return 0
