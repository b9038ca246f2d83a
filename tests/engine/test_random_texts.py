"""Random conversations in arenas of exactly the size that the arithmetic gives, against the masked dense model."""

from __future__ import annotations

import math
import random

import pytest
import torch
from cake_infer.cache.arena import Arena
from cake_infer.cache.layout import ArenaSize
from cake_infer.engine import decode as steps
from cake_infer.engine.sequence import Sequence

WINDOW = 4


def poison(runner):
    """Overwrite every slot that no row owns with NaN: it must never reach a result."""
    arena = runner.tenancy.arena
    owned = torch.zeros(arena.keys.shape[0], dtype=torch.bool)
    for offset, length in zip(arena.offset.flat, arena.length.flat, strict=True):
        owned[offset : offset + length] = True
    arena.keys[~owned], arena.values[~owned] = math.nan, math.nan


def drop_some(runner, generator):
    """Let every head lose a few of its least wanted tokens, as a policy that treats heads apart would."""
    arena = runner.tenancy.arena
    for layer in range(runner.layout.num_layers):
        for head in range(runner.layout.num_kv_heads):
            arena.length[layer, head] -= generator.randint(0, min(2, max(0, int(arena.length[layer, head]) - WINDOW)))


class Watched:
    """A sequence beside the dense model's masks: whatever is fed sees of the past only what the rows hold then."""

    def __init__(self, runner, model, kept_positions, total):
        self.runner, self.model, self.kept_positions = runner, model, kept_positions
        self.sequence = Sequence()
        layers, heads = runner.layout.num_layers, runner.layout.num_kv_heads
        rows = [(layer, head) for layer in range(layers) for head in range(heads)]
        self.masks = {row: torch.ones(total, total, dtype=torch.bool) for row in rows}
        self.logits, self.positions = [], []

    def feed(self, ids, new_tokens):
        self._see(len(ids))
        tenancy = self.runner.tenancy  # the arena is made anew for every piece, so that it never has room to spare
        tenancy.set_aside()
        if self.sequence.parked is not None:
            self.sequence.parked.capacity = self.sequence.parked.length
        tenancy.arena = Arena(tenancy.layout, ArenaSize(0, 0, 0))
        limit = self.runner.prepare(self.sequence, len(ids), new_tokens)
        self.logits.append(self.runner.feed(self.sequence, ids, limit))
        self.positions.append(self.sequence.total - 1)
        poison(self.runner)

    def step(self, token):
        self.runner.tenancy.activate(self.sequence)
        self._see(1)
        with torch.inference_mode():
            logits = steps.step(self.runner.decoder, self.runner.tenancy.arena, self.sequence, token, window=WINDOW)
        self.logits.append(logits)
        self.positions.append(self.sequence.total - 1)

    def _see(self, count):
        first = self.sequence.total
        if first:
            self.runner.tenancy.activate(self.sequence)
            for row, positions in self.kept_positions(self.runner).items():
                self.masks[row][first : first + count, :first] = False
                self.masks[row][first : first + count, positions] = True

    def check(self, tolerance):
        total = self.sequence.total
        masks = {row: mask[:total, :total] for row, mask in self.masks.items()}
        reference = self.model.logits(self.sequence.ids, masks)[self.positions]
        torch.testing.assert_close(torch.stack(self.logits).double(), reference, rtol=0, atol=tolerance)


@pytest.mark.parametrize("seed", range(30))
def test_random_conversations_equal_the_masked_dense_model_in_arenas_without_a_slot_to_spare(
    tmp_path, write_checkpoint, dense, make_runner, random_ids, kept_positions, seed
):
    generator = random.Random(seed)
    decode_policy = generator.choice(["grow", "hold"])
    kv_dtype = torch.bfloat16 if seed % 6 == 5 else None
    options = {"num_hidden_layers": generator.choice([1, 3]), "num_key_value_heads": generator.choice([1, 2, 4])}
    if generator.random() < 0.4:
        options |= {"model_type": "mistral", "sliding_window": generator.choice([3, 11, 40])}
    folder = write_checkpoint(tmp_path / "model", **options)
    runner = make_runner(
        folder,
        budget=generator.choice([4, 9, 20]),
        window=WINDOW,
        chunk=generator.choice([1, 6, 64]),
        kv_dtype=kv_dtype,
        decode_policy=decode_policy,
    )
    texts = [Watched(runner, dense(folder), kept_positions, 400) for _ in range(2)]
    for turn in range(6):
        text = texts[0] if generator.random() < 0.7 else texts[1]
        new = generator.randint(1, 8)
        if turn and generator.random() < 0.3 and text.sequence.budget is not None:
            text.sequence.budget = generator.choice([4, 9, 20])
        text.feed(random_ids(generator.choice([1, 2, 3, 5, 12, 40]), seed=100 * seed + turn), new + 1)
        for token in random_ids(new, seed=turn):
            text.step(token)
        if generator.random() < 0.4 and decode_policy == "grow":
            drop_some(runner, generator)
    for text in texts:
        if text.sequence.total:
            text.check(1e-4 if kv_dtype is None else 0.15)
