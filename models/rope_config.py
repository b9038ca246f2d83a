"""Which rotary position embedding a model uses, read from either spelling of its config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import OptionError, UnsupportedModel
from ..ranges import MOST_TOKENS, Range, shown
from .config_keys import ConfigKeys

_SCALED_BY_FACTOR = ("linear", "dynamic", "yarn")  # a factor says it all
_COMMON_KEYS = {"rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "finetuned"}
_KIND_KEYS: dict[str, set[str]] = {
    "default": set(),
    "linear": set(),
    "dynamic": set(),
    "llama3": {"low_freq_factor", "high_freq_factor"},
    "yarn": {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    "longrope": {"attention_factor", "short_factor", "long_factor"},
}
ROPE_KINDS = tuple(_KIND_KEYS)
FACTOR = Range(1, 1_000_000, float)  # beyond it is a context that no memory holds


@dataclass(frozen=True)
class RopeConfig:
    """The rotary embedding of one model; `rope.inverse_frequencies` says what the numbers mean.

    `max_position_embeddings` is the config's own figure (the border of the dynamic kind), which may be less than the
    context of the model. Fields that a kind does not read keep their defaults.
    """

    head_dim: int
    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    max_position_embeddings: int = 2048
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in _KIND_KEYS:
            raise UnsupportedModel(f"rope kind {self.kind!r} is not supported; known kinds: {', '.join(ROPE_KINDS)}")
        if self.head_dim % 2 or self.head_dim < 2:
            raise UnsupportedModel(f"head_dim is {self.head_dim}; rotary embeddings need an even number")
        if self.kind == "dynamic" and self.head_dim < 4:
            raise UnsupportedModel(f"head_dim is {self.head_dim}; the dynamic rope kind needs at least 4")
        if not FACTOR.has(self.factor):
            raise UnsupportedModel(f"rope factor is {self.factor:g}; it must be {FACTOR.wanted()}")
        if self.kind in ("llama3", "yarn", "longrope") and self.original_max_position_embeddings is None:
            raise UnsupportedModel(f"rope kind {self.kind} needs original_max_position_embeddings")
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise UnsupportedModel(
                f"high_freq_factor is {self.high_freq_factor:g}; it must be above low_freq_factor "
                f"{self.low_freq_factor:g}"
            )
        if self.kind == "longrope":
            for key, factors in (("short_factor", self.short_factor), ("long_factor", self.long_factor)):
                if len(factors) != self.head_dim // 2:
                    raise UnsupportedModel(f"{key} has {len(factors)} numbers; it must have {self.head_dim // 2}")

    @property
    def context(self) -> int:
        """Tokens the model can read: the config's figure, or what a scaling that starts from it reaches."""
        if self.kind == "dynamic":
            return self.stretched(self.max_position_embeddings)
        if self.kind == "yarn" and self.original_max_position_embeddings is not None:
            return max(self.max_position_embeddings, self.stretched(self.original_max_position_embeddings))
        return self.max_position_embeddings

    def stretched(self, length: int) -> int:
        """A length times the factor, as far as positions can be told apart."""
        return min(int(length * self.factor), MOST_TOKENS)


def read_rope(keys: ConfigKeys, head_dim: int, max_position_embeddings: int) -> RopeConfig:
    """The rope of a config: `rope_theta` beside `rope_scaling` (old) or all inside `rope_parameters` (new).

    Raises `UnsupportedModel` for an unknown kind, a missing key that the kind needs, a key that the kind does not
    know, and a rotary embedding over a part of the head.
    """
    inner, where = _rope_dict(keys)
    rope = ConfigKeys(inner, where)
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "su":  # the first spelling of longrope
        kind = "longrope"
    if kind not in _KIND_KEYS:
        spelled = "rope_type" if "rope_type" in rope else "type"
        raise rope.refused(spelled, f"one of {', '.join(ROPE_KINDS)}")
    for source in (keys, rope):
        if source.number("partial_rotary_factor", 1.0) != 1.0:
            raise source.refused("partial_rotary_factor", "1 (partial rotary embeddings are not supported)")
    unknown = [key for key in inner if key not in _COMMON_KEYS | _KIND_KEYS[kind] | {"partial_rotary_factor"}]
    for key in unknown:
        if key in rope:
            raise rope.refused(key, f"absent (rope kind {kind} does not use it)")

    original: int | None = None
    for source in (rope, keys):  # a figure outside wins, as in transformers (Phi-3 writes it there)
        if "original_max_position_embeddings" in source:
            original = source.integer("original_max_position_embeddings")
    fields: dict[str, Any] = {}
    if kind in ("llama3", "yarn", "longrope"):
        if original is None:
            raise rope.refused("original_max_position_embeddings", f"an integer for rope kind {kind}")
        fields["original_max_position_embeddings"] = original
    if kind != "default":
        stretched = None if original is None else max(1.0, max_position_embeddings / original)
        derived = stretched if kind == "longrope" or (kind == "yarn" and "factor" in inner) else None
        fields["factor"] = rope.number("factor", derived)
        if not FACTOR.has(fields["factor"]):
            raise rope.refused("factor", FACTOR.wanted())
    if kind == "llama3":
        fields |= {key: rope.number(key) for key in ("low_freq_factor", "high_freq_factor")}
    if kind == "yarn":
        fields |= {"beta_fast": rope.number("beta_fast", 32.0), "beta_slow": rope.number("beta_slow", 1.0)}
        fields |= {key: rope.number(key, allow_zero=True) for key in ("mscale", "mscale_all_dim") if key in rope}
        fields["truncate"] = rope.boolean("truncate", True)
    if kind == "longrope":
        fields |= {key: rope.numbers(key) for key in ("short_factor", "long_factor")}
    if kind in ("yarn", "longrope") and "attention_factor" in rope:
        fields["attention_factor"] = rope.number("attention_factor")
    return RopeConfig(
        head_dim=head_dim,
        theta=rope.number("rope_theta", keys.number("rope_theta", 10000.0)),
        kind=kind,
        max_position_embeddings=max_position_embeddings,
        **fields,
    )


def _rope_dict(keys: ConfigKeys) -> tuple[Mapping[str, Any], str]:
    parameters, scaling = keys.mapping("rope_parameters"), keys.mapping("rope_scaling")
    name = "rope_scaling" if scaling else "rope_parameters"
    inner = dict(scaling or parameters)
    if "rope_theta" in parameters:
        inner.setdefault("rope_theta", parameters["rope_theta"])
    for key, value in inner.items():
        if isinstance(value, dict):
            raise UnsupportedModel(f"{keys.where}: {name} differs by layer type ({key}), which is not supported")
    return inner, f"{keys.where}: {name}"


def parse_scaling(scaling: str) -> tuple[str, float]:
    """Kind and factor of `KIND:FACTOR`. Raises OptionError unless it is linear, dynamic or yarn by 1 or more."""
    kind, _, number = str(scaling).strip().partition(":")
    kind = kind.strip().lower()
    if kind in ROPE_KINDS and kind not in _SCALED_BY_FACTOR:
        raise OptionError(
            f"rope scaling {kind} needs more than a factor, so it must be in config.json; "
            f"by factor: {', '.join(_SCALED_BY_FACTOR)}"
        )
    if kind not in _SCALED_BY_FACTOR:
        raise OptionError(f"rope scaling kind {shown(kind)} is unknown; use one of {', '.join(_SCALED_BY_FACTOR)}")
    try:
        return kind, float(FACTOR.parse(number))
    except ValueError:
        raise OptionError(
            f"rope scaling {shown(scaling)} must be KIND:FACTOR, such as yarn:4, with a factor that is "
            f"{FACTOR.wanted()}"
        ) from None
