"""A conversation in a file: a snapshot of its rows, and what was said."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..cache.snapshot import read_snapshot, write_snapshot
from ..errors import SnapshotError
from ..ranges import Range
from .saving import are_messages, pack, unpack
from .sequence import Sequence

if TYPE_CHECKING:
    from .engine import Engine


@dataclass(frozen=True)
class SavedChat:
    """What a conversation goes on from. pending, finished_by: of its last reply, see `Chat`."""

    sequence: Sequence
    system: str | None
    messages: list[dict[str, str]]
    pending: list[int]
    finished_by: int | None


def write_chat(engine: Engine, path: str | Path, chat: SavedChat) -> None:
    """Write a conversation whose sequence is nobody else's. Raises SnapshotError."""
    snapshot = pack(
        engine,
        chat.sequence,
        "chat",
        system=chat.system,
        messages=chat.messages,
        pending=chat.pending,
        finished_by=chat.finished_by,
    )
    write_snapshot(path, snapshot)


def read_chat(engine: Engine, path: str | Path) -> SavedChat:
    """The conversation in a file. Raises SnapshotError for one that this engine cannot go on from."""
    snapshot = read_snapshot(path)
    sequence = unpack(engine, snapshot, path, "chat")
    about, size = snapshot.about, engine.config.vocab_size
    system: Any = about.get("system")
    messages: Any = about.get("messages")
    pending: Any = about.get("pending")
    end: Any = about.get("finished_by")
    sound = (
        (system is None or isinstance(system, str))
        and are_messages(messages)
        and isinstance(pending, list)
        and all(Range(0, size - 1).has(token) for token in pending)
        and (end is None or Range(0, size - 1).has(end))
    )
    if not sound:
        raise SnapshotError(f"{path} is inconsistent: it does not say what was spoken")
    tokens = len(snapshot.ids) + len(pending)
    if tokens > engine.context:
        raise SnapshotError(f"{path} has {tokens:,} tokens, and this engine's context is {engine.context:,}")
    return SavedChat(sequence, system, messages, pending, end)
