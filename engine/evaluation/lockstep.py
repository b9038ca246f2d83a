"""Several caches of one text that are fed the same tokens, one by one, each giving up what its own rule says.

Every cache is that of a real run: the prompt is read by its policy, and a step is the engine's own. All of them lie in
one store, so that the compiled step reads the weights once for all whose rules it has a form for, and plain torch once
for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...cache.arena import Arena
from ...cache.config import CacheConfig
from ...cache.holds.base import HoldRule
from ...cache.layout import ArenaLayout, ArenaSize, arena_size
from ...cache.policies import make_hold
from ...cache.policies.base import Policy
from ...cache.policies.composed import ComposedPolicy
from ...cache.saved_rows import SavedRows
from ...cache.shared import SharedArena
from .. import decode
from ..compiled import CompiledStep
from ..headroom import make_room
from ..interval_step import is_cut_between, step_under_rules
from ..recascade import is_due, recascade
from ..runner import Runner
from ..sequence import Sequence as TextSequence
from .own_prefill import prefill_alone
from .study import Cell, part_key

Tell = Callable[[int], None]  # how many of the prefills are over


@dataclass(eq=False)
class Follower:
    """One cache. rule: None for the step's own, attention at every step, or where rows only grow."""

    cell: Cell
    config: CacheConfig
    arena: Arena
    sequence: TextSequence
    rule: HoldRule | None

    @property
    def slots(self) -> int:
        return int(self.arena.length.sum())

    def slice_anew(self, runner: Runner) -> None:
        """Before a step: share the slots over the layers again, if it is time."""
        every = self.config.recascade
        if every is not None and is_due(self.arena, self.sequence, every):
            recascade(
                runner.decoder,
                self.arena,
                self.sequence,
                self.cell.policy,
                window=self.config.window,
                every=every,
                spare=self.config.spare,
            )


class Lockstep:
    """Followers of one text, for each cell one, in the order of the cells."""

    def __init__(
        self, runner: Runner, ids: list[int], cells: Sequence[Cell], tokens: int, *, tell: Tell | None = None
    ) -> None:
        """Read the prompt `ids` for every cell (once for those that decode alone differently), with room for `tokens`.

        The runner's own policy keeps everything, and its step is one of rows that grow.
        """
        self.runner = runner
        sizes = [follower_size(runner.layout, cell, len(ids), tokens) for cell in cells]
        self._shared = SharedArena(runner.layout, runner.decoder.device, batch=len(cells))
        self._shared.reserve(sizes)
        self.followers: list[Follower] = []
        read: dict[Hashable, tuple[SavedRows, TextSequence]] = {}
        runner.torch_threads.all()
        left = [prompt_key(cell) for cell in cells]
        for cell, size in zip(cells, sizes, strict=True):
            key = left.pop(0)
            rows, sequence = read.pop(key) if key in read else _read(runner, ids, cell, tokens)
            if key in left:  # another one wants them too
                read[key] = rows, sequence
            sequence = runner.tenancy.copy(sequence)
            self.followers.append(_follower(self._shared.admit(size), cell, rows, sequence, tokens))
            if tell is not None:
                tell(len(self.followers))
        runner.step.prepare(self.followers[0].arena, self.followers[0].sequence, window=runner.cache.window)
        groups: dict[Hashable, list[int]] = {}
        for number, one in enumerate(self.followers):
            groups.setdefault((one.config.window, self._compiled_for(one)), []).append(number)
        self._groups = list(groups.values())

    def _compiled_for(self, one: Follower) -> bool:
        return isinstance(self.runner.step, CompiledStep) and (one.rule is None or is_cut_between(one.rule))

    @torch.inference_mode()
    def feed(self, token: int) -> Tensor:
        """Feed one token to all. Returns the next token's logits of each, fp32 `[followers, vocab]`."""
        for one in self.followers:
            one.slice_anew(self.runner)
        found: dict[int, Tensor] = {}
        for group in self._groups:
            found.update(zip(group, self._step([self.followers[number] for number in group], token), strict=True))
        return torch.stack([found[number] for number in range(len(self.followers))])

    def _step(self, group: list[Follower], token: int) -> Tensor:
        """One token to followers of one window, for all or none of which the step is compiled."""
        decoder, step, window = self.runner.decoder, self.runner.step, group[0].config.window
        arenas, sequences = [one.arena for one in group], [one.sequence for one in group]
        tokens, rules = [token] * len(group), [one.rule for one in group]
        if self._compiled_for(group[0]):
            assert isinstance(step, CompiledStep)
            return step_under_rules(step, decoder, arenas, sequences, tokens, rules, window=window)
        return decode.batch_step(decoder, arenas, sequences, tokens, window=window, rules=rules)


def follower_size(layout: ArenaLayout, cell: Cell, prompt: int, tokens: int) -> ArenaSize:
    """The most slots of a follower: it is read elsewhere, and then comes in with its headroom."""
    assert cell.config is not None
    size = arena_size(layout, budget=_budget(cell), tokens=prompt, new_tokens=tokens, hold=cell.config.spare)
    return ArenaSize(0, 0, size.decode)


def _budget(cell: Cell) -> int | None:
    return cell.budget if cell.policy.evicts else None


def prompt_key(cell: Cell) -> Hashable:
    """Equal for cells that leave the same of a prompt, however they decode."""
    policy: Policy = cell.policy
    parts: tuple[Hashable, ...] = (part_key(policy),)
    if isinstance(policy, ComposedPolicy):
        named = (policy.indicator, policy.allocation, policy.heads, policy.merge)
        parts = (*(part_key(part) for part in named), policy.waits)
    return (*parts, _budget(cell), cell.window, cell.piece)


def _read(runner: Runner, ids: list[int], cell: Cell, tokens: int) -> tuple[SavedRows, TextSequence]:
    window = runner.cache.window if cell.window is None else cell.window
    return prefill_alone(runner, ids, cell.policy, _budget(cell), window=window, piece=cell.piece, new_tokens=tokens)


def _follower(arena: Arena, cell: Cell, rows: SavedRows, sequence: TextSequence, tokens: int) -> Follower:
    """A member of the store with a copy of the rows, and room as a reply has it."""
    assert cell.config is not None
    rule = make_hold(cell.config)
    arena.load(rows)
    make_room(arena, sequence, tokens, cell.config, rule, carried="carried" in cell.policy.needs)
    arena.settle()
    return Follower(cell, cell.config, arena, sequence, rule)
