"""Decoding with `hold`: a row at its limit gives up the least attended slot, at constant memory, for any length."""

from __future__ import annotations

import pytest
import torch
from cake_infer.engine import decode as steps
from cake_infer.engine.attention import Sdpa
from cake_infer.engine.sequence import Sequence

WINDOW = 8


def start(runner, ids, new_tokens):
    sequence = Sequence()
    limit = runner.prepare(sequence, len(ids), new_tokens)
    runner.feed(sequence, ids, limit)
    return sequence


class Listed:
    """The rule on plain lists: positions in a row, their attention at this step, and who goes."""

    def __init__(self, kept, limits):
        self.rows = {row: list(positions) for row, positions in kept.items()}
        self.limits = limits

    def step(self, attention, position):
        for row, positions in self.rows.items():
            full = len(positions) >= self.limits[row]
            positions.append(position)
            if full:
                old = [p for p in positions if p <= position - WINDOW]
                positions.remove(min(old, key=lambda p: (attention[row][p], p)))


@pytest.mark.parametrize("prompt", [120, 20, 3])
@pytest.mark.parametrize("options", [{}, {"model_type": "mistral", "sliding_window": 16}])
def test_rows_equal_a_plain_list_model_over_300_steps(
    tmp_path, write_checkpoint, dense, make_runner, random_ids, kept_positions, prompt, options
):
    folder = write_checkpoint(tmp_path / "model", **options)
    runner = make_runner(folder, policy="cake", budget=24, window=WINDOW, decode_policy="hold")
    ids, new = random_ids(prompt), random_ids(300, seed=1)
    sequence = start(runner, ids, len(new) + 1)
    arena, decoder = runner.tenancy.arena, runner.decoder
    kept = kept_positions(runner)
    evicted = prompt > 24
    listed = Listed(kept, {row: len(positions) if evicted else 24 for row, positions in kept.items()})
    nbytes, total = arena.nbytes, prompt + len(new)
    masks = {row: torch.ones(total, total, dtype=torch.bool) for row in kept}
    logits = []
    seen = {}

    def watch(layer, weights, positions):
        for head in range(weights.shape[0]):
            mean = weights[head].double().mean(0)
            seen[layer, head] = dict(zip(positions[head].tolist(), mean.tolist(), strict=True))

    class Watched(Sdpa):
        def decode(self, queries, keys, values, **keywords):
            out, weights = super().decode(queries, keys, values, **keywords)
            watch(len(seen) // decoder.config.num_kv_heads, weights, positions_of_next_layer())
            return out, weights

    def positions_of_next_layer():
        return arena.rows(len(seen) // decoder.config.num_kv_heads, extra=1)[2]

    for index, token in enumerate(new):
        position = prompt + index
        for row, mask in masks.items():
            mask[position, :position] = False
            mask[position, list(listed.rows[row])] = True
        seen.clear()
        with torch.inference_mode():
            logits.append(steps.step(decoder, arena, sequence, token, window=WINDOW, attention=Watched()))
        listed.step(seen, position)
        rows = kept_positions(runner)
        assert {row: sorted(p) for row, p in rows.items()} == {row: sorted(p) for row, p in listed.rows.items()}
    assert arena.nbytes == nbytes
    reference = dense(folder).logits(ids + new, masks)[prompt:]
    torch.testing.assert_close(torch.stack(logits).double(), reference, rtol=0, atol=1e-4)


def test_the_slot_given_up_is_chosen_by_the_mean_over_the_heads_of_its_group():
    weights = torch.tensor([[[0.1, 0.5, 0.2, 0.2], [0.3, 0.0, 0.5, 0.2]]])  # [1 KV head, 2 query heads, 4 columns]
    positions = torch.tensor([[0, 1, 2, 3]], dtype=torch.int32)
    assert steps.least_attended(weights, positions, 3, window=1).tolist() == [0]  # means .2 .25 .35, 3 is the window
    assert steps.least_attended(weights, positions, 3, window=3).tolist() == [0]
    equal = torch.full((1, 2, 4), 0.25)
    shuffled = torch.tensor([[2, 0, 3, 1]], dtype=torch.int32)
    assert steps.least_attended(equal, shuffled, 3, window=2).tolist() == [1], "of equals the oldest goes"


def test_the_slot_given_up_stays_aside_until_the_next_step():
    table = torch.arange(10.0).view(2, 5)
    steps.exchange(table, torch.tensor([1, 3]))
    assert table.tolist() == [[0, 4, 2, 3, 1], [5, 6, 7, 9, 8]]
    steps.exchange(table, torch.tensor([1, 3]))
    assert table.tolist() == torch.arange(10.0).view(2, 5).tolist()


def test_hold_with_a_policy_that_keeps_everything_is_refused(tmp_path, write_checkpoint, make_runner):
    from cake_infer.errors import OptionError

    runner = make_runner(write_checkpoint(tmp_path / "m"), policy="full", decode_policy="hold")
    with pytest.raises(OptionError, match="keeps everything"):
        runner.prepare(Sequence(), 10, 5)


@pytest.mark.parametrize("prompt", [120, 20])
def test_a_piece_after_a_held_reply_sees_what_the_reply_has_left_and_keeps_by_the_same_rule(
    tmp_path, write_checkpoint, dense, make_runner, random_ids, kept_positions, prompt
):
    folder = write_checkpoint(tmp_path / "model")
    runner = make_runner(folder, policy="cake", budget=24, window=WINDOW, decode_policy="hold")
    ids, new, turn = random_ids(prompt), random_ids(40, seed=1), random_ids(5, seed=2)
    sequence = start(runner, ids, len(new) + 1)
    total = prompt + len(new) + len(turn)
    masks = {row: torch.ones(total, total, dtype=torch.bool) for row in kept_positions(runner)}

    def see_only_kept(first, last):
        for row, positions in kept_positions(runner).items():
            masks[row][first:last, :first] = False
            masks[row][first:last, positions] = True

    for index, token in enumerate(new):
        see_only_kept(prompt + index, prompt + index + 1)
        with torch.inference_mode():
            steps.step(runner.decoder, runner.tenancy.arena, sequence, token, window=WINDOW)
    held = kept_positions(runner)
    assert sum(map(len, held.values())) == 24 * len(held)
    see_only_kept(prompt + len(new), total)
    runner.prepare(sequence, len(turn), 3)
    logits = runner.feed(sequence, turn, 3)
    model = dense(folder)
    torch.testing.assert_close(logits.double(), model.logits(ids + new + turn, masks)[-1], rtol=0, atol=1e-4)
    columns = {row: [*positions, *range(total - len(turn), total)] for row, positions in held.items()}
    model.assert_chosen(kept_positions(runner), model.cake(columns, total, budget=24, window=WINDOW))
