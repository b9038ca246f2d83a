"""Sequences to files and back: whose model a saved cache is of, and whether this engine can go on from it."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..cache.snapshot import Snapshot
from ..errors import SnapshotError
from ..models.headers import tensor_headers
from ..ranges import POSITIVE, Range
from .loading import dtype_name
from .sequence import QueryRing, Sequence

if TYPE_CHECKING:
    from .engine import Engine

log = logging.getLogger(__name__)

SAMPLES, SAMPLE_BYTES = 64, 4096  # of each weight file: another model's differ everywhere


def model_fingerprint(engine: Engine) -> str:
    """What tells a model from others: SHA-256 of the shapes and of samples of the weights as they are stored.

    Weights that are packed (`quant`) or converted (`dtype`) on loading are still the same model.
    """
    config = engine.config
    digest = hashlib.sha256()
    if engine.random_weights:
        digest.update(f"random {engine.weights_seed} {replace(config, rope=None)!r}".encode())  # type: ignore[arg-type]
        return digest.hexdigest()
    headers = tensor_headers(engine.model_path)
    for name, header in sorted(headers.items()):
        digest.update(f"{name} {header.dtype} {header.shape}".encode())
    for path in sorted({header.file for header in headers.values()}):
        size = path.stat().st_size
        with open(path, "rb") as file:
            for sample in range(SAMPLES):
                file.seek(size * sample // SAMPLES)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def pack(engine: Engine, sequence: Sequence, kind: str, **about: Any) -> Snapshot:
    """A sequence, whose rows are parked, as what a file holds. `about`: JSON values of that kind of file."""
    assert sequence.parked is not None, "only a text that was read can be saved"
    assert sequence.rotary is not None, "only a text that was read can be saved"
    rotary = sequence.rotary
    rows = sequence.parked.tight()
    known = {
        "kind": kind,
        "model": engine.model_path.name,
        "fingerprint": engine.fingerprint,
        "weights": weights_format(engine),
        "policy": sequence.kept_by or engine.runner.policy_of(sequence).describe(),
        "budget": sequence.budget,
        "window": engine.cache.window,
        "read": sequence.read,
        "rotary_length": rotary.seq_len,
        "frequencies": _frequencies(rotary.key),
    }
    queries = sequence.ring.copy() if sequence.ring is not None else None
    return Snapshot(rows, list(sequence.ids), queries, known | about)


def unpack(
    engine: Engine, snapshot: Snapshot, path: str | Path, kind: str, *, fixed: bool = False, warn: bool = True
) -> Sequence:
    """The sequence in a file. `fixed`: it keeps what it has, whatever follows (a document). `warn`: of weights in
    another format than those that it was read with.

    Raises SnapshotError for a file of another kind or model, or one whose rows this engine cannot go on from.
    """
    about = snapshot.about
    check_model(engine, about, path, kind)
    layout, config = engine.runner.layout, engine.config
    rows = snapshot.rows
    bits = None if rows.packed is None else rows.packed.bits
    if bits != layout.kv_bits:
        how = "without the option kv_bits" if bits is None else f"with the option kv_bits {bits}"
        raise SnapshotError(
            f"{path} has {_width(bits)} keys and values, and this engine's are {_width(layout.kv_bits)}: load the "
            f"model {how}, or make the file anew"
        )
    if rows.keys.dtype != layout.kv_dtype:
        names = dtype_name(rows.keys.dtype), dtype_name(layout.kv_dtype)
        raise SnapshotError(
            f"{path} has keys and values in {names[0]}, and this engine's are in {names[1]}: load the model with the "
            f"option kv_dtype {names[0]}"
        )
    shape = (layout.num_layers, layout.num_kv_heads)
    if rows.length.shape != shape or rows.keys.shape[1] != layout.head_dim:
        raise SnapshotError(f"{path} is inconsistent: its rows are not those of the model that it names")
    if any(not 0 <= token < config.vocab_size for token in snapshot.ids):
        raise SnapshotError(f"{path} is inconsistent: it has token ids that the model does not have")
    try:
        read, length, kept_by = about["read"], about["rotary_length"], str(about["policy"])
        budget, window = about["budget"], about["window"]
        if not (all(POSITIVE.has(number) for number in (length, window)) and (budget is None or POSITIVE.has(budget))):
            raise ValueError(length, window, budget)
        if not Range(0, len(snapshot.ids)).has(read):
            raise ValueError(read)
        rotary = engine.runner.rotary(length)
        same_frequencies = about["frequencies"] == _frequencies(rotary.key)
    except (LookupError, TypeError, ValueError, OverflowError):
        raise SnapshotError(f"{path} is inconsistent: what it says of its text makes no sense") from None
    if not same_frequencies:
        raise SnapshotError(
            f"{path} has keys turned by other rotary frequencies than this engine's: load the model with the option "
            "rope_scaling that it was made with"
        )
    if warn and about.get("weights") != weights_format(engine):
        log.warning(
            "%s was read with %s weights, and this engine has %s: its rows are used as they are",
            path,
            about.get("weights"),
            weights_format(engine),
        )
    sequence = Sequence(ids=list(snapshot.ids), rotary=rotary, parked=rows, read=read)
    if fixed:
        sequence.kept_by = kept_by
    else:
        sequence.budget = budget
    needed = engine.runner.rule is not None if fixed else budget is not None
    same_window = window == engine.cache.window
    if needed and not same_window:
        raise SnapshotError(
            f"{path} was made with a window of {window} tokens, and this engine's is {engine.cache.window}: load the "
            f"model with the option window {window}"
        )
    if snapshot.queries is not None and same_window:
        if snapshot.queries.shape != (config.num_layers, window, config.num_heads, config.head_dim):
            raise SnapshotError(f"{path} is inconsistent: its queries are not those of the model that it names")
        decoder = engine.runner.decoder
        sequence.ring = QueryRing(
            config.num_layers, window, config.num_heads, config.head_dim, decoder.compute_dtype, decoder.device
        )
        sequence.ring.restore(snapshot.queries)
    elif needed:
        what = "a reply that holds has no votes to go on from" if fixed else "nothing can be evicted"
        raise SnapshotError(f"{path} has no queries of its last tokens, so that {what}: make it with a budget")
    return sequence


def check_model(engine: Engine, about: dict[str, Any], path: str | Path, kind: str) -> None:
    """Raise SnapshotError for a file of another kind or model. Needs no weights, only their files."""
    if about.get("kind") != kind:
        use = {"document": "ask about it with the option cache", "chat": "go on with it in a chat, by /load"}
        found = about.get("kind")
        hint = f": {use[found]}" if isinstance(found, str) and found in use else ""
        raise SnapshotError(f"{path} holds a {found}, not a {kind}{hint}")
    if about.get("fingerprint") != engine.fingerprint:
        raise SnapshotError(
            f"{path} was made with another model ({about.get('model')}) than {engine.model_path.name}: load that one, "
            "or make the file anew"
        )


def are_messages(value: Any) -> bool:
    """Whether a file's JSON is a list of messages, each a role and a text."""
    if not isinstance(value, list) or not value:
        return False
    shape = {"role", "content"}
    return all(
        isinstance(message, dict) and set(message) == shape and all(isinstance(text, str) for text in message.values())
        for message in value
    )


def _width(bits: int | None) -> str:
    return "unpacked" if bits is None else f"{bits}-bit"


def weights_format(engine: Engine) -> str:
    """How the weights are held: int8, int4 or a dtype."""
    return engine.quant or dtype_name(engine.runner.decoder.dtype)


def _frequencies(key: object) -> str:
    return hashlib.sha256(repr(key).encode()).hexdigest()
