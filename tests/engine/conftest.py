"""A naive dense float64 model written from the formulas, and CAKE's choice written from the paper's, to judge by."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Dense:
    """A Llama-like model as dense float64 arithmetic over a whole text; any row may be hidden from any query."""

    def __init__(self, folder: Path) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.weights = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
        self.layers: int = self.config["num_hidden_layers"]
        self.heads: int = self.config["num_attention_heads"]
        self.kv_heads: int = self.config["num_key_value_heads"]
        self.head_dim: int = self.config["head_dim"]
        self.queries: list[Tensor] = []  # [heads, n, head_dim] of each layer of the last run
        self.keys: list[Tensor] = []  # [kv_heads, n, head_dim]
        self.plain_queries: list[Tensor] = []  # before rotation
        self.values: list[Tensor] = []
        self.normed: list[Tensor] = []  # [n, hidden], what attention reads
        self.similarity: list[Tensor] = []  # [n], cosine of the hidden states before and after attention
        self.attention: list[Tensor] = []  # [heads, n, n]
        self.scores: dict[tuple[int, int], dict[int, float]] = {}  # indicator by position, of the last `cake`

    def rms_norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]) * self.weights[name]

    def rotate(self, x: Tensor) -> Tensor:
        half = self.head_dim // 2
        frequency = self.config["rope_theta"] ** (-torch.arange(half).double() * 2 / self.head_dim)
        angle = torch.arange(x.shape[1]).double()[:, None] * frequency
        cos, sin = angle.cos(), angle.sin()
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def sliding(self, layer: int) -> int | None:
        """The layer's sliding window, as the config of its family says it."""
        types, window = self.config.get("layer_types"), self.config.get("sliding_window")
        if types is not None:
            return window if types[layer] == "sliding_attention" else None
        if self.config["model_type"].startswith("qwen"):
            return window if self.config["use_sliding_window"] and layer >= self.config["max_window_layers"] else None
        return window

    def causal(self, n: int, layer: int) -> Tensor:
        query, key = torch.arange(n)[:, None], torch.arange(n)[None]
        sliding = self.sliding(layer)
        return (key <= query) & (key > query - (sliding or n))

    def logits(self, ids: list[int], visible: dict[tuple[int, int], Tensor] | None = None) -> Tensor:
        """Logits `[n, vocab]`; `visible[layer, kv_head]` bool `[n, n]` hides keys beyond what causality hides."""
        w, n = self.weights, len(ids)
        x = w["model.embed_tokens.weight"][torch.tensor(ids)]
        self.queries, self.keys = [], []
        self.plain_queries, self.values, self.normed, self.similarity, self.attention = [], [], [], [], []
        for layer in range(self.layers):
            p = f"model.layers.{layer}."
            h = self.rms_norm(x, p + "input_layernorm.weight")

            def heads(name: str, p: str = p, h: Tensor = h) -> Tensor:
                projected = h @ w[f"{p}self_attn.{name}.weight"].T + w.get(f"{p}self_attn.{name}.bias", 0.0)
                return projected.view(n, -1, self.head_dim).transpose(0, 1)

            q, k, v = self.rotate(heads("q_proj")), self.rotate(heads("k_proj")), heads("v_proj")
            self.plain_queries.append(heads("q_proj"))
            self.values.append(v)
            self.normed.append(h)
            self.queries.append(q)
            self.keys.append(k)
            out, weights = [], []
            for head in range(self.heads):
                kv = head // (self.heads // self.kv_heads)
                mask = self.causal(n, layer)
                if visible is not None and (layer, kv) in visible:
                    mask = mask & visible[layer, kv]
                z = (q[head] @ k[kv].T / math.sqrt(self.head_dim)).masked_fill(~mask, -math.inf)
                weights.append(torch.softmax(z, -1))
                out.append(weights[-1] @ v[kv])
            self.attention.append(torch.stack(weights))
            before = x
            x = x + torch.cat(out, -1) @ w[p + "self_attn.o_proj.weight"].T
            self.similarity.append(torch.nn.functional.cosine_similarity(before, x, dim=-1))
            h = self.rms_norm(x, p + "post_attention_layernorm.weight")
            gate, up = (h @ w[f"{p}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
            x = x + (torch.nn.functional.silu(gate) * up) @ w[p + "mlp.down_proj.weight"].T
        head_name = "lm_head.weight" if "lm_head.weight" in w else "model.embed_tokens.weight"
        return self.rms_norm(x, "model.norm.weight") @ w[head_name].T

    def cake(
        self, columns: dict[tuple[int, int], list[int]], total: int, *, budget: int, window: int, tau: float = 1.0
    ) -> dict[tuple[int, int], set[int]]:
        """CAKE's kept positions from the queries and keys of the last run, dealt once with every layer known.

        `columns[layer, kv_head]`: the positions that may be kept. Written from the paper's formulas, head by head.
        """
        group = self.heads // self.kv_heads
        rows = torch.arange(max(0, total - window), total)
        preferences, caps, scores = [], [], {}
        self.scores = scores
        for layer in range(self.layers):
            dispersion = shift = 0.0
            for kv in range(self.kv_heads):
                position = torch.tensor(sorted(columns[layer, kv]))
                outside = position < total - window
                indicator = torch.zeros(int(outside.sum()), dtype=torch.float64)
                for head in range(kv * group, (kv + 1) * group):
                    z = self.queries[layer][head, rows] @ self.keys[layer][kv, position].T / math.sqrt(self.head_dim)
                    mask = self.causal(total, layer)[rows][:, position]
                    a = torch.softmax(z.masked_fill(~mask, -math.inf), -1)[:, outside]
                    dispersion += float(-torch.special.xlogy(a, a).sum())
                    variance = a.var(0) if len(rows) > 1 else torch.zeros(a.shape[1], dtype=a.dtype)
                    shift += float(variance.sum())
                    indicator += pooled(a.mean(0) + 200 * variance, position[outside]) / group
                scores[layer, kv] = dict(zip(position[outside].tolist(), indicator.tolist(), strict=True))
            preferences.append(dispersion ** (1 / tau) * shift ** (1 / tau))
            available = max(len(columns[layer, kv]) for kv in range(self.kv_heads))
            caps.append(max(0, min(available, self.sliding(layer) or available) - min(window, total)))
        seats = [0] * self.layers
        candidates = [
            (-preferences[layer] / (seat - 0.5), layer)
            for layer in range(self.layers)
            for seat in range(1, caps[layer] + 1)
        ]
        for _, layer in sorted(candidates)[: (budget - window) * self.layers]:
            seats[layer] += 1
        kept = {}
        for (layer, kv), found in scores.items():
            best = sorted(found, key=lambda position: (-found[position], position))[: seats[layer]]
            kept[layer, kv] = set(best) | set(range(max(0, total - window), total))
        return kept

    def assert_chosen(self, kept: dict[tuple[int, int], list[int]], expected: dict[tuple[int, int], set[int]]) -> None:
        """`kept` is `expected`, but for tokens whose scores are equal up to fp32 rounding (pooling makes plateaus)."""
        for row, positions in kept.items():
            assert len(positions) == len(set(positions)) == len(expected[row]), row
            more, less = set(positions) - expected[row], expected[row] - set(positions)
            scores = [self.scores[row][position] for position in more | less]
            assert not scores or max(scores) - min(scores) <= 1e-5 * max(scores), (row, more, less, scores)


def pooled(values: Tensor, position: Tensor, size: int = 5) -> Tensor:
    """Average pooling over neighbours within 2 positions, the divisor always 5."""
    near = (position[:, None] - position[None]).abs() <= size // 2
    return (near.double() @ values) / size


@pytest.fixture
def dense() -> Callable[[Path], Dense]:
    return Dense


@pytest.fixture
def make_runner() -> Callable[..., Any]:
    """A function `(folder, *, chunk=64, context=None, kv_dtype=None, step="auto", **cache options)`: a Runner."""
    from cake_infer.cache.config import CacheConfig
    from cake_infer.engine.runner import Runner
    from cake_infer.models.config import read_config
    from cake_infer.models.weights import load_decoder

    def make(
        folder: Path,
        *,
        chunk: int = 64,
        context: int | None = None,
        kv_dtype: Any = None,
        step: str = "auto",
        **options: Any,
    ) -> Any:
        config = read_config(folder)
        decoder = load_decoder(folder, config)
        context = context or config.max_position_embeddings
        return Runner(decoder, CacheConfig(**options), context=context, chunk=chunk, kv_dtype=kv_dtype, step=step)

    return make


@pytest.fixture
def model_folder(
    tmp_path: Path, write_checkpoint: Callable[..., Path], write_byte_tokenizer: Callable[..., None]
) -> Callable[..., Path]:
    """A function `(name="model", *, template=CHAT_TEMPLATE, bos=True, **checkpoint)` that writes a whole model."""

    def write(
        name: str = "model", *, template: str | None = CHAT_TEMPLATE, bos: bool = True, **checkpoint: Any
    ) -> Path:
        folder = write_checkpoint(tmp_path / name, **checkpoint)
        write_byte_tokenizer(folder, 300, chat_template=template, bos=bos)
        return folder

    return write


@pytest.fixture
def force(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[int]], list[Tensor]]:
    """A function that makes every reply the ids given to it (for as long as they last); returns each step's logits."""
    from cake_infer.engine import picker

    choose = picker.choose

    def forced(ids: list[int]) -> list[Tensor]:
        seen: list[Tensor] = []
        coming = list(ids)

        def next_id(logits: Tensor, *arguments: Any, **options: Any) -> int:
            seen.append(logits.clone())
            return coming.pop(0) if coming else choose(logits, *arguments, **options)

        monkeypatch.setattr(picker, "choose", next_id)
        return seen

    return forced


@pytest.fixture
def random_ids() -> Callable[..., list[int]]:
    def ids(count: int, seed: int = 0) -> list[int]:
        return torch.randint(5, 300, (count,), generator=torch.Generator().manual_seed(seed)).tolist()

    return ids


@pytest.fixture
def poison() -> Callable[[Any], None]:
    """Overwrites every slot that no row of an arena owns with NaN: it must never reach a result."""

    def overwrite(arena: Any) -> None:
        owned = torch.zeros(arena.keys.shape[0], dtype=torch.bool)
        for offset, length in zip(arena.offset.flat, arena.length.flat, strict=True):
            assert not owned[offset : offset + length].any(), "rows overlap"
            owned[offset : offset + length] = True
        arena.keys[~owned], arena.values[~owned] = math.nan, math.nan

    return overwrite


@pytest.fixture
def visible_after() -> Callable[[dict[Any, list[int]], int, int], dict[Any, Tensor]]:
    """Masks `[total, total]` by row in which queries behind a prompt see, of it, only what was kept; earlier ones see
    everything."""

    def visible(kept: dict[Any, list[int]], prompt: int, total: int) -> dict[Any, Tensor]:
        masks = {}
        for row, positions in kept.items():
            mask = torch.ones(total, total, dtype=torch.bool)
            mask[prompt:, :prompt] = False
            mask[prompt:, [position for position in positions if position < prompt]] = True
            masks[row] = mask
        return masks

    return visible


@pytest.fixture
def kept_positions() -> Callable[[Any], dict[tuple[int, int], list[int]]]:
    """The true positions in each row of a runner's arena, in stored order."""

    def kept(runner: Any) -> dict[tuple[int, int], list[int]]:
        arena = runner.tenancy.arena
        layers, heads = arena.length.shape
        return {(layer, head): arena.row(layer, head)[2].tolist() for layer in range(layers) for head in range(heads)}

    return kept


def _rendered(arena: Any, layer: int, head: int) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """A row's keys, values and positions, out of its bytes by the documented rule."""
    packed, dim = arena.packed, arena.layout.head_dim
    store, bits = packed.store, packed.store.bits
    first, n = int(packed.offset[layer, head]), int(packed.length[layer, head])
    slots, channels = np.arange(first, first + n), np.arange(dim)
    wide = 32 if dim % 32 == 0 else dim

    def numbers(codes: Tensor, scale: Tensor, minimum: Tensor, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        joined = codes.numpy()[slots][:, channels * bits // 8]
        found = (joined >> (channels * bits % 8)) & (2**bits - 1)
        pair = [table.double().numpy()[rows][:, columns] for table in (scale, minimum)]
        return pair[1] + found * pair[0]

    keys = numbers(store.key_codes, store.key_scale, store.key_minimum, slots // 32, channels)
    values = numbers(store.value_codes, store.value_scale, store.value_minimum, slots, channels // wide)
    rest = [table.double().numpy() for table in arena.row(layer, head)]
    positions = store.position.numpy()[slots].tolist() + rest[2].astype(int).tolist()
    return np.concatenate([keys, rest[0]]), np.concatenate([values, rest[1]]), positions


def _dense_step(
    model: Dense, arena: Any, token: int, position: int
) -> tuple[Tensor, dict[tuple[int, int], dict[int, float]]]:
    """Logits of one token in float64 over the rows as they are rendered, and itself; and by (layer, KV head) and
    position its attention, the mean over the query heads."""
    w = model.weights
    x = w["model.embed_tokens.weight"][token]
    group = model.heads // model.kv_heads
    half = model.head_dim // 2
    angle = position * model.config["rope_theta"] ** (-torch.arange(half).double() * 2 / model.head_dim)

    def turned(rows: Tensor) -> Tensor:
        first, second = rows[..., :half], rows[..., half:]
        return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)

    attention: dict[tuple[int, int], dict[int, float]] = {}
    for layer in range(model.layers):
        p = f"model.layers.{layer}."
        h = model.rms_norm(x, p + "input_layernorm.weight")
        q, k, v = ((h @ w[f"{p}self_attn.{name}_proj.weight"].T).view(-1, model.head_dim) for name in ("q", "k", "v"))
        q, k = turned(q), turned(k)
        out = []
        for head in range(model.heads):
            keys, values, positions = _rendered(arena, layer, head // group)
            keys, values = torch.from_numpy(keys), torch.from_numpy(values)
            keys = torch.cat([keys, k[head // group, None]])
            values = torch.cat([values, v[head // group, None]])
            z = keys @ q[head] / math.sqrt(model.head_dim)
            sliding = model.sliding(layer)
            if sliding is not None:
                z[torch.tensor([*positions, position]) <= position - sliding] = -math.inf
            weights = torch.softmax(z, 0)
            out.append(weights @ values)
            row = attention.setdefault((layer, head // group), dict.fromkeys([*positions, position], 0.0))
            for at, weight in zip([*positions, position], weights.tolist(), strict=True):
                row[at] += weight / group
        x = x + torch.cat(out) @ w[p + "self_attn.o_proj.weight"].T
        h = model.rms_norm(x, p + "post_attention_layernorm.weight")
        gate, up = (h @ w[f"{p}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (torch.nn.functional.silu(gate) * up) @ w[p + "mlp.down_proj.weight"].T
    head_name = "lm_head.weight" if "lm_head.weight" in w else "model.embed_tokens.weight"
    return model.rms_norm(x, "model.norm.weight") @ w[head_name].T, attention


@pytest.fixture
def rendered() -> Callable[[Any, int, int], tuple[np.ndarray, np.ndarray, list[int]]]:
    return _rendered


@pytest.fixture
def dense_step() -> Callable[..., tuple[Tensor, dict[tuple[int, int], dict[int, float]]]]:
    return _dense_step
