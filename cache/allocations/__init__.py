"""The allocations by name: how layers, and the heads in a layer, share the budget. No torch here; a class is imported
when its policy is made.
"""

from __future__ import annotations

from ..method import Method, Option

ALLOCATIONS = {
    method.name: method
    for method in (
        Method(
            "uniform",
            "allocations.uniform:UniformAllocation",
            "every layer alike",
            (),
            "nothing",
            "the habit of SnapKV, H2O, TOVA and others",
        ),
        Method(
            "cake",
            "allocations.cake:CakeAllocation",
            "by how spread out and how restless the window's attention is",
            ("window_queries",),
            "w n products per query head, shared with the indicator cake",
            "CAKE, Qin et al., ICLR 2025, arXiv 2503.12491",
            (
                Option("tau1", None, "temperature of the dispersion; default by model and budget", above=0),
                Option("tau2", None, "temperature of the shift; default by model and budget", above=0),
            ),
        ),
        Method(
            "pyramid",
            "allocations.pyramid:PyramidAllocation",
            "less from layer to layer, along a line",
            (),
            "nothing",
            "PyramidKV, Cai et al., arXiv 2406.02069",
            (Option("beta", 20.0, "how many times less than an equal budget the last layer gets", least=1),),
        ),
        Method(
            "d2o",
            "allocations.d2o:D2OAllocation",
            "by how evenly the tokens are attended, over all queries",
            ("column_sums",),
            "one variance per query head",
            "D2O, Wan et al., ICLR 2025, arXiv 2406.13035",
        ),
        Method(
            "vl-cache",
            "allocations.vlcache:VLCacheAllocation",
            "by the share of the window's attention that is not next to nothing",
            ("window_queries",),
            "w n products per query head",
            "VL-Cache, Tu et al., ICLR 2025, arXiv 2410.23317",
            (Option("threshold", 0.01, "share of a row's largest below which attention is nothing", above=0, most=1),),
        ),
        Method(
            "xkv",
            "allocations.xkv:XKVAllocation",
            "where one more token retains most of the window's attention",
            ("window_queries",),
            "w n products per query head and a sort",
            "in the spirit of XKV, Li et al., arXiv 2412.05896",
        ),
        Method(
            "lava",
            "allocations.lava:LavaAllocation",
            "by the entropy of the scores",
            (),
            "one pass over the scores",
            "LAVa, Shen et al., arXiv 2509.09754",
        ),
        Method(
            "squeeze",
            "allocations.squeeze:SqueezeAllocation",
            "less for layers whose attention hardly changes the hidden states; late: a prefill holds the whole cache",
            ("hidden_similarity",),
            "two norms a token, and the memory of a prefill without eviction",
            "SqueezeAttention, Wang et al., ICLR 2025, arXiv 2404.04793",
            (Option("idle", 0.35, "of an equal budget, for the layers that change least", above=0, most=1),),
            late=True,
        ),
        Method(
            "composite",
            "allocations.composite:CompositeAllocation",
            "by the mean score of the heads' best, second best and so on",
            (),
            "a sort of the scores",
            "KVCompose, arXiv 2509.05165",
        ),
        Method(
            "global",
            "allocations.everywhere:GlobalAllocation",
            "the best scores of all heads of all layers",
            (),
            "a sort of the scores, and a partition of those kept at every layer",
            "Layer-DefensiveKV, Feng et al., ICLR 2026, arXiv 2510.13334",
            heads=("own",),
        ),
        Method(
            "table",
            "allocations.table:TableAllocation",
            "shares from a file, per layer or per head",
            (),
            "nothing",
            "LKV, arXiv 2605.06676; HeadKV, Fu et al., ICLR 2025, arXiv 2410.19258; UNComp, arXiv 2410.03090",
            (
                Option("table", None, "a JSON or safetensors file with a value per layer or per head", str, file=True),
                Option("kind", "weights", "what the values are", str, choices=("weights", "lkv", "headkv", "uncomp")),
                Option("beta", 1.2, "headkv: 1/beta of the budget is shared by importance", least=1),
            ),
            heads=("own", "equal", "adaptive"),
        ),
    )
}

HEADS = {
    method.name: method
    for method in (
        Method("equal", "allocations.equal:EqualHeads", "every head alike", (), "nothing", "the habit of most"),
        Method(
            "adaptive",
            "allocations.adaptive:AdaptiveHeads",
            "a layer's slots go to its best scores, after a floor for each head",
            (),
            "a sort of the scores kept",
            "Ada-KV, Feng et al., NeurIPS 2025, arXiv 2407.11550",
            (Option("floor", 0.2, "share of a head's equal part that it keeps in any case", least=0, most=1),),
        ),
        Method(
            "own",
            "allocations.own:OwnHeads",
            "each head competes with all heads of all layers (allocations global and table)",
            (),
            "nothing",
            "Layer-DefensiveKV, HeadKV",
        ),
    )
}
