"""The hold rules by name: what a row at its limit gives up while a reply is written. No torch here; a class is imported
when decoding begins. `attention` is the engine's own rule, which every runner of a step has, one slot for each token;
what looks at each step in another way runs in plain torch."""

from __future__ import annotations

from ..method import WIDEST, Method, Option

WINDOW = ("window_queries",)
INTERVAL = Option("interval", 128, "new tokens between two cuts", int, least=1)
EACH = Option("interval", 1, "new tokens between two cuts; 1 gives up a slot for each", int, least=1)


def share(name: str, default: float, help: str) -> Option:
    """A number from 0 to 1."""
    return Option(name, default, help, least=0, most=1)


HOLDS = {
    method.name: method
    for method in (
        Method(
            "attention",
            "holds.attention:AttentionHold",
            "the slot that the newest query attends to least, head by head",
            (),
            "nothing",
            "TOVA's rule for each KV head, as in CAKE's code without its pooling",
            (EACH,),
        ),
        Method(
            "tova",
            "holds.tova:TovaHold",
            "the token that the newest query attends to least, all heads together",
            (),
            "nothing",
            "TOVA, Oren et al., 2024, arXiv 2401.06104",
            (EACH,),
        ),
        Method(
            "h2o",
            "holds.h2o:H2OHold",
            "the slot that has gathered least attention",
            (),
            "one sum a slot",
            "H2O, Zhang et al., NeurIPS 2023, arXiv 2306.14048",
            (share("recent", 0.5, "of a row, for the last tokens"), EACH),
        ),
        Method(
            "cake",
            "holds.cake:CakeHold",
            "the slot whose neighbourhood the newest query attends to least",
            (),
            "a sort of each row",
            "CAKE's code, Qin et al., ICLR 2025, arXiv 2503.12491",
            (
                Option(
                    "pool",
                    5,
                    "odd width of the average over neighbouring positions",
                    int,
                    least=1,
                    most=WIDEST,
                    odd=True,
                ),
                EACH,
            ),
        ),
        Method(
            "streaming-llm",
            "holds.streaming:StreamingHold",
            "the oldest slot behind the sinks: a ring",
            (),
            "nothing",
            "StreamingLLM, Xiao et al., ICLR 2024, arXiv 2309.17453",
            (Option("sinks", 4, "first tokens that are always kept", int, least=0), EACH),
        ),
        Method(
            "g-kv",
            "holds.gkv:GKVHold",
            "every so many tokens, by the window's attention, what it was before, and likeness to later keys",
            WINDOW,
            "a row squared, each interval",
            "G-KV, 2025, arXiv 2512.00504",
            (
                INTERVAL,
                Option("votes", 16, "last queries that vote", int, least=1),
                share("decay", 0.8, "of an older importance"),
                share("mix", 0.5, "weight of importance against redundancy"),
                share("alike", 0.5, "cosine above which the latest like key stands for the others"),
            ),
        ),
        Method(
            "r-kv",
            "holds.rkv:RKVHold",
            "every so many tokens, by the window's attention and likeness to later keys",
            WINDOW,
            "a row squared, each interval",
            "R-KV, Cai et al., 2025, arXiv 2505.24133",
            (
                INTERVAL,
                Option("votes", 8, "last queries that vote", int, least=1),
                share("mix", 0.1, "weight of importance against redundancy"),
                share("alike", 0.5, "cosine above which the latest like key stands for the others"),
                Option(
                    "pool",
                    7,
                    "odd width of the maximum over neighbouring positions",
                    int,
                    least=1,
                    most=WIDEST,
                    odd=True,
                ),
            ),
        ),
    )
}
