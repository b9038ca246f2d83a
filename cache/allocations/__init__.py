"""The allocations by name: how layers, and the heads in a layer, share the budget. No torch here; a class is imported
when its policy is made."""

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
    )
}

HEADS = {
    method.name: method
    for method in (
        Method("equal", "allocations.equal:EqualHeads", "every head alike", (), "nothing", "the habit of most"),
    )
}
