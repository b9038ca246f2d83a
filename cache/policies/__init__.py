"""The policies by name; each one lives in its own small file and is imported when it is made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import OptionError
from .base import PolicyModel

if TYPE_CHECKING:
    from ..config import CacheConfig
    from .base import Policy

POLICIES = ("cake", "full")

__all__ = ["POLICIES", "PolicyModel", "make_policy"]


def make_policy(config: CacheConfig, model: PolicyModel, budget: int) -> Policy:
    """The policy that `config` names, for a model and a budget of `budget` tokens (the tau table depends on both)."""
    if config.policy == "cake":
        from .cake import CakePolicy

        return CakePolicy.from_config(config, model, budget)
    if config.policy == "full":
        from .full import FullPolicy

        return FullPolicy()
    raise OptionError(f"unknown policy {config.policy!r}: choose one of {', '.join(POLICIES)}")
