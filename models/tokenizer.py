"""Text to token ids and back."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

from ..errors import PromptError, TokenizerError
from .detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer, decode_bytes
from .json_source import JsonSource
from .token_files import AddedToken, TokenFiles, read_json
from .token_source import TokenSource

Span = tuple[int, int]  # start and end of a part of a text, in characters
# Tokens that end a turn whatever tokenizer_config.json calls eos_token.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|end_of_turn|>", "<end_of_turn>")


class Tokenizer:
    """The tokenizer of a model folder.

    `vocab_size` is the highest id + 1: rows of the model from there on are padding, as are `unused_ids` below it; they
    decode to ''. `special_ids` are not part of decoded text. `control_tokens` are all added tokens except white space:
    what the content of a chat must never become. `eos_ids` end a reply, the tokenizer's own eos first. `special_tokens`
    maps bos_token, eos_token ... to their text, as chat templates know them.
    """

    def __init__(self, source: TokenSource, files: TokenFiles | None = None) -> None:
        files = files or TokenFiles()
        self._source = source
        self._added = {token.content: token for token in source.added}
        self.vocab_size = source.size
        self.control_tokens: tuple[AddedToken, ...] = tuple(t for t in source.added if t.content and not t.is_text)
        self.special_ids = frozenset(token.id for token in source.added if token.special)
        self._control_ids = frozenset(token.id for token in self.control_tokens)
        longest_first = sorted((token.content for token in self.control_tokens), key=lambda text: (-len(text), text))
        self.control_pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self.special_tokens = dict(files.roles)
        for role, content in (("bos_token", source.leading), ("eos_token", source.end)):
            if content is not None:
                self.special_tokens.setdefault(role, content)
        self.bos_id = self._role_id("bos_token")
        self._unknown_id = self._role_id("unk_token")
        add_bos = files.add_bos if files.add_bos is not None else source.leading is not None
        self.adds_bos = add_bos and self.bos_id is not None
        ends = [self._role_id("eos_token"), *(self._added[t].id for t in _END_OF_TURN if self._is_special(t))]
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys(index for index in ends if index is not None))
        self._bytes: dict[int, bytes] = {}

    @staticmethod
    def load(folder: str | Path) -> Tokenizer:
        """Load tokenizer.json, else tokenizer.model (SentencePiece), else vocab.json with merges.txt, from `folder`.

        TokenizerError, naming the file, where there is none of them or it cannot be read.
        """
        folder = Path(folder)
        files = TokenFiles.read(folder)
        if (folder / "tokenizer.json").is_file():
            return Tokenizer(JsonSource.read(folder / "tokenizer.json", files), files)
        if (folder / "tokenizer.model").is_file():
            from .sentencepiece_source import SentencePieceSource  # few folders need the library

            mistral = read_json(folder / "config.json").get("model_type") == "mistral"
            path = folder / "tokenizer.model"
            return Tokenizer(SentencePieceSource.read(path, files, prefix_at_start_only=mistral), files)
        if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
            return Tokenizer(JsonSource.read_vocabulary(folder, files), files)
        others = sorted(path.name for pattern in ("*.tiktoken", "tekken.json") for path in folder.glob(pattern))
        found = f" ({', '.join(others)} is of a kind that is not supported)" if others else ""
        raise TokenizerError(
            f"{folder}: no tokenizer.json or tokenizer.model{found}; add the model's tokenizer.json to the folder"
        )

    def encode(self, text: str, *, add_bos: bool = True, allow_special: bool = True) -> list[int]:
        """Ids of `text`.

        add_bos: exactly one BOS in front, if this tokenizer adds one, also where the text begins with it.
        allow_special: control tokens written out in the text become their ids; else they are encoded as plain text.
        PromptError for text that is not valid Unicode.
        """
        literals = () if allow_special else tuple(match.span() for match in self.control_pattern.finditer(text))
        ids = self.encode_with_literals(text, literals)
        return self.with_one_bos(ids) if add_bos else ids

    def with_one_bos(self, ids: list[int]) -> list[int]:
        """`ids` with exactly one BOS in front, or as they are where this tokenizer adds none."""
        if not self.adds_bos or self.bos_id is None:
            return ids
        start = 0
        while start < len(ids) and ids[start] == self.bos_id:
            start += 1
        return [self.bos_id, *ids[start:]]

    def encode_with_literals(self, text: str, literals: Sequence[Span], *, continues: bool = False) -> list[int]:
        """Ids of `text`, in which no control token begins or ends inside one of the (ordered) spans `literals`.

        continues: the text goes on from other text, so no prefix space is put in front. Adds no BOS.
        """
        if not any(_overlaps(match, literals) for match in self.control_pattern.finditer(text) if literals):
            literals = ()
        try:
            if not literals and not (continues and self._source.prefix.scheme != "never"):
                ids = self._source.encode(text)
                if ids is not None:
                    return ids
            return self._encode_in_parts(text, literals, continues)
        except (TypeError, UnicodeEncodeError, RuntimeError) as error:
            at = next((at for at, character in enumerate(text) if "\ud800" <= character <= "\udfff"), None)
            if at is None:
                raise
            offset = len(text[:at].encode("utf-8"))
            raise PromptError(
                f"the text is not valid Unicode (the lone surrogate U+{ord(text[at]):04X} at byte {offset})"
            ) from error

    def _encode_in_parts(self, text: str, literals: Sequence[Span], continues: bool) -> list[int]:
        """Control tokens by their id, and what is between them on its own, as tokenizer libraries do it."""
        ids: list[int] = []
        start, before = 0, None
        for match in self._matches(text, literals):
            token = self._added[match[0]]
            ids += self._encode_chunk(text[start : match.start()], before, token, continues and start == 0)
            ids.append(token.id)
            start, before = match.end(), token
        return ids + self._encode_chunk(text[start:], before, None, continues and start == 0)

    def _matches(self, text: str, literals: Sequence[Span]) -> Iterable[re.Match[str]]:
        """Control tokens in `text`, leftmost and longest first, none of which overlaps a literal."""
        at = 0
        while (match := self.control_pattern.search(text, at)) is not None:
            if _overlaps(match, literals):
                at = match.start() + 1
            else:
                yield match
                at = match.end()

    def _encode_chunk(
        self, chunk: str, before: AddedToken | None, after: AddedToken | None, continues: bool
    ) -> list[int]:
        if before is not None and before.rstrip:
            chunk = chunk.lstrip()
        if after is not None and after.lstrip:
            chunk = chunk.rstrip()
        if not chunk:
            return []
        prefix = "" if continues else self._source.prefix.before(chunk, at_start=before is None)
        ids = self._source.encode_bare(prefix + chunk)
        if self._control_ids.isdisjoint(ids) or {*ids} & self._control_ids == {self._unknown_id}:
            return ids
        # The model itself knows some control token as a piece of text: nothing is merged over its first character.
        parts = [prefix]
        end = 0
        for match in self.control_pattern.finditer(chunk):
            parts[-1] += chunk[end : match.start() + 1]
            parts.append("")
            end = match.start() + 1
        parts[-1] += chunk[end:]
        return [index for part in parts for index in self._source.encode_bare(part)]

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD, and ids that the tokenizer does not have ''.

        Valid characters beside invalid bytes are kept, as SentencePiece does it (the tokenizers library replaces the
        whole run of byte pieces). Spaces before punctuation are never cleaned up.
        """
        hidden = self.special_ids if skip_special else frozenset()
        shown = [index for index in ids if index not in hidden]
        if self._source.bytes_of is None:
            return self._source.decode([index for index in shown if self.token(index)])
        data = b"".join(map(self.token_bytes, shown))
        if self._source.bytes_of.strip_left:
            data = data.removeprefix(b" ")
        return decode_bytes(data, each_byte=self._source.bytes_of.byte_fallback)

    def detokenizer(self, prompt_ids: Sequence[int] = ()) -> Detokenizer:
        """Decodes what follows `prompt_ids` one token at a time, special tokens left out."""
        bytes_of = self._source.bytes_of
        if bytes_of is None:
            return WindowDetokenizer(self.decode, prompt_ids)
        return ByteDetokenizer(
            lambda index: b"" if index in self.special_ids else self.token_bytes(index),
            prompt_ids,
            strip_left=bytes_of.strip_left,
            each_byte=bytes_of.byte_fallback,
        )

    def token_bytes(self, index: int) -> bytes:
        """The bytes a token adds to a text; b'' for an id that the tokenizer does not have."""
        data = self._bytes.get(index)
        if data is None:
            bytes_of, token = self._source.bytes_of, self.token(index)
            data = self._bytes[index] = token.encode("utf-8") if bytes_of is None else bytes_of(token)
        return data

    def token(self, index: int) -> str:
        """The token itself, such as '▁Hello', 'Ġthe' or '</s>'; '' for an id that the tokenizer does not have."""
        return (self._source.token(index) if 0 <= index < self.vocab_size else None) or ""

    def token_id(self, token: str) -> int | None:
        """The id of exactly this token, None if there is none."""
        return self._source.id(token)

    @cached_property
    def unused_ids(self) -> tuple[int, ...]:
        """Ids below `vocab_size` that no token has: like those from `vocab_size` on, they are never to be sampled."""
        return tuple(index for index in range(self.vocab_size) if not self.token(index))

    @property
    def valid_ids(self) -> int:
        """How many ids have a token."""
        return self.vocab_size - len(self.unused_ids)

    def check_vocabulary(self, vocab_size_of_model: int) -> None:
        """TokenizerError, naming the ids, if some token has no row in the model's embedding. Fewer tokens are fine."""
        if self.vocab_size <= vocab_size_of_model:
            return
        last = self.vocab_size - 1
        raise TokenizerError(
            f"the tokenizer has token ids up to {last} ({self.token(last)!r}) but the model has {vocab_size_of_model} "
            f"embedding rows, so id {vocab_size_of_model} and above cannot be used: these tokenizer files belong to "
            "another model"
        )

    def _role_id(self, role: str) -> int | None:
        content = self.special_tokens.get(role)
        return None if content is None else self._source.id(content)

    def _is_special(self, content: str) -> bool:
        return content in self._added and self._added[content].special


def _overlaps(match: re.Match[str], spans: Sequence[Span]) -> bool:
    """Whether one of the (ordered) spans shares a character with the match, or is empty and strictly inside it."""
    following = bisect_right(spans, match.start(), key=lambda span: span[1])  # the first that ends after its beginning
    return following < len(spans) and spans[following][0] < match.end()
