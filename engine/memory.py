"""What a run needs in memory, worked out from shapes alone, and whether there is as much."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ..cache.budget import DEFAULT_BUDGET, Budget, parse_bytes
from ..cache.config import CacheConfig
from ..cache.layout import (
    ArenaLayout,
    ArenaSize,
    after_turn,
    arena_size,
    budget_within,
    kept_bytes,
    packed_bytes,
    shared_size,
)
from ..cache.store import BOUNCE_BYTES, OVERLAPPING
from ..errors import OptionError, WeightsError
from ..models.config import ModelConfig
from ..models.headers import tensor_headers
from ..models.packed import quantised_bytes
from ..models.parameters import layer_parameters
from ..models.weights import DTYPES, weight_bytes
from ..models.workspace import widest, workspace_elements
from .method_memory import method_bytes
from .precision import compute_dtype, planned_layout
from .window import FEWEST_COLUMNS

FP32 = 4
# floats in a tile of the statistics' logits, per thread (cache/scores.py)
STATISTICS_TILE = 1 << 17


@dataclass(frozen=True)
class Plan:
    """Bytes that a run holds at its peak, and the tokens they follow from.

    batch: how many such prompts are decoded together; they are read one after another.
    budget: tokens per layer and KV head; None where nothing is ever evicted.
    arena: all keys and values with their bookkeeping: what is `kept` beside the `staging` of one layer while the prompt
    is read, or afterwards what is kept and room for the reply, whichever is more.
    hidden: one vector per prompt token. widened: one layer's weights in the compute dtype, 0 where they are stored in
    it. chunk: everything that follows from the chunk, the window and the rope. products: what the matrix products of a
    CPU's library hold beside torch's tensors. undo: twice the rows that a turn of a chat can go back to.
    """

    prompt_tokens: int
    new_tokens: int
    budget: int | None
    weights: int
    arena: int
    kept: int
    staging: int
    hidden: int
    widened: int
    chunk: int
    products: int = 0
    batch: int = 1
    undo: int = 0

    @property
    def transient(self) -> int:
        """The tensors that the prefill holds beside weights and arena."""
        return self.hidden + self.widened + self.chunk

    @property
    def total(self) -> int:
        return self.weights + self.arena + self.transient + self.products + self.undo

    @property
    def reply(self) -> int:
        """Room for the reply, where it is more than the staging in whose place it comes."""
        return self.arena - self.kept if self.arena > self.kept + self.staging else 0

    def as_dict(self) -> dict[str, int | None]:
        return {**asdict(self), "transient": self.transient, "total": self.total}


def plan_run(
    config: ModelConfig,
    cache: CacheConfig,
    *,
    weights: int,
    stored: torch.dtype,
    prompt_tokens: int,
    new_tokens: int,
    chunk: int,
    device: torch.device | str = "cpu",
    batch: int = 1,
    conversation: int | None = None,
    compiled: bool = True,
) -> Plan:
    """The peak of reading one prompt and writing one reply on an engine that holds nothing yet.

    `weights` bytes of matrices in the dtype `stored`. `batch`: so many such prompts are decoded together, as far as
    `kv_memory` has room for them. `conversation`: the most tokens of one, of which this is the second turn, after one
    of the same size. compiled: by compiled passes where numba is installed, as with every step but eager.
    Raises BudgetError where the budget is below its minimum.
    """
    target = torch.device(device)
    layout, hold = planned_layout(config, cache, stored, target), cache.spare
    products = layout.staging_dtype
    budget = first_budget(config, cache, layout, prompt_tokens, new_tokens, context=conversation)
    held = 0 if conversation is None else after_turn(layout, budget, prompt_tokens, new_tokens, hold)
    rows, columns = config.num_layers * config.num_kv_heads, held + prompt_tokens
    evicting = budget is not None and columns > budget
    size = arena_size(
        layout,
        budget=budget if evicting or hold else None,
        tokens=prompt_tokens,
        new_tokens=new_tokens,
        hold=hold,
        held=rows * held,
        held_longest=held,
        late=cache.late,
    )
    limit = None if cache.kv_memory is None else parse_bytes(cache.kv_memory)
    together, arena = together_within(layout, [size] * batch, limit)
    ring = 0 if budget is None else ring_bytes(config, cache)
    return Plan(
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        batch=together,
        budget=budget,
        weights=weights,
        arena=arena,
        kept=(size.kept + (together - 1) * size.decode) * layout.kept_slot_bytes
        + packed_bytes(layout, together * size.packed),
        staging=size.staging * (2 * layout.head_dim * products.itemsize + 8),
        hidden=prompt_tokens * config.hidden_size * compute_dtype(stored, target).itemsize,
        widened=layer_elements(config) * products.itemsize if stored != products else 0,
        chunk=(together - 1) * ring
        + working_bytes(
            config,
            cache,
            layout,
            budget=budget,
            prompt_tokens=columns,
            chunk=min(chunk, prompt_tokens),
            device=target,
            compiled=compiled,
        ),
        products=product_bytes(config, min(chunk, prompt_tokens)) if target.type == "cpu" else 0,
        undo=0 if conversation is None else 2 * (rows * kept_bytes(layout, held, marks=True) + ring),
    )


def together_within(layout: ArenaLayout, sizes: Sequence[ArenaSize], limit: int | None) -> tuple[int, int]:
    """How many of the first sequences of these sizes run together in an arena of `limit` bytes, and what they take.

    At least one does.
    """
    for count in range(len(sizes), 0, -1):
        nbytes = shared_size(layout, sizes[:count]).nbytes(layout)
        if limit is None or count == 1 or nbytes <= limit:
            return count, nbytes
    return 0, 0


def ring_bytes(config: ModelConfig, cache: CacheConfig) -> int:
    """Bytes of the queries that vote, of one sequence."""
    return config.num_layers * cache.window * config.num_heads * config.head_dim * FP32


def weights_of(
    folder: Path | None, config: ModelConfig, dtype: str | None, quant: str | None = None
) -> tuple[int, torch.dtype]:
    """Bytes of a model's weights and the dtype of its matrices, as they will be loaded.

    From the headers of the folder's safetensors; from the config alone where they are not there (yet) or `folder` is
    None. `dtype` is what the user asked for.
    """
    if quant is not None:
        return quantised_bytes(config, quant), torch.int8 if quant == "int8" else torch.uint8
    if folder is not None:
        try:
            nbytes = weight_bytes(folder, dtype)
            spelled = tensor_headers(folder)["model.layers.0.self_attn.q_proj.weight"].dtype
            return nbytes, DTYPES[dtype or {"F16": "float16", "BF16": "bfloat16"}.get(spelled, "float32")]
        except WeightsError:
            pass  # what is wrong with them is the loader's to say
    return weight_bytes(config, dtype), DTYPES[dtype or config.dtype or "float32"]


def first_budget(
    config: ModelConfig,
    cache: CacheConfig,
    layout: ArenaLayout,
    prompt_tokens: int,
    new_tokens: int,
    *,
    context: int | None = None,
) -> int | None:
    """C in tokens for a first prompt of this length; None where the policy keeps everything.

    `kv_memory` alone gives the largest budget that fits it, and limits one that is given. With `context` the prompt
    begins a conversation of up to that many tokens, each turn of which is read beside what it holds.
    """
    if cache.choice is None:
        if cache.decode_policy == "hold":
            raise OptionError(
                f"the policy {cache.policy!r} keeps everything, so there is no size to hold: "
                "set the option decode_policy to grow, or take a policy that evicts"
            )
        return None
    asked = Budget.parse(cache.budget)
    if cache.kv_memory is None:
        return asked.tokens(prompt_tokens, cache.window)
    within = budget_within(
        layout,
        parse_bytes(cache.kv_memory),
        tokens=prompt_tokens,
        new_tokens=new_tokens,
        hold=cache.spare,
        late=cache.late,
        window=cache.window,
        context=context,
    )
    given = asked != Budget(count=DEFAULT_BUDGET)
    return min(asked.tokens(prompt_tokens, cache.window), within) if given else within


def layer_elements(config: ModelConfig) -> int:
    """Numbers in one layer's weights."""
    return sum(torch.Size(parameter.shape).numel() for parameter in layer_parameters(config))


def working_bytes(
    config: ModelConfig,
    cache: CacheConfig,
    layout: ArenaLayout,
    *,
    budget: int | None,
    prompt_tokens: int,
    chunk: int,
    device: torch.device,
    compiled: bool = True,
) -> int:
    """Bytes of one chunk's attention or of one layer's statistics, whichever is more, and of what lives beside both."""
    item, queries = layout.staging_dtype.itemsize, config.num_heads * config.head_dim
    attention = 3 * chunk * queries * item  # queries by KV head and both parts, or these, their mix and its copy
    if item < FP32:  # queries are turned, and hidden states normed, in fp32
        attention = max(attention, chunk * max(2 * queries, config.hidden_size) * FP32)
    if layout.kv_bits is not None:  # a step widens one row at a time, with a copy in fp32 of its keys or values
        attention = max(attention, 4 * prompt_tokens * (layout.head_dim * FP32 + 4))
    tables = prompt_tokens * (config.head_dim * FP32 + 8)  # cosines, sines and ids
    tables += workspace_elements(config, chunk) * item
    if budget is None:
        return attention + tables
    tables += ring_bytes(config, cache)
    if prompt_tokens <= budget:
        return attention + tables
    window, group = min(cache.window, prompt_tokens), config.num_heads // config.num_kv_heads
    attended = group * window * prompt_tokens
    rows = config.num_kv_heads * prompt_tokens
    compiled &= (
        device.type == "cpu" and prompt_tokens >= FEWEST_COLUMNS and importlib.util.find_spec("numba") is not None
    )
    if compiled:
        # one array of the window's attention, a head's keys, the scores before and after pooling
        statistics = (attended + prompt_tokens * config.head_dim + rows) * FP32
    else:
        # one array of the window's attention and a tile of logits, the scores, and a few rows of sums
        tile = min(attended, STATISTICS_TILE * torch.get_num_threads())
        statistics = (attended + tile + rows + 6 * group * prompt_tokens) * FP32
    bounce = 0
    if device.type not in OVERLAPPING:
        # the bounce buffer grows to what is moved at once
        slot = layout.head_dim * layout.kv_dtype.itemsize
        bounce = min(BOUNCE_BYTES, min(budget, prompt_tokens) * layout.num_layers * layout.num_kv_heads * slot)
    lasting, reading, scoring = method_bytes(config, cache, layout, prompt_tokens, chunk, compiled=compiled)
    return max(attention + reading, statistics, scoring) + lasting + tables + bounce


def product_bytes(config: ModelConfig, chunk: int) -> int:
    """Bytes that a CPU's matrix library holds to pack operands and add up parts, and keeps for the next product.

    Measured with MKL on two cores and a chunk of 512 (bench/memory.py): 5.7 MiB for widths 576 and 1536, 82 MiB for
    4096 and 14336: about two results of the widest product.
    """
    return 2 * chunk * widest(config) * FP32
