"""Caches that decode side by side: each is what its own engine has, and what they lose is as a dense model says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cake_infer.cache.budget import Budget
from cake_infer.engine.available import Available
from cake_infer.engine.evaluation import memory
from cake_infer.engine.evaluation.combination import combinations, make_cell
from cake_infer.engine.evaluation.generation import drift
from cake_infer.engine.evaluation.lockstep import Lockstep
from cake_infer.engine.pieces import ListedPieces
from cake_infer.engine.piecewise import read_pieces
from cake_infer.engine.sequence import Sequence
from cake_infer.engine.timing import Timing
from cake_infer.errors import MemoryLimit

WINDOW, BUDGET, PROMPT, TOKENS, ROWS = 8, 24, 70, 41, 6

POLICIES = [
    "full",
    "cake",
    "cake,hold_by=attention",
    "cake,recascade=12",
    "cake,hold_by=tova",
    "cake,hold_by=attention,interval=7",
    "cake,heads=adaptive,hold_by=streaming-llm,interval=7",
    "cake,hold_by=g-kv,interval=7",
    "cake,hold_by=r-kv,interval=7",
    "h2o,hold_by=h2o",
    "d2o,hold_by=attention",
    "cake,pieces=32,hold_by=attention",
]


def lockstep(runner, ids, policies, tokens=TOKENS, budget=BUDGET):
    found = combinations(list(policies), WINDOW, decoding=True)
    return Lockstep(runner, ids, [make_cell(runner, one, Budget.parse(str(budget)), len(ids)) for one in found], tokens)


def positions(arena):
    layers, heads = arena.length.shape
    return {(a, b): arena.row(a, b)[2].tolist() for a in range(layers) for b in range(heads)}


def alone(make_runner, folder, text, ids, budget, step):
    """An engine of its own: the prompt read, ready for a reply."""
    (policy,) = combinations([text], WINDOW, decoding=True)
    config = policy.config
    full = config.policy == "full"
    runner = make_runner(
        folder,
        step=step,
        **{} if full else {"budget": budget},
        policy=config.policy,
        window=config.window,
        heads=config.heads,
        decode_policy=config.decode_policy,
        hold_by=config.hold_by,
        recascade=config.recascade,
        policy_options=config.policy_options,
    )
    sequence = Sequence()
    if policy.piece is None:
        runner.feed(sequence, ids, runner.prepare(sequence, len(ids), TOKENS))
    else:
        _, limit = read_pieces(runner, sequence, ListedPieces(ids, policy.piece), TOKENS, timing=Timing())
        runner.make_room(runner.tenancy.arena, sequence, limit)
    return runner, sequence


@pytest.mark.parametrize(("step", "prompt"), [("eager", 15), ("compiled", PROMPT)])
def test_each_follower_is_what_an_engine_of_its_own_would_be(
    tmp_path, write_checkpoint, make_runner, random_ids, step, prompt
):
    """Whatever the others do beside it: the same logits at every step, and the same tokens in every row."""
    if step == "compiled":
        pytest.importorskip("numba")
    folder = write_checkpoint(tmp_path / "model", head_dim=16)
    ids, new = random_ids(prompt), random_ids(TOKENS, seed=1)
    with torch.inference_mode():
        together = lockstep(make_runner(folder, policy="full", window=WINDOW, step=step), ids, POLICIES)
        logits = [together.feed(token) for token in new]
        for number, (text, follower) in enumerate(zip(POLICIES, together.followers, strict=True)):
            # the compiled step has no form for these rules, so that both run in plain torch
            own_step = "eager" if text in ("cake,hold_by=tova", "h2o,hold_by=h2o") else step
            runner, sequence = alone(make_runner, folder, text, ids, BUDGET, own_step)
            arena = runner.tenancy.arena
            for index, token in enumerate(new):
                expected = runner.step(arena, sequence, token, window=WINDOW)
                torch.testing.assert_close(logits[index][number], expected, rtol=1e-4, atol=1e-4, msg=text)
            mine, theirs = positions(follower.arena), positions(arena)
            assert {row: sorted(held) for row, held in mine.items()} == {
                row: sorted(held) for row, held in theirs.items()
            }, text
            assert follower.sequence.ids == [*ids, *new]


def test_a_prompt_is_read_once_for_those_that_differ_in_decoding_alone(
    tmp_path, write_checkpoint, make_runner, random_ids, monkeypatch
):
    from cake_infer.engine.evaluation import lockstep as module

    read, original = [], module.prefill_alone
    monkeypatch.setattr(
        module, "prefill_alone", lambda *a, **k: (read.append((a[2].describe(), a[3])), original(*a, **k))[1]
    )
    runner = make_runner(write_checkpoint(tmp_path / "model"), policy="full", window=WINDOW, step="eager")
    lockstep(runner, random_ids(PROMPT), ["cake", "cake,hold_by=tova", "snapkv", "cake,recascade=4", "cake,gamma=1"])
    assert len(read) == 3
    assert len({one for one, _ in read}) == 3


@pytest.mark.parametrize("options", [{}, {"model_type": "mistral", "sliding_window": 30}], ids=["plain", "sliding"])
def test_losses_are_those_of_a_masked_float64_model(
    tmp_path, write_checkpoint, dense, make_runner, random_ids, monkeypatch, options
):
    """Each token sees what the rows held when it was fed, and itself; KL, agreement and loss follow from the logits."""
    policies = [
        "cake",
        "cake,hold_by=attention",
        "cake,recascade=12",
        "cake,hold_by=tova",
        "snapkv,hold_by=r-kv,interval=7",
    ]
    folder = write_checkpoint(tmp_path / "model", **options)
    runner = make_runner(folder, policy="full", window=WINDOW, step="eager")
    prompt, text = random_ids(PROMPT), random_ids(TOKENS + 1, seed=1)
    seen: dict[int, list] = {}
    original = Lockstep._step

    def spy(self, group, token):
        for one in group:
            seen.setdefault(self.followers.index(one), []).append(positions(one.arena))
        return original(self, group, token)

    monkeypatch.setattr(Lockstep, "_step", spy)
    found = combinations(policies, WINDOW, decoding=True)
    cells = [make_cell(runner, one, Budget.parse(str(BUDGET)), PROMPT) for one in found]
    shares: list[float] = []
    records = drift(runner, prompt, text, cells, on_share=shares.append)

    ids, total = [*prompt, *text[:-1]], PROMPT + TOKENS
    logprobs = []
    for number in range(len(policies) + 1):
        visible = {row: torch.zeros(total, total, dtype=torch.bool) for row in seen[number][0]}
        for row, mask in visible.items():
            mask[:PROMPT, :PROMPT] = True
            for step, held in enumerate(seen[number]):
                mask[PROMPT + step, [*held[row], PROMPT + step]] = True
        logprobs.append(dense(folder).logits(ids, visible)[PROMPT:].log_softmax(-1))
    full = dense(folder).logits(ids)[PROMPT:].log_softmax(-1)
    torch.testing.assert_close(logprobs[0], full)
    targets = torch.tensor(text[1:])[:, None]
    for record, own in zip(records, logprobs[1:], strict=True):
        kl = (full.exp() * (full - own)).sum(-1).numpy()
        loss = (full - own).gather(1, targets)[:, 0].numpy()
        assert record["tokens"] == TOKENS
        assert record["kl"] == pytest.approx(kl.mean(), rel=1e-3)
        assert record["loss"] == pytest.approx(loss.mean(), rel=1e-3, abs=1e-5)
        assert record["top1"] == pytest.approx(float((full.argmax(-1) == own.argmax(-1)).double().mean()))
        for quarter, (some_kl, some_loss) in enumerate(
            zip(np.array_split(kl, 4), np.array_split(loss, 4), strict=True), start=1
        ):
            assert record[f"kl_{quarter}"] == pytest.approx(some_kl.mean(), rel=1e-3)
            assert record[f"loss_{quarter}"] == pytest.approx(some_loss.mean(), rel=1e-3, abs=1e-5)
    assert len({record["kl"] for record in records}) == len(policies)
    assert shares == sorted(shares)
    assert shares[-1] == 1


def test_what_is_held_is_held_and_what_grows_is_said(tmp_path, write_checkpoint, make_runner, random_ids):
    runner = make_runner(write_checkpoint(tmp_path / "model"), policy="full", window=WINDOW, step="eager")
    policies = [
        "full",
        "cake",
        "cake,hold_by=attention",
        "cake,recascade=12",
        "cake,hold_by=h2o",
        "cake,hold_by=g-kv,interval=7",
    ]
    found = combinations(policies, WINDOW, decoding=True)
    cells = [make_cell(runner, one, Budget.parse("24"), PROMPT) for one in found]
    records = drift(runner, random_ids(PROMPT), random_ids(TOKENS + 1, seed=1), cells)
    everything = ROWS * (PROMPT + TOKENS)
    most = [everything, ROWS * (BUDGET + TOKENS), *[ROWS * BUDGET] * 3, ROWS * (BUDGET + 6)]
    assert [record["most_slots"] for record in records] == most
    slot = runner.layout.kept_slot_bytes
    assert [record["bytes"] for record in records] == [slots * slot for slots in most]
    assert [record["kept"] for record in records] == [slots / everything for slots in most]
    ends = [*most[:-1], ROWS * (BUDGET + TOKENS % 7)]
    assert [record["slots"] for record in records] == ends
    assert (records[0]["kl"], records[0]["top1"], records[0]["loss"]) == pytest.approx((0, 1, 0), abs=1e-6)


def test_memory_is_said_and_what_does_not_fit_is_refused(model_folder, monkeypatch):
    from cake_infer import Engine
    from cake_infer.engine.evaluation.generation import check_drift

    engine = Engine.load(model_folder(), policy="full", step="eager")
    (policy,) = combinations(["cake,hold_by=attention"], WINDOW, decoding=True)

    def line(prompt, tokens, cells):
        made = [make_cell(engine.runner, policy, Budget.parse("40"), prompt)] * cells
        return check_drift(engine, prompt, tokens, made)

    assert line(1000, 50, 3).startswith("with 4 caches side by side a text of 1,000 and 50 tokens needs")
    least = None
    for free in range(1, 64):
        monkeypatch.setattr(memory, "available_memory", lambda device, free=free: Available(free << 19, "a test"))
        try:
            line(3000, 100, 3)
        except MemoryLimit:
            least = free
    # the full cache twice, where it is read and where it grows: 3,000 tokens in 6 rows
    assert least is not None
    assert least << 19 > 2 * 3000 * ROWS * engine.runner.layout.kept_slot_bytes
