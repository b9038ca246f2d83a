"""Keys of a JSON config, read by type: a value of another type is an error that names the key, never a guess."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import UnsupportedModel
from ..ranges import MOST, MOST_TOKENS, POSITIVE, Range, shown

ABOVE_0, FROM_0 = Range(0, MOST, float, above=True), Range(0, MOST, float)
TOKEN_ID = Range(-(2**31), MOST_TOKENS)  # a negative one is an old spelling of "none"


class ConfigKeys:
    """A JSON object whose values are read by type. A key that is null counts as absent.

    Every reader raises `UnsupportedModel`, naming the key and its value, if the value has another type (a bool is not
    an integer, a string is never parsed, 32.0 is not 32) or is out of range, or if it is absent and has no default.
    """

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        self.values = values
        self.where = where

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def integer(self, key: str, default: int | None = None, numbers: Range = POSITIVE) -> int:
        value = self._value(key, default)
        if not numbers.has(value):
            raise self.refused(key, numbers.wanted())
        return value  # type: ignore[no-any-return]

    def number(self, key: str, default: float | None = None, *, allow_zero: bool = False) -> float:
        """A finite number above zero, or at least zero with `allow_zero`."""
        value, numbers = self._value(key, default), FROM_0 if allow_zero else ABOVE_0
        if not numbers.has(value):
            raise self.refused(key, numbers.wanted())
        return float(value)

    def numbers(self, key: str) -> tuple[float, ...]:
        """A non-empty list of finite numbers above zero."""
        value = self._value(key, None)
        if not isinstance(value, list) or not value or not all(ABOVE_0.has(item) for item in value):
            raise self.refused(key, f"a list, and each item of it {ABOVE_0.wanted()}")
        return tuple(float(item) for item in value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.refused(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.refused(key, "a string")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        value = self._value(key, None)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.refused(key, "a list of strings")
        return tuple(value)

    def mapping(self, key: str) -> Mapping[str, Any]:
        """A JSON object; absent reads as an empty one."""
        value = self._value(key, {})
        if not isinstance(value, dict):
            raise self.refused(key, "an object")
        return value

    def token_id(self, key: str, default: int | None = None) -> int | None:
        """One token id; absent without a default, or negative (an old spelling of "none"), reads as None."""
        if key not in self and default is None:
            return None
        value = self.integer(key, default, TOKEN_ID)
        return value if value >= 0 else None

    def token_ids(self, key: str, default: tuple[int, ...] = ()) -> tuple[int, ...]:
        """One token id or a list of them, without repeats, in order. A key that says null has none."""
        if key not in self.values:
            return default
        value = self.values[key]
        items = value if isinstance(value, list) else [] if value is None else [value]
        if not all(TOKEN_ID.has(item) for item in items):
            raise self.refused(key, f"a token id or a list of token ids, {TOKEN_ID.wanted()}")
        return tuple(dict.fromkeys(item for item in items if item >= 0))

    def refused(self, key: str, wanted: str) -> UnsupportedModel:
        """The error for a key whose value is not `wanted`."""
        if key not in self:
            return UnsupportedModel(f"{self.where}: {key} is missing; it must be {wanted}")
        return UnsupportedModel(f"{self.where}: {key} is {shown(self.values[key])}; it must be {wanted}")

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        return default if value is None else value


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises `UnsupportedModel` with the path if it holds anything else."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UnsupportedModel(f"{path} cannot be read: {error.strerror}") from error
    if data.startswith(b"version https://git-lfs"):
        raise UnsupportedModel(f"{path} is a git-lfs pointer, not the file itself; run `git lfs pull` in its folder")
    try:
        value = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or a number without end
        raise UnsupportedModel(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UnsupportedModel(f"{path} holds a JSON {type(value).__name__}; it must hold an object")
    return value
