"""docs/options.md, written from the parsers: `python -m cake_infer.engine.apps.reference > docs/options.md`."""

from __future__ import annotations

import argparse
import sys

from ...cli import COMMANDS, EXIT_CODES, build_parser
from .compress import COST
from .repl import HELP

HEAD = """\
# Options of the command line

Written by `python -m cake_infer.engine.apps.reference > docs/options.md`; a test keeps it in step with the parsers.

A text goes in by `--prompt`, `--prompt-file` and standard input: the documents first, in their order, then the
question, a blank line between them, all as one user message. The final newline of a file or pipe is not part of it.
With `--prompt` and no `--prompt-file`, standard input is read as a document if it is a pipe or a file; with
`--prompt-file` it is read only where `-` stands for it. Input is UTF-8 whatever the locale, and so is the text on
standard output; broken UTF-8 is refused with the offset of the byte. `--raw` continues the text as it stands: no chat
template, and control tokens written in it count. Everything but generated text (progress, notices, warnings, one line
of statistics) goes to standard error.

`--json` writes one object when the reply is over: `model`, `prompt_tokens`, `text`, `finish_reason` ("stop", "length"
or "interrupted"), `new_tokens`, `ids`, `logprobs` (with `--logprobs N`: `id`, `logprob` and the N likeliest of each
token, null for a probability of 0) and `stats`. Streamed text ends with a newline.

No option is accepted and not applied: flags that exclude one another are a usage error.
"""

CHAT = """\
On a terminal these commands are understood; from a pipe each line is a message, and a failed turn gives exit code 1.

```
{help}
```

A turn reads only what is new: the conversation goes on from the tokens that were fed, on the cache that is left of
them. Where the budget has made earlier turns give up tokens, they are gone for later questions too; `/clear` and
reading the document again brings them back, and a larger `--budget` keeps more from the start. Positions go on from the
true length of the conversation. A turn that is refused or stopped before its first token is not part of the
conversation; a reply that is stopped later stays as far as it came. With `/regen` the old reply stays where no new one
came. A saved conversation goes on with the ids that were fed, on the rows that were left of them.
"""


def markdown() -> str:
    """The whole document."""
    parts = [HEAD, f"Exit codes: {EXIT_CODES}\n", "## cake-infer\n", flags(build_parser(None))]
    for name, (_, summary) in COMMANDS.items():
        parts += [f"## cake-infer {name}\n", f"{summary[0].upper()}{summary[1:]}.\n"]
        if name == "compress":
            parts.append(f"{COST}\n")
        parts.append(flags(build_parser(name)))
        if name == "chat":
            parts.append(CHAT.format(help=HELP))
    return "\n".join(parts)


def flags(parser: argparse.ArgumentParser) -> str:
    """A table of a command's arguments; what every command has (--help) is left out."""
    rows = ["| argument | |", "|---|---|"]
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        name = max(action.option_strings, key=len) if action.option_strings else ""
        value = "" if action.nargs == 0 else "{" + ",".join(action.choices) + "}" if action.choices else action.metavar
        text = (action.help or "") % {"prog": parser.prog}
        cells = [f"`{' '.join(part for part in (name, str(value or '')) if part)}`", text]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.stdout.write(markdown())
