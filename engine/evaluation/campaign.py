"""Every prompt once, every policy and budget on it, every result on disk: what the comparing commands share."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...cache.budget import Budget
from .combination import Combination, make_cell, read_alone
from .encoding import EncodedRow
from .ledger import Ledger
from .memory import check_study

if TYPE_CHECKING:
    from ..engine import Engine
    from ..prefill import OnChunk
    from .study import Cell

Record = dict[str, Any]


@dataclass(frozen=True)
class Item:
    """One prompt. about: what its records say of it beside the results."""

    name: str
    encoded: EncodedRow
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def identity(self) -> str:
        """The name, and a digest of what is read, asked and expected."""
        one = self.encoded
        digest = hashlib.sha256(json.dumps([one.prefix, one.suffix, one.answer]).encode()).hexdigest()[:12]
        return f"{self.name} {digest}"


Compute = Callable[[Item, "list[Cell]", "OnChunk"], "list[Record]"]  # a record for each cell
Check = Callable[["Engine", int, "list[Cell]"], str]  # of the longest prompt and its cells


@dataclass
class Campaign:
    """What is compared, and where results go. `base` are the key fields that all results share.

    notice is told a line now and then, progress (tokens done, tokens in all, what is being done) often. check: what
    says in a line what the longest prompt takes, or raises MemoryLimit; None where all cells are those of one full
    cache.
    """

    engine: Engine
    ledger: Ledger
    policies: Sequence[Combination]
    budgets: Sequence[Budget]
    base: Mapping[str, Any]
    notice: Callable[[str], None]
    progress: Callable[[int, int, str], None]
    check: Check | None = None

    def run(self, items: Sequence[Item], compute: Compute, *, after: int, replies: bool = False) -> list[Record]:
        """Fill the ledger; returns the records that belong to this run, in order of items, policies and budgets.

        `after`: the most tokens that are fed on top of a prompt beside its suffix. replies: every policy writes them
        from a cache of its own. Raises MemoryLimit before anything
        is read where the longest prompt does not fit.
        """
        wanted = [
            [
                {**self.base, "prompt": item.identity, "policy": policy.text, "budget": str(budget)}
                for policy in self.policies
                for budget in self.budgets
            ]
            for item in items
        ]
        missing = [[key for key in of_item if key not in self.ledger] for of_item in wanted]
        todo = [(item, keys) for item, keys in zip(items, missing, strict=True) if keys]
        if len(todo) < len(items):
            self.notice(f"{len(items) - len(todo)} of {len(items)} prompts are in {self.ledger.path} already")
        if todo:
            longest = max(len(item.encoded.prefix) for item, _ in todo)
            fed = max(len(item.encoded.suffix) for item, _ in todo) + after
            if self.check is None:
                self.notice(self._check_study(longest, fed, replies))
            else:
                self.notice(self.check(self.engine, longest, self._cells(self.policies, longest)))
        self._measure(todo, compute)
        found = [self.ledger.get(key) for of_item in wanted for key in of_item]
        return [record for record in found if record is not None]

    def _check_study(self, longest: int, fed: int, replies: bool) -> str:
        own = read_alone(self.policies)
        if own:
            self.notice(
                f"{', '.join(one.text for one in own)}: what is kept is not the full cache's, so that each prompt "
                "is read once more for each budget"
            )
        configs, cells = [policy.config for policy in self.policies], self._cells(own, longest)
        return check_study(self.engine, longest, fed, configs, len(self.budgets), cells, replies=replies)

    def _cells(self, policies: Sequence[Combination], tokens: int) -> list[Cell]:
        """Each with each budget, for a prompt of so many tokens."""
        return [make_cell(self.engine.runner, one, budget, tokens) for one in policies for budget in self.budgets]

    def _measure(self, todo: Sequence[tuple[Item, list[Record]]], compute: Compute) -> None:
        policies = {policy.text: policy for policy in self.policies}
        budgets = {str(budget): budget for budget in self.budgets}
        whole, read, started = sum(len(item.encoded.prefix) for item, _ in todo), 0, time.perf_counter()
        for number, (item, keys) in enumerate(todo, start=1):
            tokens, began = len(item.encoded.prefix), time.perf_counter()
            runner = self.engine.runner
            cells = [make_cell(runner, policies[key["policy"]], budgets[key["budget"]], tokens) for key in keys]
            title = f"{number}/{len(todo)} {item.name}"
            results = compute(item, cells, self._on_chunk(read, whole, title))
            about = {**item.about, "prompt_tokens": tokens, "suffix_tokens": len(item.encoded.suffix)}
            self.ledger.append(
                [
                    {**key, **about, "budget_tokens": cell.budget, **result}
                    for key, cell, result in zip(keys, cells, results, strict=True)
                ]
            )
            read += tokens
            now = time.perf_counter()
            left = (now - started) / read * (whole - read)
            self.notice(
                f"{title}: {tokens:,} tokens, {len(cells)} cells, {now - began:.1f} s; {left / 60:.1f} min left"
            )

    def _on_chunk(self, read: int, whole: int, title: str) -> OnChunk:
        def on_chunk(layer: int, done: int, total: int) -> None:
            self.progress(read + (layer * total + done) // self.engine.config.num_layers, whole, title)

        return on_chunk
