"""Every part of the check by its name."""

from __future__ import annotations

import decoding
import exact
import peers
import products
import reading
import right
import texts

PARTS = {
    "kernels": exact.kernels,
    "ids": right.ids,
    "batch": right.batch,
    "families": right.families,
    "text": texts.text,
    "bandwidth": decoding.bandwidth,
    "decode": decoding.decode,
    "peers": peers.peers,
    "launches": decoding.launches,
    "small": decoding.small,
    "products": products.products,
    "prefill": reading.prefill,
    "packed": decoding.packed,
    "int8": decoding.int8,
}
