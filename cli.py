"""The command line: parses and dispatches, nothing else."""

from __future__ import annotations


def main() -> int:
    return 0
