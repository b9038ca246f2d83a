"""The indicators by name: how much each token of a layer is worth keeping. No torch here; a class is imported when its
policy is made. docs/methods.md says where the authors' code differs.
"""

from __future__ import annotations

from ..method import WIDEST, Method, Option

WINDOW = ("window_queries",)
W_N = "w n products per query head"
POOL = Option("pool", 7, "odd width of the pooling over neighbouring positions", int, least=1, most=WIDEST, odd=True)
AVERAGE = Option("pool", 5, "odd width of the average over neighbouring positions", int, least=1, most=WIDEST, odd=True)
SINKS = Option("sinks", 4, "first tokens that are always kept", int, least=0)
AHEAD = Option("ahead", 512, "positions to come over which the rotation is averaged", int, least=1, most=2**17)
SEED = Option("seed", 0, "of the random choice", int, least=0, most=2**63 - 1)


def share(name: str, default: float, help: str) -> Option:
    """A number from 0 to 1."""
    return Option(name, default, help, least=0, most=1)


PLAIN = (
    Method(
        "cake",
        "indicators.cake:CakeIndicator",
        "mean and variance of the window's attention",
        WINDOW,
        W_N,
        "CAKE, Qin et al., ICLR 2025, arXiv 2503.12491",
        (Option("gamma", None, "weight of the variance; default 200, or what `tune` found", least=0), AVERAGE),
    ),
    Method(
        "streaming-llm",
        "indicators.streaming:StreamingIndicator",
        "the first tokens and the last ones",
        (),
        "nothing",
        "StreamingLLM, Xiao et al., ICLR 2024, arXiv 2309.17453",
        (SINKS,),
    ),
    Method(
        "snapkv",
        "indicators.snapkv:SnapKVIndicator",
        "the window's attention, pooled",
        WINDOW,
        W_N,
        "SnapKV, Li et al., NeurIPS 2024, arXiv 2404.14469",
        (POOL, Option("pooling", "max", "how neighbours are joined", str, choices=("max", "avg"))),
    ),
    Method(
        "lava",
        "indicators.lava:LavaIndicator",
        "the window's attention times the head's largest value",
        ("window_queries", "values"),
        W_N,
        "LAVa, Shen et al., arXiv 2509.09754",
        (POOL,),
    ),
    Method(
        "h2o",
        "indicators.h2o:H2OIndicator",
        "the attention that all queries so far paid",
        ("column_sums", "carried"),
        "one more Q K^T of the layer, in tiles",
        "H2O, Zhang et al., NeurIPS 2023, arXiv 2306.14048",
        (share("recent", 0.5, "of the budget, for the last tokens"),),
    ),
    Method(
        "tova",
        "indicators.tova:TovaIndicator",
        "what the last query attends to, one set of tokens for all heads",
        WINDOW,
        "n products per query head",
        "TOVA, Oren et al., 2024, arXiv 2401.06104",
        window=1,
    ),
    Method(
        "roco",
        "indicators.roco:RoCoIndicator",
        "mean attention of the queries that see a token; what varies is spared",
        ("column_sums", "column_squares"),
        "one more Q K^T of the layer, in tiles",
        "RoCo, Ren and Zhu, 2024, arXiv 2402.06262",
        (share("volatile", 0.1, "share of the budget that goes to tokens whose attention varies most"), SINKS),
    ),
    Method(
        "nacl",
        "indicators.nacl:NaclIndicator",
        "the proxy's attention, and a random part of the rest",
        WINDOW,
        W_N,
        "NACL, Chen et al., ACL 2024, arXiv 2408.03675",
        (
            share("ends", 0.05, "share of the budget for the first tokens"),
            share("top", 0.6, "share of the budget for the best tokens; the rest is drawn"),
            Option("temperature", 1.0, "of the chances in the draw", above=0),
            SEED,
        ),
    ),
    Method(
        "knorm",
        "indicators.knorm:KnormIndicator",
        "keys of low norm",
        (),
        "n D",
        "L2 norm, Devoto et al., EMNLP 2024, arXiv 2406.11430",
    ),
    Method(
        "keydiff",
        "indicators.keydiff:KeyDiffIndicator",
        "keys unlike the mean key",
        (),
        "n D",
        "KeyDiff, Park et al., NeurIPS 2025, arXiv 2504.15364",
    ),
    Method(
        "lagkv",
        "indicators.lagkv:LagKVIndicator",
        "keys and values that stand out against the next chunk's",
        ("values",),
        "n D",
        "LagKV, Liang et al., 2025, arXiv 2504.04704",
        (SINKS, Option("lag", 128, "tokens of a chunk", int, least=2)),
    ),
    Method(
        "expected-attention",
        "indicators.expected_attention:ExpectedAttentionIndicator",
        "what Gaussian queries to come would attend to",
        ("query_mean", "query_covariance", "rotation", "values"),
        "2 n D^2 per query head",
        "Expected Attention, Devoto et al., 2025, arXiv 2510.00636",
        (SINKS, AHEAD, Option("epsilon", 0.0, "added to the expected attention", least=0)),
    ),
    Method(
        "capkv",
        "indicators.capkv:CapKVIndicator",
        "the capacity that a row adds to the cache as a channel",
        ("query_mean", "rotation", "values"),
        "2 n D^2 per query head",
        "CapKV, Yang et al., 2026, arXiv 2604.25975",
        (Option("temperature", 5.0, "of the keys' weights", least=0), SINKS, AHEAD),
    ),
    Method(
        "defensivekv",
        "indicators.defensive:DefensiveIndicator",
        "the worst case over the window's queries, by the size of the projected value",
        ("window_queries", "values", "output_projection"),
        "w n products and n D hidden per query head, n D^2 with norm l2",
        "DefensiveKV, Feng et al., ICLR 2026, arXiv 2510.13334",
        (
            AVERAGE,
            share("mass", 0.9, "of the mean attention, whose tokens come first"),
            Option("norm", "l1", "of a projected value", str, choices=("l1", "l2")),
        ),
    ),
    Method(
        "rest-kv",
        "indicators.rest:RestIndicator",
        "how much the layer's output would move without the token",
        ("window_queries", "values", "output_projection"),
        "w n products and n D^2 per query head",
        "ReST-KV, An et al., ICLR 2026",
        (
            share("smoothing", 0.3, "weight of the newer row"),
            AVERAGE,
            Option("drift", 2000, "positions by which attention wanders for each step of the pooling", int, least=1),
        ),
    ),
    Method(
        "sablock",
        "indicators.sablock:SABlockIndicator",
        "blocks that do not cross a clause, as large as they may be",
        ("window_queries", "token_ids", "separators"),
        W_N,
        "in the spirit of SABlock, Chen et al., 2025, arXiv 2510.22556, whose formulas are not public",
        (
            Option("mix", 1.0, "weight of a segment's importance", least=0),
            share("mass", 0.9, "of the best tokens' score that blocks must hold"),
            AVERAGE,
        ),
    ),
    Method(
        "nexus",
        "indicators.nexus:NexusIndicator",
        "blocks by attention and a short walk, kept by weighted chance",
        WINDOW,
        "n products, heads averaged",
        "Nexus Sampling, Duong et al., 2026, arXiv 2606.23961",
        (
            Option("block", 32, "tokens of a block", int, least=1),
            Option("rows", 16, "last queries that vote", int, least=1),
            Option("walk", 3, "newest rows of the walk", int, least=1),
            Option("mix", 0.5, "weight of the walk", least=0),
            Option("draws", 5, "draws of a block's key; many tend to the choice by weight", int, least=1, most=20_000),
            SEED,
        ),
    ),
    Method(
        "gate",
        "indicators.gate:GateIndicator",
        "a trained linear map of the hidden states, from a file of yours",
        ("hidden_states", "carried"),
        "n hidden products per KV head",
        "the hook for learned gates: Attention-Gate, arXiv 2410.12876; LKV, arXiv 2605.06676",
        (
            Option(
                "file",
                None,
                "safetensors with layers.L.weight [kv_heads, hidden], layers.L.bias [kv_heads]",
                str,
                file=True,
            ),
        ),
    ),
)
# what CriticalKV may wrap: its scores multiply norms, so they must not be negative
NOT_NEGATIVE = ("snapkv", "cake", "h2o", "tova", "expected-attention", "capkv", "rest-kv")
WRAPPERS = (
    Method(
        "criticalkv",
        "indicators.critical:CriticalIndicator",
        "a base indicator, then its scores times the size of the projected value",
        ("values", "output_projection"),
        "the base's, and n D hidden per query head",
        "CriticalKV, Feng et al., 2025, arXiv 2502.03805",
        (
            Option("base", "snapkv", "the indicator within, whose options may be given too", str, choices=NOT_NEGATIVE),
            share("share", 0.5, "of the kept tokens that the base alone chooses"),
        ),
    ),
    Method(
        "chunkkv",
        "indicators.chunk:ChunkIndicator",
        "whole chunks by a base indicator, the same for all heads",
        (),
        "the base's",
        "ChunkKV, Liu et al., NeurIPS 2025, arXiv 2502.00299",
        (
            Option(
                "base",
                "snapkv",
                "the indicator within, whose options may be given too",
                str,
                choices=tuple(method.name for method in PLAIN),
            ),
            Option("chunk", 10, "tokens of a chunk", int, least=1),
        ),
    ),
)
INDICATORS = {method.name: method for method in (*PLAIN, *WRAPPERS)}
