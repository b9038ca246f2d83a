"""tokenizer.json (or vocab.json and merges.txt) through the `tokenizers` library."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken as LibraryToken
from tokenizers import Regex, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library
from tokenizers.models import BPE

from ..errors import TokenizerError
from .token_bytes import SPACE, TokenBytes
from .token_files import AddedToken, TokenFiles, refuse_lfs_pointer
from .token_source import Prefix

_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class JsonSource:
    """A tokenizer.json, with the added tokens that only the files beside it know."""

    def __init__(self, library: Library, files: TokenFiles) -> None:
        self._library = library
        library.no_truncation()
        library.no_padding()
        self._add_missing(files)
        special = set(files.special_names)
        self.added = tuple(
            AddedToken(
                token.content,
                index,
                token.special or token.content in special,
                token.lstrip,
                token.rstrip,
                token.normalized,
                token.single_word,
            )
            for index, token in sorted(library.get_added_tokens_decoder().items())
        )
        self.size = 1 + max(library.get_vocab(with_added_tokens=True).values(), default=-1)
        self.prefix = _prefix(_state(library.normalizer), _state(library.pre_tokenizer))
        self.leading = _leading_token(_state(library.post_processor))
        self.end: str | None = None
        self.bytes_of = TokenBytes.of_decoder(_state(library.decoder))

    @staticmethod
    def read(path: Path, files: TokenFiles) -> JsonSource:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TokenizerError(f"{path}: cannot be read ({error})") from error
        refuse_lfs_pointer(text, path)
        try:
            return JsonSource(Library.from_str(text), files)
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(
                f"{path}: the tokenizers library cannot read it ({error}); download it again, or update tokenizers"
            ) from error

    @staticmethod
    def read_vocabulary(folder: Path, files: TokenFiles) -> JsonSource:
        """vocab.json and merges.txt of a byte-level BPE whose splitting into words is known by its class."""
        family = files.tokenizer_class
        if family not in ("Qwen2Tokenizer", "GPT2Tokenizer"):
            raise TokenizerError(
                f"{folder}: vocab.json and merges.txt do not say how text is split into words, and tokenizer_class "
                f"{family!r} does not either (Qwen2Tokenizer and GPT2Tokenizer do); add the model's tokenizer.json"
            )
        try:
            library = Library(BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
        except Exception as error:
            raise TokenizerError(f"{folder}: vocab.json or merges.txt cannot be read ({error})") from error
        if family == "Qwen2Tokenizer":
            library.normalizer = normalizers.NFC()
            words = pre_tokenizers.Split(Regex(_QWEN2_WORDS), behavior="isolated", invert=False)
            byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            library.pre_tokenizer = pre_tokenizers.Sequence([words, byte_level])
        else:
            library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = decoders.ByteLevel()
        return JsonSource(library, files)

    def _add_missing(self, files: TokenFiles) -> None:
        """Added tokens of tokenizer_config.json that the file lacks; only where the id comes out as they say."""
        known = {token.content for token in self._library.get_added_tokens_decoder().values()}
        missing = [token for token in files.added if token.content not in known]
        for token in missing:
            flags = {"lstrip": token.lstrip, "rstrip": token.rstrip, "normalized": token.normalized}
            entry = LibraryToken(token.content, special=token.special, single_word=token.single_word, **flags)
            free = self._library.get_vocab_size(with_added_tokens=True)
            if (self._library.token_to_id(token.content), token.id) in ((token.id, token.id), (None, free)):
                self._library.add_tokens([entry])
        known |= {token.content for token in missing}
        for content in files.special_names:
            if content and content not in known and self._library.token_to_id(content) is not None:
                self._library.add_special_tokens([LibraryToken(content, special=True, normalized=False)])

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._library.encode(text, add_special_tokens=False).ids
        return ids

    def encode_bare(self, text: str) -> list[int]:
        ids: list[int] = self._bare.encode(text, add_special_tokens=False).ids
        return ids

    @cached_property
    def _bare(self) -> Library:
        """The same tokenizer with its control tokens made unmatchable and its prefix taken away.

        Tokens of white space stay. Ids of the remaining added tokens follow from their order, so that one which is not
        in the model's vocabulary is renamed to what no text contains, not left out.
        """
        parts = {"normalizer": _state(self._library.normalizer), "pre_tokenizer": _state(self._library.pre_tokenizer)}
        document = {name: _without_prefix(part) for name, part in parts.items()}
        document |= {"post_processor": None, "decoder": None}
        model = {"type": "BPE", "vocab": {}, "merges": []}
        bare = Library.from_str(json.dumps({"version": "1.0", "added_tokens": [], **document, "model": model}))
        bare.model = self._library.model
        for token in self.added:
            content = token.content if token.is_text else f"\U0010ffff{token.id}\U0010ffff"
            if token.is_text or bare.token_to_id(token.content) is None:
                bare.add_tokens([LibraryToken(content, normalized=token.normalized)])
        return bare

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._library.decode(list(ids), skip_special_tokens=False)
        return text

    def token(self, index: int) -> str | None:
        token: str | None = self._library.id_to_token(index)
        return token

    def id(self, token: str) -> int | None:
        index: int | None = self._library.token_to_id(token)
        return index


def _state(component: Any) -> dict[str, Any] | None:
    """A part of the library's pipeline as tokenizer.json writes it."""
    state: dict[str, Any] | None = None if component is None else json.loads(component.__getstate__())
    return state


def _steps(component: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The parts of a normalizer or pre-tokenizer, which may be a sequence of them."""
    if component is None:
        return []
    if component["type"] == "Sequence":
        nested = component.get("normalizers") or component.get("pretokenizers") or []
        return [step for part in nested for step in _steps(part)]
    return [component]


def _prefix(normalizer: dict[str, Any] | None, pre_tokenizer: dict[str, Any] | None) -> Prefix:
    for step in [*_steps(normalizer), *_steps(pre_tokenizer)]:
        if step["type"] == "Prepend":
            return Prefix("always", step["prepend"])
        if step["type"] == "Metaspace":
            scheme = step.get("prepend_scheme") or ("always" if step.get("add_prefix_space", True) else "never")
            return Prefix(scheme, step.get("replacement", SPACE), unless_space=True)
        if step["type"] == "ByteLevel" and step.get("add_prefix_space"):
            return Prefix("always", " ", unless_space=True)
    return Prefix()


def _without_prefix(component: dict[str, Any] | None) -> dict[str, Any] | None:
    if component is None or component["type"] == "Prepend":
        return None
    changed = dict(component)
    if changed["type"] == "Sequence":
        for key in ("normalizers", "pretokenizers"):
            if key in changed:
                parts = [_without_prefix(part) for part in changed[key]]
                changed[key] = [part for part in parts if part is not None]
    elif changed["type"] == "Metaspace":
        changed |= {"prepend_scheme": "never"}
        changed.pop("add_prefix_space", None)
    elif changed["type"] == "ByteLevel":
        changed |= {"add_prefix_space": False}
    return changed


def _leading_token(post_processor: dict[str, Any] | None) -> str | None:
    """The token that the post-processor puts before a single text."""
    if post_processor is None:
        return None
    if post_processor["type"] == "Sequence":
        found = [_leading_token(part) for part in post_processor["processors"]]
        return next((token for token in found if token is not None), None)
    if post_processor["type"] != "TemplateProcessing":
        return None
    first: dict[str, Any] = next(iter(post_processor["single"]), {})
    name: str | None = first.get("SpecialToken", {}).get("id")
    return name
