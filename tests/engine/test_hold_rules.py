"""Holding by other rules than attention: rows equal a plain list model, at constant memory, turn after turn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cake_infer.cache.holds import HOLDS
from cake_infer.engine import holding
from cake_infer.engine.sequence import Sequence
from cake_infer.errors import BackendError

WINDOW, BUDGET = 8, 24


def start(runner, sequence, ids, new_tokens):
    limit = runner.prepare(sequence, len(ids), new_tokens)
    runner.feed(sequence, ids, limit)


class Lists:
    """Positions in each row, and what the rule remembers of each, as dictionaries."""

    def __init__(self, name, kept, limits, remembered=None, interval=1):
        self.name, self.rows, self.limits = name, {row: list(held) for row, held in kept.items()}, limits
        self.interval, self.cuts = interval, 0
        self.sums = {row: dict((remembered or {}).get(row, dict.fromkeys(held, 0.0))) for row, held in kept.items()}

    def step(self, attention, position, stored):
        """`stored`: the engine's rows after the step. Who goes must have the least value, up to rounding."""
        shared = {}
        for (layer, head), held in self.rows.items():
            for at in [*held, position]:
                votes = attention[layer, head][at].sum()
                shared[layer, at] = shared.get((layer, at), 0.0) + votes
        for row, held in self.rows.items():
            mean = {at: attention[row][at].mean() for at in [*held, position]}
            sums = self.sums[row]
            for at, votes in mean.items():
                sums[at] = sums.get(at, 0.0) + votes
            held.append(position)
            if len(held) < self.limits[row] + self.interval:
                assert sorted(held) == sorted(stored[row])
                continue
            recent = range(position - len(held) // 2 + 1, position + 1)
            value = {
                "attention": lambda at, mean=mean: mean[at],
                "tova": lambda at, row=row: shared[row[0], at],
                "h2o": lambda at, sums=sums, recent=recent: float("inf") if at in recent else sums[at],
                "cake": lambda at, mean=mean: sum(mean.get(at + i, 0.0) for i in range(-2, 3)),
                "streaming-llm": lambda at: at if at >= 4 else 10_000,
            }[self.name]
            able = [at for at in held if at <= position - WINDOW]
            losers = sorted(set(held) - set(stored[row]))
            least = sorted(able, key=lambda at: (value(at), at))[: self.interval]
            worst = value(least[-1])
            assert worst < float("inf")
            assert len(losers) == self.interval
            assert losers == sorted(least) or max(map(value, losers)) - worst <= 1e-6 * abs(worst), (row, losers, least)
            assert set(losers) <= set(able)
            self.cuts += 1
            for loser in losers:
                held.remove(loser)
                sums.pop(loser, None)


ONE_BY_ONE = ("tova", "h2o", "cake", "streaming-llm")


@pytest.mark.parametrize(
    ("name", "interval"), [*((name, 1) for name in ONE_BY_ONE), *((name, 7) for name in ("attention", *ONE_BY_ONE))]
)
@pytest.mark.parametrize("prompt", [70, 15])
@pytest.mark.parametrize("options", [{}, {"model_type": "mistral", "sliding_window": 30}], ids=["plain", "sliding"])
@pytest.mark.parametrize("policy", ["cake", "h2o"])
def test_rows_equal_a_plain_list_model_and_logits_a_dense_one(
    tmp_path,
    write_checkpoint,
    dense,
    make_runner,
    random_ids,
    kept_positions,
    monkeypatch,
    name,
    interval,
    prompt,
    options,
    policy,
):
    folder = write_checkpoint(tmp_path / "model", **options)
    runner = make_runner(
        folder,
        budget=BUDGET,
        window=WINDOW,
        policy=policy,
        decode_policy="hold",
        hold_by=f"{name},interval={interval}",
        step="eager",
    )
    ids, new = random_ids(prompt), random_ids(45, seed=1)
    sequence = Sequence()
    start(runner, sequence, ids, len(new) + 1)
    arena = runner.tenancy.arena
    kept, evicted = kept_positions(runner), prompt > BUDGET
    remembered = None
    if policy == "h2o" and evicted:
        remembered = {
            row: dict(zip(held, arena.score[(at := int(arena.offset[row])) : at + len(held)].tolist(), strict=True))
            for row, held in kept.items()
        }
        assert all(min(sums.values()) > 0 for sums in remembered.values())
    limits = {row: len(held) if evicted else BUDGET for row, held in kept.items()}
    lists = Lists(name, kept, limits, remembered, interval)
    seen, original = [], holding.decode_attention

    def spy(queries, keys, values, **keywords):
        out, weights = original(queries, keys, values, **keywords)
        seen.append(weights[0].double().numpy())
        return out, weights

    monkeypatch.setattr(holding, "decode_attention", spy)
    nbytes, total, logits = arena.nbytes, prompt + len(new), []
    masks = {row: torch.ones(total, total, dtype=torch.bool) for row in kept}
    for index, token in enumerate(new):
        position = prompt + index
        stored = kept_positions(runner)
        for row, mask in masks.items():
            mask[position, :position] = False
            mask[position, lists.rows[row]] = True
        seen.clear()
        with torch.inference_mode():
            logits.append(runner.step(arena, sequence, token, window=WINDOW))
        attention = {}
        for row, weights in zip(sorted(stored), seen, strict=True):
            attention[row] = dict(zip([*stored[row], position], weights.T, strict=True))
        lists.step(attention, position, kept_positions(runner))
        assert {row: sorted(held) for row, held in kept_positions(runner).items()} == {
            row: sorted(held) for row, held in lists.rows.items()
        }
        if name == "h2o":
            for row, held in kept_positions(runner).items():
                at = int(arena.offset[row])
                expected = [lists.sums[row][one] for one in held]
                np.testing.assert_allclose(arena.score[at : at + len(held)].numpy(), expected, rtol=1e-4, atol=1e-6)
    assert arena.nbytes == nbytes
    assert lists.cuts >= len(kept) * ((len(new) - (0 if evicted else BUDGET - prompt)) // interval)
    reference = dense(folder).logits(ids + new, masks)[prompt:]
    torch.testing.assert_close(torch.stack(logits).double(), reference, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["g-kv", "r-kv"])
@pytest.mark.parametrize("prompt", [70, 15])
def test_rules_at_intervals_cut_rows_back_as_a_dense_model_would(
    tmp_path, write_checkpoint, dense, make_runner, random_ids, kept_positions, name, prompt
):
    folder, interval = write_checkpoint(tmp_path / "model"), 7
    options = {"interval": interval, "votes": 5}
    runner = make_runner(
        folder,
        budget=BUDGET,
        window=WINDOW,
        decode_policy="hold",
        hold_by=name,
        step="eager",
        policy_options=options,
    )
    ids, new = random_ids(prompt), random_ids(40, seed=1)
    sequence = Sequence()
    start(runner, sequence, ids, len(new) + 1)
    arena, model = runner.tenancy.arena, dense(folder)
    rule = HOLDS[name].load()(**options)
    kept = kept_positions(runner)
    limits = {row: len(held) if prompt > BUDGET else BUDGET for row, held in kept.items()}
    rows = {row: list(held) for row, held in kept.items()}
    scores = {row: dict.fromkeys(held, 0.0) for row, held in kept.items()}
    nbytes, total, logits, cuts = arena.nbytes, prompt + len(new), [], 0
    masks = {row: torch.ones(total, total, dtype=torch.bool) for row in kept}
    for index, token in enumerate(new):
        position = prompt + index
        for row, mask in masks.items():
            mask[position, :position] = False
            mask[position, rows[row]] = True
        with torch.inference_mode():
            logits.append(runner.step(arena, sequence, token, window=WINDOW))
        model.logits(
            (ids + new)[: position + 1], {row: mask[: position + 1, : position + 1] for row, mask in masks.items()}
        )
        for (layer, head), held in rows.items():
            held.append(position)
            scores[layer, head][position] = 0.0
            limit = limits[layer, head]
            if len(held) < limit + interval:
                continue
            cuts += 1
            at = torch.tensor(sorted(held))
            group = slice(head * 2, head * 2 + 2)
            chosen, left = rule.cut(
                model.keys[layer][head, at].float(),
                at.int(),
                torch.tensor([scores[layer, head][one] for one in at.tolist()]),
                model.queries[layer][group, -WINDOW:].float(),
                model.head_dim**-0.5,
                limit,
                WINDOW,
            )
            rows[layer, head] = at[chosen].tolist()
            scores[layer, head] = dict(zip(rows[layer, head], left.tolist(), strict=True))
        stored = kept_positions(runner)
        assert {row: sorted(held) for row, held in stored.items()} == {row: sorted(held) for row, held in rows.items()}
        assert all(len(held) < limits[row] + interval for row, held in stored.items())
    assert cuts >= 3 * len(rows) - len(rows)
    assert arena.nbytes == nbytes
    torch.testing.assert_close(torch.stack(logits).double(), model.logits(ids + new, masks)[prompt:], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in HOLDS if name != "attention"])
def test_a_conversation_goes_on_after_a_held_reply(tmp_path, write_checkpoint, make_runner, random_ids, name):
    folder = write_checkpoint(tmp_path / "model")
    options = {"interval": 5} if name in ("g-kv", "r-kv") else {}
    runner = make_runner(
        folder, budget=BUDGET, window=WINDOW, decode_policy="hold", hold_by=name, step="eager", policy_options=options
    )
    sequence = Sequence()
    for turn, count in enumerate((40, 1, 30)):
        start(runner, sequence, random_ids(count, seed=turn), 13)
        arena = runner.tenancy.arena
        limit = arena.length.copy()
        for token in random_ids(12, seed=10 + turn):
            with torch.inference_mode():
                assert runner.step(arena, sequence, token, window=WINDOW).isfinite().all()
            assert (arena.length <= arena.capacity).all()
        spare = 5 if options else 1
        assert (arena.length < limit + spare).all()
        assert runner.policy(sequence.budget) is not None


def test_a_rule_has_no_compiled_form_and_says_so_once(tmp_path, write_checkpoint, make_runner, caplog):
    folder = write_checkpoint(tmp_path / "model")
    runner = make_runner(folder, decode_policy="hold", hold_by="tova")
    assert runner.step is runner.step
    assert [record.message for record in caplog.records if "plain torch" in record.message] == [
        "decoding runs in plain torch, several times slower: "
        "the compiled step holds by attention, or at intervals by most rules"
    ]
    forced = make_runner(folder, decode_policy="hold", hold_by="tova", step="compiled")
    with pytest.raises(BackendError, match="holds by attention, or at intervals"):
        _ = forced.step
    assert type(make_runner(folder, decode_policy="hold", hold_by="attention").step).__name__ != "EagerStep"
    for by, step in (
        ("attention,interval=2", "IntervalStep"),
        ("g-kv", "IntervalStep"),
        ("h2o,interval=2", "EagerStep"),
    ):
        assert type(make_runner(folder, decode_policy="hold", hold_by=by).step).__name__ == step, by


@pytest.mark.parametrize("name", ["attention", "tova", "cake", "streaming-llm", "g-kv", "r-kv"])
@pytest.mark.parametrize(
    ("policy", "options"),
    [("cake", {}), ("auto", {}), ("auto", {"model_type": "mistral", "sliding_window": 30})],
    ids=["cake", "auto", "sliding"],
)
def test_compiled_steps_with_cuts_between_them_are_those_of_plain_torch(
    tmp_path, write_checkpoint, make_runner, random_ids, kept_positions, name, policy, options
):
    """The scores of `auto` have a floor, of which tokens that one head alone holds have equal shares: exact ties, which
    the order of tokens decides and not a step's last bits."""
    folder = write_checkpoint(tmp_path / "model", **options)
    found = {}
    for step in ("eager", "compiled"):
        runner = make_runner(
            folder,
            policy=policy,
            budget=BUDGET,
            window=WINDOW,
            heads="adaptive",
            decode_policy="hold",
            hold_by=f"{name},interval=5",
            step=step,
        )
        sequence, seen = Sequence(), []
        for turn, prompt in enumerate((70, 9)):  # the second turn goes on from held rows
            start(runner, sequence, random_ids(prompt, seed=turn), 30)
            arena = runner.tenancy.arena
            for token in random_ids(28, seed=10 + turn):
                with torch.inference_mode():
                    logits = runner.step(arena, sequence, token, window=WINDOW)
                seen.append((logits, {row: sorted(held) for row, held in kept_positions(runner).items()}))
                assert (arena.length <= arena.capacity).all()
        found[step] = seen
    for (logits, held), (other, same) in zip(found["eager"], found["compiled"], strict=True):
        assert held == same
        torch.testing.assert_close(logits, other, rtol=0, atol=1e-4)


def test_replies_alone_and_in_a_batch_are_those_of_plain_torch(model_folder, random_ids):
    from cake_infer import Engine

    folder, prompts = model_folder(), [random_ids(60), random_ids(40, seed=1), random_ids(15, seed=2)]
    options = {"budget": BUDGET, "window": WINDOW, "decode_policy": "hold", "hold_by": "cake,interval=5"}
    found = {}
    for step in ("eager", "compiled"):
        with Engine.load(folder, step=step, **options) as engine:
            alone = [engine.generate(ids=ids, max_new_tokens=30, temperature=0.0).ids for ids in prompts]
            batch = engine.generate(prompts, max_new_tokens=30, temperature=0.0)
            found[step] = alone
            assert [one.ids for one in batch] == alone
    assert found["eager"] == found["compiled"]
