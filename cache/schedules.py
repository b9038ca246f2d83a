"""When a prefill evicts, by name. No torch here. When a reply does is the hold rules' `interval`, see `holds`."""

from __future__ import annotations

from .method import Method

SCHEDULES = {
    method.name: method
    for method in (
        Method(
            "cascade",
            "cascade:Cascade",
            "layer by layer: each layer that has been read takes its share of those before it",
            (),
            "the memory of the budget and one layer",
            "CAKE, Qin et al., ICLR 2025, arXiv 2503.12491",
        ),
        Method(
            "late",
            "cascade:Cascade",
            "once, when all layers have been read: the same tokens, but merged values are folded once",
            (),
            "the memory of a prefill without eviction",
            "the habit of SnapKV, Ada-KV and others",
        ),
    )
}
