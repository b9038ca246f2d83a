"""With a merge the same tokens are kept, keys and all, and their values are folded at every cut of the cascade."""

from __future__ import annotations

import pytest
import torch
from cake_infer.cache.merges.base import Tokens
from cake_infer.cache.merges.cam import CamMerge
from cake_infer.cache.merges.d2o import D2OMerge
from cake_infer.engine.sequence import Sequence

WINDOW, BUDGET, PROMPT = 8, 24, 120
FORMS = {"cam": CamMerge(), "d2o": D2OMerge()}


@pytest.fixture
def folder(tmp_path, write_checkpoint):
    return write_checkpoint(
        tmp_path / "model", num_hidden_layers=4, num_attention_heads=6, num_key_value_heads=3, hidden_size=48
    )


def rows(runner, ids):
    """Every row after a prefill: positions, keys, values."""
    sequence = Sequence()
    runner.feed(sequence, ids, runner.prepare(sequence, len(ids), 4))
    arena = runner.tenancy.arena
    layers, heads = arena.length.shape
    return {
        (layer, head): [t.clone() for t in arena.row(layer, head)] for layer in range(layers) for head in range(heads)
    }


@pytest.mark.parametrize("heads", ["equal", "adaptive"])
@pytest.mark.parametrize("form", FORMS)
def test_keys_and_positions_are_those_without_a_merge_and_values_are_not(folder, make_runner, random_ids, form, heads):
    options = {"policy": "cake", "budget": BUDGET, "window": WINDOW, "heads": heads}
    plain = rows(make_runner(folder, **options), random_ids(PROMPT))
    merged = rows(make_runner(folder, merge=form, **options), random_ids(PROMPT))
    for row, (keys, values, positions) in plain.items():
        assert torch.equal(merged[row][2], positions)
        assert torch.equal(merged[row][0], keys)
        assert merged[row][1].isfinite().all()
        assert not torch.equal(merged[row][1], values), row


@pytest.mark.parametrize("form", FORMS)
def test_the_last_layer_is_cut_once_and_holds_one_fold_of_everything_evicted(
    folder, make_runner, random_ids, monkeypatch, form
):
    """Of the last layer all columns are known: fold what a run without eviction holds, by what this one evicted."""
    ids = random_ids(PROMPT)
    full = rows(make_runner(folder, policy="full", window=WINDOW), ids)
    plain = make_runner(folder, policy="cake", budget=BUDGET, window=WINDOW)
    kept = rows(plain, ids)
    merged = rows(make_runner(folder, policy="cake", budget=BUDGET, window=WINDOW, merge=form), ids)
    arena, scores = plain.tenancy.arena, scores_of(plain, ids, monkeypatch)
    for head in range(3):
        keys, values, positions = kept[3, head]
        start = int(arena.offset[3, head])
        stay = Tokens(keys, values.clone(), positions, arena.score[start : start + len(positions)])
        gone = sorted(set(range(PROMPT)) - set(positions.tolist()))
        columns = torch.tensor(gone)  # a full row lies in order of position
        FORMS[form].fold(stay, Tokens(full[3, head][0], full[3, head][1], full[3, head][2], scores[head], columns))
        torch.testing.assert_close(merged[3, head][1], stay.values, rtol=1e-4, atol=1e-5)


def scores_of(runner, ids, monkeypatch):
    """The last layer's indicator, `[kv_heads, columns]`."""
    from cake_infer.engine import keeping

    seen = []
    original = keeping.Chosen.__init__

    def watch(self, scored, *rest):
        seen.append(scored.indicator.clone())
        original(self, scored, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(keeping.Chosen, "__init__", watch)
        rows(runner, ids)
    return seen[-1]


@pytest.mark.parametrize("form", FORMS)
def test_an_earlier_layer_is_folded_at_every_cut(folder, make_runner, random_ids, monkeypatch, form):
    from cake_infer.engine import keeping

    cuts = []
    original = keeping.fold_tails

    def watched(arena, layer, lengths, window_start, merge):
        before = [arena.row(layer, head)[1].clone() for head in range(3)]
        old = arena.length[layer].tolist()
        original(arena, layer, lengths, window_start, merge)
        for head, length in enumerate(lengths):
            changed = not torch.equal(arena.row(layer, head)[1][:length], before[head][:length])
            assert torch.equal(arena.row(layer, head)[1][length:], before[head][length:])
            cuts.append((layer, old[head] > length, changed))

    monkeypatch.setattr(keeping, "fold_tails", watched)
    rows(make_runner(folder, budget=BUDGET, window=WINDOW, merge=form), random_ids(PROMPT))
    assert {layer for layer, cut, _ in cuts if cut} == {0, 1, 2}
    assert all(cut or not changed for _, cut, changed in cuts)
    assert sum(changed for _, cut, changed in cuts if cut) > sum(cut for _, cut, _ in cuts) // 2


def test_a_merged_cache_is_written_to_and_read_as_any_other(folder, make_runner, random_ids):
    from cake_infer.engine import decode

    runner, sequence = make_runner(folder, budget=BUDGET, window=WINDOW, merge="d2o"), Sequence()
    runner.feed(sequence, random_ids(PROMPT), runner.prepare(sequence, PROMPT, 8))
    with torch.inference_mode():
        for token in random_ids(7, seed=1):
            logits = decode.step(runner.decoder, runner.tenancy.arena, sequence, token, window=WINDOW)
            assert logits.isfinite().all()
    assert "merge d2o" in runner.policy(BUDGET).describe()


@pytest.mark.parametrize("form", FORMS)
def test_values_are_folded_where_rows_are_packed_too(folder, make_runner, random_ids, form):
    """8 bits are close to the same folds in full precision, cut by cut, and keys and positions are not touched."""
    options = {"policy": "cake", "budget": 50, "window": WINDOW}
    ids = random_ids(PROMPT)
    wide = rows(make_runner(folder, merge=form, **options), ids)
    found = {}
    for name, merge in (("plain", None), ("merged", form)):
        runner = make_runner(folder, merge=merge, kv_bits=8, **options)
        rows(runner, ids)
        found[name] = {row: runner.tenancy.arena.tokens(*row) for row in wide}
    changed = missed = 0.0
    for row, (_, values, positions) in wide.items():
        assert torch.equal(found["merged"][row][2], positions)
        for part in (0, 2, 3):
            assert torch.equal(found["merged"][row][part], found["plain"][row][part])
        changed += float((found["plain"][row][1] - values).abs().mean())
        missed += float((found["merged"][row][1] - values).abs().mean())
    assert changed / len(wide) > 0.03, "nothing was folded: nothing is compared"
    assert missed < 0.25 * changed, (missed, changed)
