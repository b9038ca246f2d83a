"""The tokenizer inside a GGUF as tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

import re
from typing import Any

from ..errors import TokenizerError
from .gguf_file import GgufFile
from .gguf_pretokenizer import pre_tokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5  # tokenizer.ggml.token_type
_SPACE = "\u2581"  # SentencePiece's visible space
_FILLER = re.compile(r"\[PAD\d+\]")  # rows of the embedding that no token of the original tokenizer uses
# Tokens that end a reply wherever they exist as control tokens, as in llama.cpp's list of end-of-generation tokens.
_END_NAMES = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|im_end|>",
    "<|end|>",
    "<|endoftext|>",
    "<end_of_turn>",
    "</s>",
)


class GgufTokenizer:
    """What the metadata says of the tokenizer: `tokens`, `types`, special ids, and the two JSON documents.

    Raises TokenizerError for a missing or unknown kind (naming it) and for ids outside the vocabulary.
    """

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.kind = str(file.get("tokenizer.ggml.model", ""))
        if self.kind not in ("gpt2", "llama"):
            raise self._error(f"tokenizer.ggml.model = {self.kind!r} is not supported (gpt2 and llama are)")
        self.tokens: list[str] = file.get("tokenizer.ggml.tokens") or []
        if not self.tokens:
            raise self._error("tokenizer.ggml.tokens is missing")
        self.types: list[int] = file.get("tokenizer.ggml.token_type") or [_NORMAL] * len(self.tokens)
        if len(self.types) != len(self.tokens):
            raise self._error(f"{len(self.types)} token types for {len(self.tokens)} tokens")
        self.layout = pre_tokenizer(file) if self.kind == "gpt2" else None
        by_default = self.layout.add_bos if self.layout else True
        self.add_bos = bool(file.get("tokenizer.ggml.add_bos_token", by_default))
        self.add_eos = bool(file.get("tokenizer.ggml.add_eos_token", False))
        self.bos_id = self._special_id("bos", 1 if self.kind == "llama" else None)
        self.eos_id = self._special_id("eos", 2 if self.kind == "llama" else None)
        self.unknown_id = self._special_id("unknown", 0 if self.kind == "llama" else None)
        self.padding_id = self._special_id("padding", None)
        if self.add_bos and self.bos_id is None:
            self.add_bos = False

    def _error(self, text: str) -> TokenizerError:
        return TokenizerError(f"{self.file.path}: {text}")

    def _special_id(self, name: str, default: int | None) -> int | None:
        value = self.file.get(f"tokenizer.ggml.{name}_token_id", default)
        if value is None or value == 0xFFFFFFFF:  # llama.cpp's "none"
            return None
        if not 0 <= value < len(self.tokens):
            raise self._error(f"tokenizer.ggml.{name}_token_id = {value} is not one of {len(self.tokens)} tokens")
        return int(value)

    @property
    def end_ids(self) -> list[int]:
        """All ids that end a reply, the file's own end token first."""
        ends = [self.eos_id, self._special_id("eot", None), self._special_id("eom", None)]
        named = {token: index for index, token in enumerate(self.tokens) if self.types[index] == _CONTROL}
        ends += [named[token] for token in _END_NAMES if token in named]
        return list(dict.fromkeys(index for index in ends if index is not None))

    @property
    def chat_template(self) -> str | None:
        """The default chat template (Jinja), if the file has one."""
        template = self.file.get("tokenizer.chat_template")
        return None if template is None else str(template)

    def tokenizer_json(self) -> dict[str, Any]:
        """The document that the `tokenizers` library loads."""
        body = self._byte_level() if self.kind == "gpt2" else self._sentencepiece()
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": self._added_tokens(),
            "normalizer": body["normalizer"],
            "pre_tokenizer": body["pre_tokenizer"],
            "post_processor": self._post_processor(),
            "decoder": body["decoder"],
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                **body["model"],
            },
        }

    def tokenizer_config(self, max_length: int) -> dict[str, Any]:
        """tokenizer_config.json: which tokens are special, whether BOS and EOS are added, the chat template."""
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": self.add_bos,
            "add_eos_token": self.add_eos,
            "clean_up_tokenization_spaces": False,
            "model_max_length": max_length,
            "added_tokens_decoder": {
                str(entry["id"]): {key: entry[key] for key in entry if key != "id"} for entry in self._added_tokens()
            },
        }
        ids = {"bos": self.bos_id, "eos": self.eos_id, "unk": self.unknown_id, "pad": self.padding_id}
        config |= {f"{name}_token": self.tokens[index] for name, index in ids.items() if index is not None}
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        return config

    def _vocabulary(self) -> dict[str, int]:
        vocabulary: dict[str, int] = {}
        for index, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True)):
            if kind == _UNUSED and _FILLER.fullmatch(token):
                continue
            if token in vocabulary:
                raise self._error(f"token {token!r} appears twice, as {vocabulary[token]} and {index}")
            vocabulary[token] = index
        return vocabulary

    def _added_tokens(self) -> list[dict[str, Any]]:
        return [
            {
                "id": index,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kind != _USER_DEFINED,
            }
            for index, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ]

    def _byte_level(self) -> dict[str, Any]:
        assert self.layout is not None
        merges = self.file.get("tokenizer.ggml.merges")
        if not merges:
            raise self._error("tokenizer.ggml.merges is missing")
        pairs = [merge.split(" ", 1) for merge in merges]
        vocabulary = self._vocabulary()
        for pair in pairs:
            if (
                len(pair) != 2
                or pair[0] not in vocabulary
                or pair[1] not in vocabulary
                or "".join(pair) not in vocabulary
            ):
                raise self._error(f"merge {' '.join(pair)!r} does not fit the vocabulary")
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
        return {
            "normalizer": self.layout.normalizer,
            "pre_tokenizer": self.layout.pre_tokenizer,
            "decoder": byte_level,
            "model": {"vocab": vocabulary, "merges": pairs, "ignore_merges": self.layout.ignore_merges},
        }

    def _sentencepiece(self) -> dict[str, Any]:
        scores = self.file.get("tokenizer.ggml.scores")
        if not scores or len(scores) != len(self.tokens):
            raise self._error("tokenizer.ggml.scores is missing or of another length than the tokens")
        vocabulary = self._vocabulary()
        prefix = bool(self.file.get("tokenizer.ggml.add_space_prefix", True))
        replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
        decoders: list[dict[str, Any]] = [
            {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]
        if prefix:
            decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        return {
            "normalizer": {
                "type": "Sequence",
                "normalizers": [*([{"type": "Prepend", "prepend": _SPACE}] if prefix else []), replace],
            },
            "pre_tokenizer": None,
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": {
                "vocab": vocabulary,
                "merges": self._merges_of_scores(vocabulary, scores),
                "unk_token": None if self.unknown_id is None else self.tokens[self.unknown_id],
                "fuse_unk": True,
                "byte_fallback": "<0x00>" in vocabulary,
            },
        }

    def _merges_of_scores(self, vocabulary: dict[str, int], scores: list[float]) -> list[list[str]]:
        """Merges in the order in which SentencePiece would do them: by the score of what they make, best first.

        Ties go by id, which gives the merges of Llama 2's published tokenizer.json.
        """
        mergeable = {token for token, index in vocabulary.items() if self.types[index] in (_NORMAL, _USER_DEFINED)}
        merges: list[tuple[float, str, str]] = []
        for token in mergeable:
            splits = [(token[:at], token[at:]) for at in range(1, len(token))]
            score = scores[vocabulary[token]]
            merges += [(score, left, right) for left, right in splits if left in mergeable and right in mergeable]
        merges.sort(key=lambda m: (-m[0], vocabulary[m[1] + m[2]], vocabulary[m[1]], vocabulary[m[2]]))
        return [[left, right] for _, left, right in merges]

    def _post_processor(self) -> dict[str, Any] | None:
        first = self.bos_id if self.add_bos else None
        last = self.eos_id if self.add_eos else None
        if first is None and last is None:
            return None

        def template(*sequences: str) -> list[dict[str, Any]]:
            items: list[dict[str, Any]] = []
            for type_id, name in enumerate(sequences):
                items += [{"SpecialToken": {"id": self.tokens[first], "type_id": type_id}}] if first is not None else []
                items.append({"Sequence": {"id": name, "type_id": type_id}})
                items += [{"SpecialToken": {"id": self.tokens[last], "type_id": type_id}}] if last is not None else []
            return items

        used = {self.tokens[index]: index for index in (first, last) if index is not None}
        return {
            "type": "TemplateProcessing",
            "single": template("A"),
            "pair": template("A", "B"),
            "special_tokens": {
                token: {"id": token, "ids": [index], "tokens": [token]} for token, index in used.items()
            },
        }
