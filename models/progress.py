"""How long-running parts of the models package tell their caller where they are."""

from __future__ import annotations

from collections.abc import Callable

OnProgress = Callable[[str, int, int], None]
"""Called as (stage, done bytes, total bytes); stages are "download", "import" and "load". A total of 0 is unknown."""
