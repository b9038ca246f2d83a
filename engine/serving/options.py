"""What the server may be told: where it listens, who may ask, and how much. Imports no torch."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ...cache.budget import parse_bytes
from ...errors import OptionError
from ...ranges import COUNT, MOST_BYTES, POSITIVE, SECONDS, SIZE, Range, check_numbers

MIB = 1 << 20
NUMBERS = {
    "port": Range(0, 65535),
    "parallel": Range(1, 65_536),
    "queue": COUNT,
    "slice": SECONDS,
    "max_body": SIZE,
    "max_prompt": POSITIVE,
    "documents": COUNT,
    "document_bytes": Range(0, MOST_BYTES),
    "connections": POSITIVE,
    "backlog": POSITIVE,
    "patience": SECONDS,
    "grace": SECONDS,
}


@dataclass(frozen=True)
class ServeOptions:
    """Every bound of the server. Raises OptionError for a value that cannot be applied.

    parallel: replies that are decoded together at most. queue: how many more may wait for a place. arena: bytes of KV
    memory for all of them, None for what `parallel` of the longest would take, or what is free.
    slice: seconds for which a prompt is read before the running replies get their next token.
    max_body: bytes of a request's body. max_prompt: tokens of a prompt, None for what the context allows.
    max_new_tokens: what a request gets that does not say how many tokens it wants.
    documents, document_bytes: how many documents are kept, and bytes of their keys and values.
    connections: open connections. backlog: pieces of text that wait for a client that does not read; then it is
    dropped. patience: seconds in which a client must have sent its request, or taken what was sent to it.
    grace: seconds that running replies get when the server is asked to stop.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    public: bool = False
    parallel: int = 16
    queue: int = 64
    arena: str | None = None
    slice: float = 0.15
    max_body: int = 16 * MIB
    max_prompt: int | None = None
    documents: int = 16
    document_bytes: int = 1024 * MIB
    connections: int = 256
    backlog: int = 1024
    patience: float = 60.0
    grace: float = 5.0

    numbers: ClassVar[Mapping[str, Range]] = NUMBERS

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.arena is not None:
            parse_bytes(self.arena)
        if self.api_key is not None and (not self.api_key.strip() or not self.api_key.isascii()):
            raise OptionError("the option api_key must be a text of ASCII characters that is not empty")
        if self.api_key is None and not self.public and not is_loopback(self.host):
            raise OptionError(
                f"the option host is {self.host}, which can be reached from other machines, and anybody there could "
                "use the model: set the option api_key, or the option public to let everybody in"
            )


def is_loopback(host: str) -> bool:
    """Whether only programs on this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False  # a name may resolve to anything
