"""One prefill under many policies: the full cache is kept, and each policy says what it would have kept of it.

Every layer is scored while it is read, with the same views, the same scores and the same cascade as a prefill with that
policy, so that the kept tokens are those of that prefill. A layer is scored once for all budgets, and an indicator once
for all allocations.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...cache.cascade import Cascade
from ...cache.config import CacheConfig
from ...cache.policies.base import Indicator, LayerScore, Policy
from ...cache.policies.composed import ComposedPolicy
from ...cache.staged import Staged
from ...cache.view import LayerView
from ...errors import OptionError
from .. import prefill
from ..keeping import Chosen, chosen_from, deal
from ..prefill import OnChunk
from ..runner import Runner
from ..sequence import QueryRing
from ..sequence import Sequence as TextSequence
from .kept import Kept
from .own_prefill import read_on_its_own


@dataclass(frozen=True)
class Cell:
    """One policy with one budget in tokens per layer and KV head; None keeps everything.

    bits: as in `Kept`. window: the policy's own, at most the runner's; None for the runner's. piece: tokens of the
    pieces that the prompt is read in, None for one. config: what the policy was made of, and how it decodes.
    """

    policy: Policy
    budget: int | None
    bits: int | None = None
    window: int | None = None
    piece: int | None = None
    config: CacheConfig | None = None


@dataclass
class Reading:
    """A prompt that has been read: its full cache is in the runner's arena, `sequence` active.

    logits: fp32 `[vocab]` of the token after it. kept: for each cell what it keeps, None for everything as it is. room:
    tokens that may still be fed.
    """

    sequence: TextSequence
    tokens: int
    logits: Tensor
    kept: list[Kept | None]
    room: int


class Study:
    """Watches a prefill that evicts nothing and runs every cell's cascade over it; see `prefill.reading`."""

    def __init__(
        self,
        cells: Sequence[Cell],
        tokens: int,
        *,
        num_layers: int,
        kv_heads: int,
        window: int,
        device: torch.device,
    ) -> None:
        """`tokens`: the length of the prompt; a cell whose budget holds all of it keeps everything."""
        shape = tokens, num_layers, kv_heads
        self.kept: list[Kept | None] = []
        self._active: list[_Active] = []
        for cell in cells:
            evicting = cell.policy.evicts and cell.budget is not None and tokens > cell.budget
            if not evicting or cell.budget is None:
                self.kept.append(None if cell.bits is None else Kept.everything(*shape, cell.bits, window, device))
                continue
            own = window if cell.window is None else cell.window
            assert own <= window, "the queries of a wider window are not kept"
            cascade = cell.policy.cascade(num_layers, kv_heads, cell.budget, own)
            active = _Active(cell.policy, cascade, own, Kept(cell.bits, own))
            self._active.append(active)
            self.kept.append(active.kept)

    @property
    def needs(self) -> frozenset[str]:
        """Everything that any of the policies asks for."""
        return frozenset[str]().union(*(active.policy.needs for active in self._active))

    def layer(self, staged: Staged, view: LayerView) -> None:
        """Take a layer that has been read."""
        by_window = {own: with_window(view, own) for own in {active.window for active in self._active}}
        found = {own: _LayerScores(staged, narrower) for own, narrower in by_window.items()}
        for active in self._active:
            scored, chosen = found[active.window].of(active.policy)
            lengths = deal(staged, by_window[active.window], scored, active.cascade, chosen)
            active.kept.add(chosen.order(lengths[-1]), lengths)
            active.kept.preferences.append(scored.preference)


@dataclass
class _Active:
    """A policy that evicts, its cascade and what it keeps."""

    policy: Policy
    cascade: Cascade
    window: int
    kept: Kept


def with_window(view: LayerView, window: int) -> LayerView:
    """The view that a prefill with a narrower window has."""
    if window == view.window:
        return view
    rows = slice(-window, None)
    return replace(
        view,
        window=window,
        queries=view.queries[:, rows],
        query_positions=view.query_positions[rows],
        memo={},
    )


class _LayerScores:
    """The scores of one layer, each worked out once however many policies share it."""

    def __init__(self, staged: Staged, view: LayerView) -> None:
        self._staged, self._view = staged, view
        self._scored: dict[Hashable, tuple[LayerScore, Chosen]] = {}
        self._indicators: dict[Hashable, tuple[Tensor, dict[str, Any]]] = {}
        self._attention: dict[str, Any] = {}  # CAKE's pass over the window's attention, whoever was first

    def of(self, policy: Policy) -> tuple[LayerScore, Chosen]:
        """A policy's verdict and the order of its columns."""
        if not isinstance(policy, ComposedPolicy):
            scored = policy.score(self._view)
            return scored, self._order(scored)
        key = (part_key(policy.indicator), part_key(policy.allocation), part_key(policy.heads))
        if key not in self._scored:
            indicator, memo = self._indicator(policy)
            view = replace(self._view, memo={**self._attention, **memo})
            scored = replace(policy, indicator=_Known(policy.indicator, indicator)).score(view)
            self._remember(view.memo)
            self._scored[key] = scored, self._order(scored)
        return self._scored[key]

    def _indicator(self, policy: ComposedPolicy) -> tuple[Tensor, dict[str, Any]]:
        key = part_key(policy.indicator)
        if key not in self._indicators:
            view = replace(self._view, memo=dict(self._attention))
            indicator = policy.indicator.score(view)
            self._remember(view.memo)
            self._indicators[key] = indicator, view.memo
        return self._indicators[key]

    def _remember(self, memo: dict[str, Any]) -> None:
        if "cake" in memo:
            self._attention.setdefault("cake", memo["cake"])

    def _order(self, scored: LayerScore) -> Chosen:
        chosen = chosen_from(self._staged, self._view, scored)
        chosen.order(list(self._staged.lengths))  # of all columns, so that no budget asks for more
        return chosen


class _Known:
    """An indicator that has scored this layer already."""

    def __init__(self, indicator: Indicator, scores: Tensor) -> None:
        self._indicator, self._scores = indicator, scores

    def score(self, view: LayerView) -> Tensor:
        return self._scores

    def __getattr__(self, name: str) -> Any:
        return getattr(self._indicator, name)  # whatever else it says of a layer


def part_key(part: object) -> Hashable:
    """Equal for parts that say the same: they are frozen dataclasses, and those with tables stand for themselves."""
    try:
        hash(part)
    except TypeError:
        return id(part)
    return (type(part), part)


@torch.inference_mode()
def read(
    runner: Runner,
    ids: list[int],
    cells: Sequence[Cell],
    *,
    new_tokens: int,
    on_chunk: OnChunk | None = None,
    rows: bool = True,
) -> Reading:
    """Read a prompt once for all cells, and once more for each whose policy merges or reads in pieces.

    The runner's own policy must be the full cache. rows: without them merging policies are asked for the tokens that
    they keep alone, which are those without a merge, and pieces are refused (OptionError).
    Raises PromptError if the prompt and `new_tokens` do not fit the
    context, before anything is read.
    """
    if not rows and any(cell.piece is not None for cell in cells):
        raise OptionError("what pieces keep is not a choice from the whole prompt: leave pieces out here")
    sequence, config, window = TextSequence(), runner.decoder.config, runner.cache.window
    room = runner.prepare(sequence, len(ids), new_tokens)
    assert sequence.budget is None, "the runner evicts by a policy of its own"
    study = Study(
        cells,
        len(ids),
        num_layers=config.num_layers,
        kv_heads=config.num_kv_heads,
        window=window,
        device=runner.decoder.device,
    )
    sequence.ring = QueryRing(
        config.num_layers,
        window,
        config.num_heads,
        config.head_dim,
        runner.decoder.compute_dtype,
        runner.decoder.device,
    )
    runner.torch_threads.all()
    merging = [
        (cell, kept)
        for cell, kept in zip(cells, study.kept, strict=True)
        if rows and kept is not None and (cell.policy.merger is not None or cell.piece is not None)
    ]
    told = [_part(on_chunk, number, len(merging) + 1, config.num_layers) for number in range(len(merging) + 1)]
    for (cell, kept), tell in zip(merging, told, strict=False):
        assert cell.budget is not None
        own = window if cell.window is None else cell.window
        kept.rows = read_on_its_own(
            runner, ids, cell.policy, cell.budget, window=own, piece=cell.piece, new_tokens=room, on_chunk=tell
        )
    steps = runner.reading(runner.tenancy.arena, sequence, ids, room, observer=study)
    logits = prefill.read_through(steps, told[-1])
    for cell, kept in merging:
        if cell.piece is not None and kept.rows is not None:  # the study saw what a whole prefill would keep
            kept.lengths = kept.rows.length.tolist()
    sequence.ring = None  # nobody votes on the full cache again
    return Reading(sequence, len(ids), logits, study.kept, room)


def _part(on_chunk: OnChunk | None, number: int, parts: int, layers: int) -> OnChunk | None:
    """Of several prefills what tells `on_chunk` how far all of them are, as if they were one."""
    if on_chunk is None or parts == 1:
        return on_chunk

    def tell(layer: int, done: int, total: int) -> None:
        assert on_chunk is not None
        far = (number * layers * total + layer * total + done) // parts
        at = min(far // total, layers - 1)
        on_chunk(at, far - at * total, total)

    return tell
