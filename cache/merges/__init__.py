"""Merging by name: what a kept token takes over of those that are evicted. No torch here; a class is imported when its
policy is made. Only values change: keys carry the rotation of their own position, and the mean of two is none."""

from __future__ import annotations

from ..method import Method, Option

MERGES = {
    method.name: method
    for method in (
        Method("none", "merges.none:NoMerge", "evicted tokens are dropped", (), "nothing", "the habit of most"),
        Method(
            "cam",
            "merges.cam:CamMerge",
            "into the kept tokens that follow, by the ratio of their scores",
            (),
            "one pass over the evicted values",
            "CaM, Zhang et al., ICML 2024",
            (Option("followers", 32, "kept tokens that an evicted value is spread over", int, least=1),),
        ),
        Method(
            "d2o",
            "merges.d2o:D2OMerge",
            "into the kept token with the most similar key, if it is similar enough",
            (),
            "evicted x kept products of keys per KV head",
            "D2O, Wan et al., ICLR 2025, arXiv 2406.13035; weights of NVIDIA kvpress, MergingPress",
            (Option("similarity", None, "least cosine of the keys; default the mean of what is evicted together"),),
        ),
    )
}
