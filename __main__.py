"""The command `cake-infer`, also as `python -m cake_infer`."""

from __future__ import annotations

import sys


def main() -> int:
    """Runs the command line; the exit code. Ctrl-C ends it without a word from its first import on."""
    try:
        from .cli import main as run

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
