"""A static allocation from a file: budgets that somebody has learnt or measured for a model, per layer or per KV head.

table: JSON or safetensors with one value per layer, per layer and KV head, or per layer and query head (the heads that
share a KV head are averaged); HeadKV's own form, a JSON object "layer-head": score or list of scores, is read too.
kind, what the values are:
- weights: shares as they are.
- lkv (LKV, arXiv 2605.06676): logits; the share is their softmax over all heads of all layers.
- headkv (HeadKV, Fu et al., ICLR 2025, arXiv 2410.19258): importance of heads; every head has `1 - 1/beta` of an equal
  budget, and the rest is shared by importance. beta 1.2; the authors try 1.005 to 10, and count per query head.
- uncomp (UNComp, Xiong et al., arXiv 2410.03090): entropy of heads; in a layer the half with the larger entropy gets
  4/3 of an equal budget and the other half 2/3. The authors' 3/2 and 3/4 come to 1.125 times the budget.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ...errors import OptionError
from ...ranges import MOST, Range, shown

if TYPE_CHECKING:
    from torch import Tensor

    from ..policies.base import PolicyModel
    from ..view import LayerView

Rows = tuple[tuple[float, ...], ...]
NUMBER = Range(-MOST, MOST, float)


@dataclass(frozen=True)
class TableAllocation:
    """Shares that are known before anything is read."""

    table: str | None = None
    kind: str = "weights"
    beta: float = 1.2
    values: Rows = ()

    needs: ClassVar[frozenset[str]] = frozenset()
    rows: ClassVar[bool] = True

    @classmethod
    def create(cls, model: PolicyModel, budget: int, *, table: str, kind: str, beta: float) -> TableAllocation:
        """Raises OptionError for a file that cannot be read, or is not of this model."""
        values = read_table(Path(os.path.expanduser(table)))
        if len(values) != model.num_layers:
            raise OptionError(f"the table {table} has {len(values)} layers and the model {model.num_layers}")
        if kind in ("weights", "headkv") and min(min(row) for row in values) < 0:
            raise OptionError(f"the table {table} has negative values, which {kind} cannot be")
        return cls(table, kind, beta, values)

    def preference(self, view: LayerView, indicator: Tensor) -> tuple[float, ...]:
        """The share of each KV head, on the scale of an equal budget or of the table's own."""
        kv_heads = view.keys.shape[0]
        rows = [_per_kv_head(row, kv_heads, self.table) for row in self.values]
        row = rows[view.layer]
        if self.kind == "lkv":
            top = max(max(one) for one in rows)
            return tuple(math.exp(logit - top) for logit in row)
        if self.kind == "headkv":
            count, total = len(rows) * kv_heads, sum(map(sum, rows))
            pooled = [value * count / total if total > 0 else 1.0 for value in row]
            return tuple(1 - 1 / self.beta + share / self.beta for share in pooled)
        if self.kind == "uncomp":
            order = sorted(range(kv_heads), key=lambda head: (-row[head], head))
            large = set(order[: kv_heads // 2])
            small = kv_heads % 2 and order[kv_heads // 2]  # the one in the middle of an odd number has an equal share
            return tuple(
                4 / 3 if head in large else 1.0 if kv_heads % 2 and head == small else 2 / 3 for head in range(kv_heads)
            )
        return row

    def describe(self) -> str:
        return f"table {Path(self.table or '').name} {self.kind}"


def read_table(path: Path) -> Rows:
    """Rows of finite numbers, one row a layer. Raises OptionError that says what is wrong with the file."""
    try:
        if path.suffix == ".safetensors":
            from safetensors import SafetensorError
            from safetensors.numpy import load_file

            try:
                tensors = load_file(path)
            except SafetensorError as error:
                raise OptionError(f"cannot read the table {path}: {error}") from None
            if len(tensors) != 1:
                raise OptionError(f"the table {path} has {len(tensors)} tensors: one is needed")
            content: Any = next(iter(tensors.values())).tolist()
        else:
            content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"cannot read the table {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise OptionError(f"the table {path} is neither JSON nor safetensors: {error}") from None
    if isinstance(content, dict):
        content = _from_heads(content, path)
    return _checked(content, path)


def _from_heads(content: dict[str, Any], path: Path) -> list[list[Any]]:
    """`{"layer-head": score or list of scores}` as rows, with the mean of a list."""
    rows: dict[int, dict[int, Any]] = {}
    for name, value in content.items():
        layer, dash, head = name.partition("-")
        if not (dash and all(number.isdecimal() and len(number) < 10 for number in (layer, head))):
            raise OptionError(f"the table {path} has the key {shown(name)}: expected layer-head, such as 0-3")
        scores = value if isinstance(value, list) else [value]
        known = scores and all(NUMBER.has(one) for one in scores)
        rows.setdefault(int(layer), {})[int(head)] = sum(scores) / len(scores) if known else None
    if any(sorted(heads) != list(range(len(heads))) for heads in rows.values()) or sorted(rows) != list(
        range(len(rows))
    ):
        raise OptionError(f"the table {path} misses a layer or a head")
    return [[rows[layer][head] for head in range(len(rows[layer]))] for layer in range(len(rows))]


def _checked(content: Any, path: Path) -> Rows:
    rows = [row if isinstance(row, list) else [row] for row in content] if isinstance(content, list) else []
    numbers = all(NUMBER.has(value) for row in rows for value in row)
    if not rows or not numbers or len({len(row) for row in rows}) != 1 or not rows[0]:
        raise OptionError(f"the table {path} must have one finite number for each layer, or one for each of its heads")
    return tuple(tuple(float(value) for value in row) for row in rows)


def _per_kv_head(row: tuple[float, ...], kv_heads: int, file: str | None) -> tuple[float, ...]:
    """One value per KV head: of the layer for each, or the mean of the query heads that share one."""
    if len(row) == 1:
        return row * kv_heads
    if len(row) % kv_heads:
        raise OptionError(f"the table {file} has {len(row)} heads and the model {kv_heads} KV heads")
    group = len(row) // kv_heads
    return tuple(sum(row[head * group : (head + 1) * group]) / group for head in range(kv_heads))
