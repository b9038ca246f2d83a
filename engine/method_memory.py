"""What a method other than CAKE takes in a prefill, from shapes alone."""

from __future__ import annotations

from ..cache import projection
from ..cache.config import CacheConfig
from ..cache.layout import ArenaLayout
from ..cache.merges import cam, d2o
from ..models.config import ModelConfig
from . import inputs
from .lengths import LANES
from .worst import REACH

FP32, FP64 = 4, 8


def method_bytes(
    config: ModelConfig, cache: CacheConfig, layout: ArenaLayout, tokens: int, chunk: int, *, compiled: bool = False
) -> tuple[int, int, int]:
    """What the parts of a policy hold beside CAKE's statistics: the inputs of a whole layer, what gathering them takes
    for a chunk, and what scoring takes: an upper bound, where that of CAKE itself is exact. compiled: by the passes of
    `engine/window.py`."""
    choice = cache.choice
    asked = frozenset() if choice is None else choice.inputs
    heads, kv_heads, dim, hidden = config.num_heads, config.num_kv_heads, config.head_dim, config.hidden_size
    whole = {
        "column_sums": heads * tokens * FP32,
        "column_squares": kv_heads * tokens * FP32,
        "carried": 2 * kv_heads * tokens * FP32,
        "hidden_states": tokens * hidden * layout.staging_dtype.itemsize,
        "query_covariance": 2 * heads * dim * dim * FP32,
        "token_ids": 2 * tokens * FP32,
    }
    turned = 3 * heads * chunk * dim * FP32  # queries turned back
    of_chunk = {
        "column_sums": 3 * inputs.TILE_FLOATS * FP32 + 2 * chunk * heads * dim // kv_heads * FP32,
        "query_mean": turned,
        "query_covariance": turned,
        "hidden_similarity": 3 * chunk * hidden * FP32,
    }
    lasting = sum(size for name, size in whole.items() if name in asked)
    reading = max((size for name, size in of_chunk.items() if name in asked), default=0)
    merging = 0 if choice is None else merge_bytes(cache, dim, tokens)
    if choice is None or choice.indicator.name == "cake":
        return lasting, reading, merging
    group = heads // kv_heads
    rows = group * min(cache.window, tokens) if "window_queries" in asked else 0
    if choice.indicator.name == "defensivekv" and choice.options["indicator"]["norm"] == "l2":
        # a head's attention and what it is made of, beside sums, norms and positions of all heads; or its values
        attended = (2 * rows + 6 * kv_heads + 4) * tokens
        measured = (2 * dim + 3 * kv_heads) * tokens + 2 * group * dim * hidden
        if compiled and int(str(choice.options["indicator"]["pool"])) <= 2 * REACH + 1:
            attended = (rows + dim + 4 * kv_heads + 1) * tokens  # once, and keys that are not fp32 or lie in no order
        if compiled and dim % LANES == 0:
            measured = (dim + kv_heads) * tokens + group * dim * (dim + hidden)
        return lasting, reading, max(max(attended, measured) * FP32, merging)
    scoring = (3 * rows + 4 * dim + 8 * kv_heads) * tokens * FP32
    if "output_projection" in asked:
        scoring += 2 * min(projection.TILE_FLOATS, tokens * hidden) * FP32 + group * dim * hidden * FP32
    return lasting, reading, max(scoring, merging)


def merge_bytes(cache: CacheConfig, head_dim: int, tokens: int) -> int:
    """What folding the longest row that there may be takes: its values anew and what goes into them, and a tile."""
    choice = cache.choice
    if choice is None or choice.merge.name == "none":
        return 0
    row = 4 * tokens * head_dim
    if choice.merge.name == "cam":
        return FP64 * (row + 3 * cam.TILE * head_dim)
    return FP32 * (row + 3 * max(d2o.TILE_FLOATS, tokens))
