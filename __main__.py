"""The command `cake-infer`, also as `python -m cake_infer`."""

from __future__ import annotations

import signal
import sys
from types import FrameType


def main() -> int:
    """Runs the command line; the exit code. Ctrl-C ends it without a word from its first import on.

    What a Ctrl-C breaks off may be caught inside of a library that is being imported, which then fails to be imported
    again: torch does so with numpy.
    """
    interrupts: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    try:
        from .cli import main as run

        code = run()
    except KeyboardInterrupt:
        code = 130
    except ImportError:
        if not interrupts:
            raise
        code = 130
    if code == 130 and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # one more, while the interpreter cleans up, ends it at once
    return code


if __name__ == "__main__":
    sys.exit(main())
