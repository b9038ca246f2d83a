"""What the small JSON files beside a tokenizer say: special tokens by role, added tokens, the BOS rule."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import TokenizerError

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class AddedToken:
    """A token that is found in text before the tokenizer's model sees it.

    `special` tokens are not part of the decoded text. `lstrip` and `rstrip` tokens swallow the white space beside them.
    """

    content: str
    id: int
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    single_word: bool = False

    @property
    def is_text(self) -> bool:
        """A run of white space is ordinary text that happens to have an id; every other added token is a control."""
        return self.content.isspace()


@dataclass(frozen=True)
class TokenFiles:
    """tokenizer_config.json, special_tokens_map.json and added_tokens.json of a folder, each of which may be absent.

    `roles` maps bos_token, eos_token ... to the token's text; `added` is ordered by id; `special_names` are texts that
    are special without an id being given; `add_bos` is None where the files do not say.
    """

    config: dict[str, Any] = field(default_factory=dict)
    roles: dict[str, str] = field(default_factory=dict)
    added: tuple[AddedToken, ...] = ()
    special_names: tuple[str, ...] = ()

    @property
    def add_bos(self) -> bool | None:
        value = self.config.get("add_bos_token")
        return value if isinstance(value, bool) else None

    @property
    def tokenizer_class(self) -> str:
        return str(self.config.get("tokenizer_class") or "").removesuffix("Fast")

    @staticmethod
    def read(folder: Path) -> TokenFiles:
        """Read the files of `folder`. TokenizerError where one of them is not a JSON object of the known shape."""
        config = read_json(folder / "tokenizer_config.json")
        special_map = read_json(folder / "special_tokens_map.json")
        roles = {role: _content(source[role]) for source in (special_map, config) for role in ROLES if source.get(role)}
        names = list(roles.values())
        for source in (special_map, config):
            for key in ("additional_special_tokens", "extra_special_tokens"):
                listed = source.get(key) or []
                names += [_content(token) for token in (listed.values() if isinstance(listed, dict) else listed)]
        special = set(names)
        added: dict[int, AddedToken] = {}
        try:
            for content, index in read_json(folder / "added_tokens.json").items():
                added[int(index)] = AddedToken(str(content), int(index), special=content in special)
            for index, entry in (config.get("added_tokens_decoder") or {}).items():
                flags = {key: bool(entry.get(key)) for key in ("lstrip", "rstrip", "normalized", "single_word")}
                content = str(entry["content"])
                is_special = bool(entry.get("special")) or content in special
                added[int(index)] = AddedToken(content, int(index), is_special, **flags)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise TokenizerError(f"{folder}: the list of added tokens is malformed ({error!r})") from error
        ordered = tuple(added[index] for index in sorted(added))
        return TokenFiles(config, roles, ordered, tuple(dict.fromkeys(names)))


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; {} where there is no file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path}: cannot be read ({error})") from error
    refuse_lfs_pointer(text, path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path}: is not valid JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: holds a {type(value).__name__}, not a JSON object")
    return value


def refuse_lfs_pointer(text: str | bytes, path: Path) -> None:
    """TokenizerError where a repository was cloned without its large files."""
    if text[:23] in ("version https://git-lfs", b"version https://git-lfs"):
        raise TokenizerError(f"{path}: is a Git LFS pointer, not the file itself; fetch it with `git lfs pull`")


def _content(token: Any) -> str:
    """Special tokens are written as a string or as a serialised AddedToken."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token)
