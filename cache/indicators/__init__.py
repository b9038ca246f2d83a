"""The indicators by name: how much each token of a layer is worth keeping. No torch here; a class is imported when
its policy is made. docs/methods.md says where the authors' code differs."""

from __future__ import annotations

from ..method import Method, Option

WINDOW = ("window_queries",)
POOL = Option("pool", 7, "odd width of the pooling over neighbouring positions", int, least=1, odd=True)

INDICATORS = {
    method.name: method
    for method in (
        Method(
            "cake",
            "indicators.cake:CakeIndicator",
            "mean and variance of the window's attention",
            WINDOW,
            "w n products per query head",
            "CAKE, Qin et al., ICLR 2025, arXiv 2503.12491",
            (
                Option("gamma", 200.0, "weight of the variance", least=0),
                Option("pool", 5, "odd width of the average over neighbouring positions", int, least=1, odd=True),
            ),
        ),
        Method(
            "streaming-llm",
            "indicators.streaming:StreamingIndicator",
            "the first tokens and the last ones",
            (),
            "nothing",
            "StreamingLLM, Xiao et al., ICLR 2024, arXiv 2309.17453",
            (Option("sinks", 4, "first tokens that are always kept", int, least=0),),
        ),
        Method(
            "snapkv",
            "indicators.snapkv:SnapKVIndicator",
            "the window's attention, pooled",
            WINDOW,
            "w n products per query head",
            "SnapKV, Li et al., NeurIPS 2024, arXiv 2404.14469",
            (POOL, Option("pooling", "max", "how neighbours are joined", str, choices=("max", "avg"))),
        ),
    )
}
