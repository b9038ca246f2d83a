"""Sequences whose rows are there without anybody having read them: random numbers of any length, to time decoding."""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import torch
from setting import Check, free, generation, no_waiting, sync

GROUP = 32  # slots of a packed group


class Filled:
    """`batch` sequences of `total` tokens, their rows, `lengths` slots a layer, full of random numbers.

    weights, kv: bytes that a step has to read: the matrices it multiplies, the embedding of its tokens, and the rows.
    options: of the replies.
    """

    def __init__(
        self, check: Check, runner: Any, lengths: np.ndarray, total: int, batch: int, steps: int, **options: Any
    ) -> None:
        from cake_infer.cache.layout import ArenaSize, kept_bytes
        from cake_infer.cache.shared import SharedArena
        from cake_infer.engine.seat import Seat
        from cake_infer.engine.sequence import QueryRing, Sequence

        config, layout = runner.decoder.config, runner.layout
        rows = np.repeat(lengths[:, None], layout.num_kv_heads, 1).astype(np.int64)  # [layers, kv_heads]
        inside, packed = rows, np.zeros_like(rows)
        if layout.kv_bits is not None:
            inside = np.minimum(rows, layout.window)
            packed = (rows - inside) // GROUP * GROUP
        room = steps + 3
        capacity = inside + (room if layout.kv_bits is None else GROUP)
        behind = packed + (0 if layout.kv_bits is None else (room // GROUP + 1) * GROUP)
        size = ArenaSize(0, 0, int(capacity.sum()), int(behind.sum()) if layout.kv_bits is not None else 0)
        self.runner, self.shared = runner, SharedArena(layout, check.device, batch=batch)
        self.shared.reserve([size] * batch)
        _fill(self.shared, total)
        self.seats = []
        for _ in range(batch):
            arena = self.shared.admit(size)
            arena.length[:], arena.capacity[:] = inside, capacity
            arena.offset[:] = arena.first + (capacity.cumsum() - capacity.ravel()).reshape(capacity.shape)
            if layout.kv_bits is not None:
                part = arena.packed
                part.length[:], part.capacity[:] = packed, behind
                part.offset[:] = part.first + (behind.cumsum() - behind.ravel()).reshape(behind.shape)
            sequence = Sequence(ids=[5] * total, rotary=runner.rotary(total + room))
            if runner.hold:
                sequence.limit = inside.copy()
            if runner.cache.policy != "full":
                shape = (config.num_layers, runner.cache.window, config.num_heads, config.head_dim)
                sequence.ring = QueryRing(*shape, runner.decoder.compute_dtype, check.device)
            picker = runner.picker(sequence, generation(max_new_tokens=room, **options), room, frozenset())
            self.seats.append(Seat(sequence, picker, 5, arena))
        decoder = runner.decoder
        tied = decoder.lm_head is decoder.embed_tokens
        row = decoder.embed_tokens.nbytes // config.vocab_size
        self.weights = decoder.nbytes - (0 if tied else decoder.embed_tokens.nbytes) + batch * row
        held = (inside + packed)[:, 0].tolist()
        self.kv = batch * layout.num_kv_heads * sum(kept_bytes(layout, int(count)) for count in held)

    @property
    def moved(self) -> int:
        """Bytes that a step has to read."""
        return self.weights + self.kv

    def steps(self, count: int) -> None:
        for _ in range(count):
            for chosen in self.runner.ahead.advance(self.seats, room=len(self.seats)):
                chosen.seat.picker.accept(chosen.token, chosen.logits)

    def seconds(self, check: Check) -> float:
        """Of one step: the median of some timings, each of some steps, behind those that compile and capture."""
        scale, found = check.scale, []
        with torch.inference_mode():
            self.steps(scale.warm)
            for _ in range(scale.rounds):
                sync()
                started = time.perf_counter()
                self.steps(scale.steps)
                sync()
                found.append((time.perf_counter() - started) / scale.steps)
        return statistics.median(found)

    def waits(self, count: int) -> str:
        """What waits for the device in so many further steps; "" if nothing does."""
        try:
            with torch.inference_mode(), no_waiting():
                self.steps(count)
        except RuntimeError as error:
            return str(error).partition("\n")[0]
        return ""

    def close(self) -> None:
        self.runner.ahead.land()
        self.shared.clear()
        self.seats = []
        free()


def needed(check: Check) -> int:
    """Steps that `Filled.seconds` makes."""
    return check.scale.warm + check.scale.rounds * check.scale.steps


def _fill(shared: Any, total: int) -> None:
    """Random numbers everywhere, as keys and values are; a packed store gets random codes of small steps."""
    position = shared.store.position
    position.copy_(torch.arange(position.numel(), device=position.device) % total)
    for table in (shared.store.keys, shared.store.values):
        for part in table.split(1 << 22):
            part.normal_()
    if shared.packed is not None:
        for codes in (shared.packed.key_codes, shared.packed.value_codes):
            codes.random_(0, 256)
        for name in ("key", "value"):
            getattr(shared.packed, f"{name}_scale").uniform_(0.01, 0.02)
            getattr(shared.packed, f"{name}_minimum").normal_()
