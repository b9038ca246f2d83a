"""A policy that merges is compared by what its own prefill leaves: the values are other than the full cache's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cake_infer.cache.config import CacheConfig
from cake_infer.cache.policies import make_policy
from cake_infer.engine.evaluation.fidelity import Example, fidelity
from cake_infer.engine.evaluation.own_prefill import bytes_of_own, size_of_own
from cake_infer.engine.evaluation.replies import greedy_replies
from cake_infer.engine.evaluation.study import Cell, read
from cake_infer.engine.pieces import ListedPieces
from cake_infer.engine.piecewise import read_pieces
from cake_infer.engine.sequence import Sequence
from cake_infer.engine.timing import Timing
from cake_infer.errors import OptionError

WINDOW, BUDGET, PROMPT = 8, 24, 100
MERGING = [
    {"policy": "cake", "merge": "d2o"},
    {"policy": "d2o"},
    {"policy": "snapkv", "merge": "cam", "heads": "adaptive"},
    {"policy": "cake", "merge": "d2o", "schedule": "late"},
]


@pytest.fixture
def folder(tmp_path, write_checkpoint):
    return write_checkpoint(tmp_path / "model", num_hidden_layers=4)


def cell(runner, options, budget=BUDGET):
    return Cell(make_policy(CacheConfig(window=WINDOW, **options), runner.model, budget), budget)


def real_rows(make_runner, folder, ids, options, step="eager"):
    """A runner that has read the prompt with the policy as its own, and the sequence."""
    budget = {} if options["policy"] == "full" else {"budget": BUDGET}
    runner, sequence = make_runner(folder, window=WINDOW, step=step, **budget, **options), Sequence()
    logits = runner.feed(sequence, ids, runner.prepare(sequence, len(ids), 20))
    return runner, sequence, logits


def test_its_rows_are_those_of_a_run_with_the_policy_and_lie_where_no_merge_would_keep_them(
    folder, make_runner, random_ids
):
    ids = random_ids(PROMPT)
    runner = make_runner(folder, policy="full", window=WINDOW)
    reading = read(runner, ids, [cell(runner, one) for one in MERGING], new_tokens=4)
    for options, kept in zip(MERGING, reading.kept, strict=True):
        real, _, logits = real_rows(make_runner, folder, ids, options)
        torch.testing.assert_close(reading.logits, logits)
        changed = 0
        for layer in range(4):
            for head in range(2):
                keys, values, positions = kept.own_row(layer, head)
                for one, other in zip((keys, values, positions), real.tenancy.arena.row(layer, head), strict=True):
                    assert torch.equal(one, other), (options, layer, head)
                assert sorted(positions.tolist()) == sorted(kept.columns(layer, head).tolist())
                whole = runner.tenancy.arena.row(layer, head)
                assert torch.equal(keys, whole[0][positions.long()])
                changed += not torch.equal(values, whole[1][positions.long()])
        assert changed == 8, options


@pytest.mark.parametrize("suffix", [0, 5])
def test_the_figures_are_those_of_decoding_over_the_merged_rows(folder, make_runner, random_ids, suffix):
    prefix, question, tokens = random_ids(PROMPT), random_ids(suffix, seed=1), 8
    runner = make_runner(folder, policy="full", window=WINDOW, step="eager")
    plain = [{**one, "merge": "none"} for one in MERGING[:1]]
    cells = [cell(runner, one) for one in [*MERGING, *plain]]
    found = fidelity(runner, Example(tuple(prefix), tuple(question)), cells, tokens=tokens)
    continuation = []
    full, sequence, logits = real_rows(make_runner, folder, prefix, {"policy": "full"})
    with torch.inference_mode():
        expected = []
        for token in question:
            logits = full.step(full.tenancy.arena, sequence, token, window=WINDOW)
        for _ in range(tokens):
            expected.append(logits.clone())
            continuation.append(int(logits.argmax()))
            logits = full.step(full.tenancy.arena, sequence, continuation[-1], window=WINDOW)
        reference = torch.log_softmax(torch.stack(expected).double(), -1)
        for options, result in zip([*MERGING, *plain], found, strict=True):
            real, sequence, logits = real_rows(make_runner, folder, prefix, options)
            seen = []
            for token in [*question, *continuation]:
                seen.append(logits.clone())
                logits = real.step(real.tenancy.arena, sequence, token, window=WINDOW)
            # decoding reads the question token by token where the comparison reads it as a piece of its own
            other = torch.log_softmax(torch.stack(seen[suffix:]).double(), -1)
            kl = (reference.exp() * (reference - other)).sum(-1)[0 if suffix else 1 :]
            assert result.kl == pytest.approx(float(kl.mean()), rel=2e-3, abs=1e-6), options
    assert found[0].kl != found[-1].kl, "the merge changes nothing: nothing is compared"


def test_a_reply_is_that_of_a_run_with_the_policy_and_leaves_its_rows_as_they_were(folder, make_runner, random_ids):
    ids, options = random_ids(PROMPT), MERGING[0]
    runner = make_runner(folder, policy="full", window=WINDOW, step="eager")
    reading = read(runner, ids, [cell(runner, options)], new_tokens=12)
    kept = reading.kept[0]
    values = kept.rows.values.clone()
    replies = [reply for _ in range(2) for reply in greedy_replies(runner, reading, [kept], [], 10)]
    real, sequence, logits = real_rows(make_runner, folder, ids, options)
    with torch.inference_mode():
        expected = [int(logits.argmax())]
        while len(expected) < 10:
            logits = real.step(real.tenancy.arena, sequence, expected[-1], window=WINDOW)
            expected.append(int(logits.argmax()))
    assert replies == [expected, expected]
    assert torch.equal(kept.rows.values, values)


def test_a_question_of_tokens_alone_needs_no_prefill_of_its_own_and_progress_runs_through_once(
    folder, make_runner, random_ids
):
    ids, told = random_ids(PROMPT), []
    runner = make_runner(folder, policy="full", window=WINDOW, chunk=40)
    cells = [cell(runner, MERGING[0]), cell(runner, MERGING[1]), cell(runner, MERGING[0], budget=PROMPT)]

    def on_chunk(layer, done, total):
        told.append(layer * total + done)

    reading = read(runner, ids, cells, new_tokens=1, on_chunk=on_chunk)
    assert [kept is not None and kept.rows is not None for kept in reading.kept] == [True, True, False]
    assert told == sorted(told)
    assert told[-1] == 4 * PROMPT
    assert len(told) == 3 * 4 * 3  # prefills, layers, chunks
    told.clear()
    reading = read(runner, ids, cells, new_tokens=1, on_chunk=on_chunk, rows=False)
    assert all(kept is None or kept.rows is None for kept in reading.kept)
    assert len(told) == 4 * 3


def test_what_it_takes_is_counted(folder, make_runner):
    runner = make_runner(folder, policy="full", window=WINDOW)
    policy, late = (cell(runner, MERGING[number]).policy for number in (0, 3))
    slot, rows = runner.layout.kept_slot_bytes, 4 * 2
    assert bytes_of_own(runner, [], PROMPT) == 0
    arena = 2 * PROMPT * slot + rows * BUDGET * slot
    assert (
        bytes_of_own(runner, [(policy, BUDGET, None), (policy, 16, None)], PROMPT)
        == rows * (BUDGET + 16) * slot + arena
    )
    assert size_of_own(runner, late, BUDGET, None, PROMPT).kept == rows * PROMPT


@pytest.mark.parametrize("options", [{"policy": "cake"}, {"policy": "cake", "merge": "d2o"}, {"policy": "ada-kv"}])
def test_pieces_are_compared_by_the_rows_of_a_run_in_pieces(folder, make_runner, random_ids, options):
    ids, tokens = random_ids(PROMPT), 6
    runner = make_runner(folder, policy="full", window=WINDOW, step="eager")
    pieces, whole = (replace(cell(runner, options), piece=piece) for piece in (30, None))
    reading = read(runner, ids, [pieces, whole], new_tokens=tokens)
    real, sequence = make_runner(folder, window=WINDOW, step="eager", budget=BUDGET, **options), Sequence()
    read_pieces(real, sequence, ListedPieces(ids, 30), tokens, timing=Timing())
    kept, other = reading.kept
    assert kept.lengths == real.tenancy.arena.length.tolist()
    assert kept.slots == other.slots
    for layer in range(4):
        for head in range(2):
            for one, row in zip(kept.own_row(layer, head), real.tenancy.arena.row(layer, head), strict=True):
                assert torch.equal(one, row)
    found = fidelity(runner, Example(tuple(ids)), [pieces, whole], tokens=tokens)
    assert found[0].kl != found[1].kl
    again = read(runner, ids, [replace(pieces, piece=PROMPT)], new_tokens=tokens).kept[0]
    if "merge" not in options:
        for layer in range(4):
            for head in range(2):
                assert set(again.own_row(layer, head)[2].tolist()) == set(other.columns(layer, head).tolist())


def test_where_only_the_kept_tokens_are_asked_for_pieces_are_refused(folder, make_runner, random_ids):
    runner = make_runner(folder, policy="full", window=WINDOW)
    with pytest.raises(OptionError, match="leave pieces out"):
        read(runner, random_ids(PROMPT), [replace(cell(runner, {"policy": "cake"}), piece=9)], new_tokens=2, rows=False)
