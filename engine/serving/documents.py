"""Documents that were uploaded: read once, asked about by their ids."""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from ..document import Document
from .errors import ApiError, invalid


@dataclass(frozen=True)
class Shelved:
    """A document and what is told of it."""

    id: str
    name: str | None
    created: int
    document: Document

    def told(self) -> dict[str, Any]:
        document = self.document
        return {
            "id": self.id,
            "object": "document",
            "name": self.name,
            "created_at": self.created,
            "tokens": document.tokens,
            "kept_tokens": document.kept_tokens,
            "bytes": document.nbytes,
            "raw": isinstance(document.source, str),
            "layer_lengths": [list(heads) for heads in document.layer_lengths],
        }


class Shelf:
    """At most `most` documents, with keys and values of at most `most_bytes`. Of the event loop's thread alone.

    A full shelf refuses a newcomer: which documents are wanted no longer is for whoever put them there to say.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self.most, self.most_bytes = most, most_bytes
        self._shelved: OrderedDict[str, Shelved] = OrderedDict()

    def __len__(self) -> int:
        return len(self._shelved)

    @property
    def nbytes(self) -> int:
        return sum(one.document.nbytes for one in self._shelved.values())

    def check_room(self) -> None:
        """Raises ApiError where not even a small one has room: before it is read."""
        if len(self) >= self.most or self.nbytes >= self.most_bytes:
            raise self._full()

    def add(self, document: Document, name: str | None) -> Shelved:
        """Raises ApiError where there is no room."""
        if len(self) >= self.most or self.nbytes + document.nbytes > self.most_bytes:
            raise self._full(document.nbytes)
        shelved = Shelved(f"doc-{uuid.uuid4().hex}", name, int(time.time()), document)
        self._shelved[shelved.id] = shelved
        return shelved

    def get(self, name: str) -> Shelved:
        found = self._shelved.get(name)
        if found is None:
            raise ApiError(404, f"there is no document {name!r}", code="document_not_found")
        return found

    def find(self, name: str) -> Document:
        """The document that a request is about. Raises ApiError."""
        if name not in self._shelved:
            raise invalid(f"there is no document {name!r}: upload it first", "cake.document", "document_not_found")
        return self._shelved[name].document

    def remove(self, name: str) -> Shelved:
        found = self.get(name)
        del self._shelved[name]
        return found

    def told(self) -> list[dict[str, Any]]:
        return [one.told() for one in self._shelved.values()]

    def _full(self, more: int = 0) -> ApiError:
        return ApiError(
            507,
            f"there are {len(self)} documents of {self.nbytes:,} bytes (at most {self.most}, {self.most_bytes:,} "
            f"bytes), with no room for another{f' of {more:,} bytes' if more else ''}: delete one first",
            code="documents_full",
        )
