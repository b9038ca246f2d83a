"""tokenizer.model through the `sentencepiece` library."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from sentencepiece import SentencePieceProcessor

from ..errors import TokenizerError
from .token_bytes import SPACE, TokenBytes
from .token_files import AddedToken, TokenFiles, refuse_lfs_pointer
from .token_source import Prefix

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # SentencePiece.Type in sentencepiece_model.proto
# Serialised messages that are joined are merged: this sets normalizer_spec.add_dummy_prefix (fields 3 and 3) to false.
_NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"
_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")


class SentencePieceSource:
    """A SentencePiece model with the tokens that its tokenizer.json would add: same ids as that file gives.

    Every chunk of text between control tokens gets the model's dummy prefix, as in the tokenizer.json files of Llama 1
    and 2; where the model has control pieces of its own for turns (Mistral) or tokenizer_config.json belongs to Mistral
    only the start of a text gets it, as in theirs. `legacy: true` in tokenizer_config.json forces the former.
    """

    def __init__(self, model: bytes, files: TokenFiles, *, prefix_at_start_only: bool = False) -> None:
        self._processor = SentencePieceProcessor(model_proto=model + _NO_DUMMY_PREFIX)
        types = list(_piece_types(model))
        pieces = self._processor.get_piece_size()
        added: dict[str, AddedToken] = {}
        for index in (index for index, kind in enumerate(types) if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)):
            content = self._processor.id_to_piece(index)
            added[content] = AddedToken(content, index, special=types[index] != _USER_DEFINED)
        for token in files.added:
            added[token.content] = token
        for content in files.special_names:
            index = self._processor.piece_to_id(content)
            if content and content not in added and self._processor.id_to_piece(index) == content:
                added[content] = AddedToken(content, index, special=True)
        self.added = tuple(sorted(added.values(), key=lambda token: token.id))
        self._names = {token.id: token.content for token in self.added}
        self._ids = {token.content: token.id for token in self.added}
        self.size = max(pieces, 1 + max(self._names, default=-1))
        with_prefix = SentencePieceProcessor(model_proto=model).encode("a", out_type=str)
        dummy_prefix = bool(with_prefix) and with_prefix[0].startswith(SPACE)
        turns = sum(kind == _CONTROL for kind in types) > 3
        first = (prefix_at_start_only or turns) and files.config.get("legacy") is not True
        self.prefix = Prefix("first", unless_space=True) if first else Prefix("always")
        if not dummy_prefix:
            self.prefix = Prefix()
        self.leading = self.token(self._processor.bos_id())  # -1 where there is none
        self.end = self.token(self._processor.eos_id())
        self.bytes_of: TokenBytes | None = TokenBytes(False, ((SPACE, " "),), True, dummy_prefix)

    @staticmethod
    def read(path: Path, files: TokenFiles, *, prefix_at_start_only: bool = False) -> SentencePieceSource:
        try:
            model = path.read_bytes()
        except OSError as error:
            raise TokenizerError(f"{path}: cannot be read ({error})") from error
        refuse_lfs_pointer(model, path)
        if not model:
            raise TokenizerError(f"{path}: is empty; download it again")
        if _TIKTOKEN_LINE.match(model):
            raise TokenizerError(
                f"{path}: is a tiktoken vocabulary (as Llama 3 ships), not a SentencePiece model; "
                "put the model's tokenizer.json beside it"
            )
        try:
            return SentencePieceSource(model, files, prefix_at_start_only=prefix_at_start_only)
        except (RuntimeError, IndexError, ValueError) as error:
            raise TokenizerError(f"{path}: is not a SentencePiece model ({error}); download it again") from error

    def encode(self, text: str) -> list[int] | None:
        return None  # sentencepiece knows nothing of added tokens

    def encode_bare(self, text: str) -> list[int]:
        ids: list[int] = self._processor.encode(text)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._processor.decode(list(ids))
        return text

    def token(self, index: int) -> str | None:
        if index in self._names:
            return self._names[index]
        if not 0 <= index < self._processor.get_piece_size():
            return None
        piece: str = self._processor.id_to_piece(index)
        return piece

    def id(self, token: str) -> int | None:
        if token in self._ids:
            return self._ids[token]
        index: int = self._processor.piece_to_id(token)
        return index if self._processor.id_to_piece(index) == token else None


def _piece_types(model: bytes) -> Iterator[int]:
    """Type of each piece: the library tells control and unknown pieces, but not user-defined ones.

    A model is a protobuf message whose field 1 is a piece, which in turn has its type (default 1, normal) in field 3.
    """
    for number, value in _fields(model):
        if number == 1 and isinstance(value, bytes):
            yield next((kind for key, kind in _fields(value) if key == 3 and isinstance(kind, int)), 1)


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(field number, value) of a protobuf message; values of fixed width are given as bytes."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(message):
        key = varint()
        kind = key & 7
        if kind == 0:
            yield key >> 3, varint()
            continue
        if kind not in (1, 2, 5):
            raise ValueError(f"wire type {kind} at byte {at}")
        size = varint() if kind == 2 else {1: 8, 5: 4}[kind]
        yield key >> 3, message[at : at + size]
        at += size
