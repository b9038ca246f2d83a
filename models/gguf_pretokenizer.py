"""How a byte-level BPE splits text before merging, by the name that a GGUF gives (`tokenizer.ggml.pre`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import TokenizerError
from .gguf_file import GgufFile

# The patterns are those of the models' own tokenizer.json files.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class PreTokenizer:
    """`pre_tokenizer` and `normalizer` entries of tokenizer.json, and what goes with them by default."""

    pre_tokenizer: dict[str, Any]
    normalizer: dict[str, Any] | None = None
    ignore_merges: bool = False  # a whole word that is a token is taken as it is
    add_bos: bool = False  # where the file does not say


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _byte_level(False)]}


_GPT2 = PreTokenizer(_byte_level(True))
_SMOLLM = PreTokenizer(
    {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, _byte_level(True)]}
)
_LLAMA_BPE = PreTokenizer(_split(_LLAMA3), ignore_merges=True, add_bos=True)
_QWEN = PreTokenizer(_split(_QWEN2), normalizer={"type": "NFC"})
_KINDS = {
    "gpt-2": _GPT2,
    "smollm": _SMOLLM,
    "llama-bpe": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "qwen2": _QWEN,
    "deepseek-r1-qwen": PreTokenizer(_split(_QWEN2), add_bos=True),
    "tekken": PreTokenizer(_split(_TEKKEN), ignore_merges=True, add_bos=True),
}


def pre_tokenizer(file: GgufFile) -> PreTokenizer:
    """The splitting rule that `tokenizer.ggml.pre` names.

    Raises TokenizerError, naming it, for one that is not known: a guess would give other ids without any error.
    """
    name = file.get("tokenizer.ggml.pre")
    if name is None:
        raise TokenizerError(
            f"{file.path}: tokenizer.ggml.pre is missing (an old GGUF): its text splitting is unknown; use a newer file"
        )
    if name not in _KINDS:
        raise TokenizerError(
            f"{file.path}: tokenizer.ggml.pre = {name!r} is not supported ({', '.join(sorted(_KINDS))} are)"
        )
    return _KINDS[name]
