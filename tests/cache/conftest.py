"""A layer with everything that an indicator may ask for, made in float64, so that tests can render formulas from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from cake_infer.cache.view import LayerView

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, WINDOW = 4, 2, 8, 24, 8
GROUP = HEADS // KV_HEADS
FREQUENCIES = 50.0 ** (-np.arange(HEAD_DIM // 2) * 2 / HEAD_DIM)


def angles(positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    turned = positions[:, None] * FREQUENCIES
    return np.cos(turned), np.sin(turned)


def turn(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Rotary embedding, half-split."""
    cos, sin = angles(positions)
    first, second = x[..., : HEAD_DIM // 2], x[..., HEAD_DIM // 2 :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


@dataclass
class Scene:
    """`columns[head]`: the positions in a KV head's columns, in order; the arrays are by position, float64."""

    view: LayerView
    total: int
    first: int
    sliding: int | None
    columns: list[np.ndarray]
    keys: np.ndarray  # [kv_heads, total, head_dim]
    values: np.ndarray
    plain: np.ndarray  # [heads, total, head_dim], queries before rotation
    queries: np.ndarray
    output: np.ndarray  # [hidden, heads * head_dim]
    hidden: np.ndarray  # [total, hidden]
    carried: list[np.ndarray]
    ids: np.ndarray

    def attention(self, head: int, rows: np.ndarray) -> np.ndarray:
        """`[rows, columns]` of a query head over the columns of its KV head."""
        at = self.columns[head // GROUP]
        logits = self.queries[head, rows] @ self.keys[head // GROUP, at].T / np.sqrt(HEAD_DIM)
        seen = at[None] <= rows[:, None]
        if self.sliding is not None:
            seen &= at[None] > rows[:, None] - self.sliding
        weights = np.where(seen, np.exp(logits - logits.max(1, keepdims=True)), 0.0)
        return weights / weights.sum(1, keepdims=True)

    @property
    def window_rows(self) -> np.ndarray:
        return np.arange(self.total - WINDOW, self.total)

    @property
    def new_rows(self) -> np.ndarray:
        return np.arange(self.first, self.total)

    def before(self, head: int) -> np.ndarray:
        return self.columns[head] < self.total - WINDOW

    def compare(self, found: torch.Tensor, expected: list[np.ndarray], tolerance: float = 2e-4) -> None:
        """`found` fp32 `[kv_heads, n]` equals the rendering at every column before the window."""
        for head, wanted in enumerate(expected):
            before = self.before(head)
            got = found[head, : len(before)].double().numpy()[before]
            infinite = np.isinf(wanted[before])
            np.testing.assert_array_equal(np.isinf(got), infinite)
            scale = np.abs(wanted[before][~infinite]).max(initial=0)
            np.testing.assert_allclose(
                got[~infinite], wanted[before][~infinite], rtol=tolerance, atol=tolerance * scale * 1e-2
            )


def make_scene(
    total: int = 90, first: int = 0, held: tuple[int, int] = (0, 0), sliding: int | None = None, seed: int = 0
) -> Scene:
    rng = np.random.default_rng(seed)
    everywhere = np.arange(total)
    plain = rng.normal(size=(HEADS, total, HEAD_DIM)) * 1.5 + rng.normal(size=(HEADS, 1, HEAD_DIM))
    keys = turn(rng.normal(size=(KV_HEADS, total, HEAD_DIM)) + rng.normal(size=(KV_HEADS, 1, HEAD_DIM)), everywhere)
    values = rng.normal(size=(KV_HEADS, total, HEAD_DIM)) * rng.lognormal(size=(KV_HEADS, total, 1))
    columns = [np.concatenate([rng.permutation(first)[:count], np.arange(first, total)]) for count in held]
    carried = [np.where(at < first, rng.random(len(at)) * 3, 0.0) for at in columns]
    width = max(len(at) for at in columns)
    scene = Scene(
        view=None,  # type: ignore[arg-type]
        total=total,
        first=first,
        sliding=sliding,
        columns=columns,
        keys=keys,
        values=values,
        plain=plain,
        queries=turn(plain, everywhere),
        output=rng.normal(size=(HIDDEN, HEADS * HEAD_DIM)),
        hidden=rng.normal(size=(total, HIDDEN)),
        carried=carried,
        ids=rng.integers(0, 20, total),
    )

    def packed(rows: list[np.ndarray], *shape: int) -> torch.Tensor:
        table = torch.full((len(rows), width, *shape), float("nan"))  # what no head has must never be read
        for head, row in enumerate(rows):
            table[head, : len(row)] = torch.from_numpy(row).float()
        return table

    positions = torch.full((KV_HEADS, width), total + 7, dtype=torch.int32)
    sums, squares = np.zeros((HEADS, width)), np.zeros((KV_HEADS, width))
    for kv, at in enumerate(columns):
        positions[kv, : len(at)] = torch.from_numpy(at)
        group = [scene.attention(head, scene.new_rows) for head in range(kv * GROUP, (kv + 1) * GROUP)]
        for offset, attention in enumerate(group):
            sums[kv * GROUP + offset, : len(at)] = attention.sum(0)
        squares[kv, : len(at)] = (sum(group) / GROUP).__pow__(2).sum(0)
    counted = plain[:, max(first, 4) :]
    mean = counted.mean(1)
    scene.view = LayerView(
        layer=1,
        keys=packed([keys[kv, at] for kv, at in enumerate(columns)], HEAD_DIM),
        positions=positions,
        queries=torch.from_numpy(scene.queries[:, -WINDOW:]).float(),
        query_positions=torch.arange(total - WINDOW, total),
        window=WINDOW,
        scale=HEAD_DIM**-0.5,
        sliding_window=sliding,
        total=total,
        lengths=None if len(set(held)) == 1 else tuple(len(at) for at in columns),
        first=first,
        values=packed([values[kv, at] for kv, at in enumerate(columns)], HEAD_DIM),
        carried=packed(carried),
        output_projection=torch.from_numpy(scene.output).float(),
        column_sums=torch.from_numpy(sums).float(),
        column_squares=torch.from_numpy(squares).float(),
        query_mean=torch.from_numpy(mean).float(),
        query_covariance=torch.from_numpy(
            np.einsum("hnd,hne->hde", counted, counted) / counted.shape[1] - mean[:, :, None] * mean[:, None]
        ).float(),
        rotation=lambda at: tuple(torch.from_numpy(table).float() for table in angles(at.numpy().astype(float))),  # type: ignore[arg-type, return-value]
        hidden_states=torch.from_numpy(scene.hidden[first:]).float(),
        hidden_similarity=0.9,
        token_ids=torch.from_numpy(scene.ids),
        separators=frozenset({3, 7}),
    )
    return scene


SCENES: dict[str, Callable[[], Scene]] = {
    "one prompt": make_scene,
    "sliding window": lambda: make_scene(sliding=40, seed=1),
    "continued": lambda: make_scene(total=120, first=90, held=(25, 25), seed=2),
    "continued, ragged": lambda: make_scene(total=120, first=90, held=(31, 12), seed=3),
    "continued, sliding": lambda: make_scene(total=120, first=90, held=(31, 12), sliding=60, seed=4),
}


@pytest.fixture(params=list(SCENES))
def scene(request: pytest.FixtureRequest) -> Scene:
    """A layer in every state that a policy can meet: read at once, or after earlier turns, alike or ragged heads."""
    return SCENES[request.param]()


@pytest.fixture
def one_prompt() -> Callable[..., Scene]:
    return make_scene
