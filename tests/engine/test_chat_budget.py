"""A conversation's budget: held at every step of many turns, made smaller at once, and what is gone stays gone."""

from __future__ import annotations

import pytest
import torch
from cake_infer.cache.policies import POLICIES
from cake_infer.engine.engine import Engine
from cake_infer.errors import BudgetError, OptionError

CLOSE = {"rtol": 0, "atol": 1e-4}
WAITS = {"squeeze"}  # judges by the hidden states of new tokens


def load(folder, **options):
    return Engine.load(folder, step="eager", **{"window": 8, "policy": "cake", **options})


def say(chat, text, **options):
    pieces = list(chat.send(text, **options))
    return "".join(piece.text for piece in pieces), [piece.id for piece in pieces if piece.id is not None]


class Followed:
    """A dense model in which every query sees what the cache held when it was fed, and its own piece."""

    def __init__(self, model, total):
        rows = [(layer, head) for layer in range(model.layers) for head in range(model.kv_heads)]
        self.model = model
        self.masks = {row: torch.ones(total, total, dtype=torch.bool) for row in rows}

    def saw(self, kept, first, last):
        """Queries first..last - 1 were fed when the rows had `kept`."""
        for row, mask in self.masks.items():
            mask[first:last, :first] = False
            mask[first:last, kept[row]] = True

    def logits(self, ids):
        n = len(ids)
        return self.model.logits(ids, {row: mask[:n, :n] for row, mask in self.masks.items()})


@pytest.mark.parametrize("decode_policy", ["grow", "hold"])
def test_thirty_turns_stay_within_the_budget_at_every_step_and_equal_the_masked_dense_model(
    model_folder, dense, force, random_ids, kept_positions, decode_policy
):
    folder, budget = model_folder(), 24
    engine = load(folder, budget=budget, decode_policy=decode_policy)
    chat, model = engine.chat(), Followed(dense(folder), 1200)
    replies = [[*random_ids(2 + turn % 5, seed=turn), 4] for turn in range(30)]  # 4: the end token, which is not fed
    seen = force([token for reply in replies for token in reply])
    for turn, reply in enumerate(replies):
        start = chat.tokens_used
        before = kept_positions(engine.runner) if start else None
        del seen[:]
        stream = chat.send("the " * 40 if turn == 0 else "and what? "[: 1 + turn % 10], max_new_tokens=20)
        next(stream)
        sequence = engine.runner.tenancy._active()
        prompt = len(sequence.ids)
        if before is not None:
            model.saw(before, start, prompt)
        model.logits(list(sequence.ids))  # its queries and keys are what the choice is made by
        columns = {row: [*(before[row] if before else ()), *range(start, prompt)] for row in model.masks}
        chosen = model.model.cake(columns, prompt, budget=budget, window=8)
        model.model.assert_chosen(kept_positions(engine.runner), chosen)
        new = 0
        while True:
            kept = kept_positions(engine.runner)
            held = sum(map(len, kept.values()))
            assert held <= (budget + (new if decode_policy == "grow" else 0)) * len(kept), (turn, new)
            assert turn or new or held == budget * len(kept), "nothing to evict: the test shows nothing"
            at = len(sequence.ids)
            if next(stream, None) is None:
                break
            if len(sequence.ids) > at:
                model.saw(kept, at, at + 1)
                new += 1
        assert new == len(reply) - 1
        reference = model.logits(list(sequence.ids))[prompt - 1 :]
        torch.testing.assert_close(torch.stack(seen).double(), reference, **CLOSE)
    assert len(chat.messages) == 60
    assert chat.tokens_used > 20 * budget


def test_a_smaller_budget_is_made_room_for_at_once_by_the_votes_of_the_last_queries(
    model_folder, dense, force, random_ids, kept_positions
):
    folder = model_folder()
    engine = load(folder, budget=40)
    chat, model = engine.chat(), Followed(dense(folder), 400)
    reply, later = random_ids(12), random_ids(5, seed=1)
    seen = force([*reply, *later])
    stream = chat.send("the first of them " * 9, max_new_tokens=12)
    next(stream)
    sequence, first = chat._sequence, kept_positions(engine.runner)
    list(stream)
    sequence, prompt = chat._sequence, chat.tokens_used - 12
    model.saw(first, prompt, prompt + 12)
    before = kept_positions(engine.runner)
    assert sum(map(len, before.values())) == (40 + 11) * len(before)
    used, nbytes, ids = chat.tokens_used, engine.runner.tenancy.arena.nbytes, list(sequence.ids)

    chat.set_budget(16)
    assert engine.runner.tenancy.arena.nbytes < nbytes / 4, "the arena was not given back"
    rows = sequence.parked
    assert rows.length.sum() == 16 * rows.length.size
    assert chat.budget_text.startswith(f"16 tokens per layer and KV head; 16 of {used - 1} tokens so far are kept")
    assert (chat.tokens_used, sequence.ids) == (used, ids), "nothing was fed"
    starts = rows.length.reshape(-1).cumsum() - rows.length.reshape(-1)
    kept = {
        row: rows.position[start : start + length].tolist()
        for row, start, length in zip(before, starts, rows.length.reshape(-1), strict=True)
    }
    model.logits(ids)
    model.model.assert_chosen(kept, model.model.cake(before, len(ids), budget=16, window=8))
    assert all(set(kept[row]) < set(before[row]) for row in kept)

    chat.set_budget(60)  # what is gone stays gone
    assert "60 tokens per layer and KV head; 16 of" in chat.budget_text
    assert "does not come back" in chat.budget_text
    del seen[:]
    say(chat, "and?", max_new_tokens=5)
    model.saw(kept, len(ids), 400)
    reference = model.logits(list(sequence.ids))[-5:]
    torch.testing.assert_close(torch.stack(seen).double(), reference, **CLOSE)
    assert 16 < chat.stats.kept_tokens < 60, "nothing was evicted for a turn that has room"


def test_a_conversation_that_was_shrunk_is_saved_and_goes_on_as_it_would_have(model_folder, tmp_path):
    folder = model_folder()
    chat = load(folder, budget=40).chat()
    say(chat, "the first of them " * 9, max_new_tokens=6)
    chat.set_budget(16)
    chat.save(tmp_path / "a.cake")
    loaded = load(folder, budget=40).chat()
    loaded.load(tmp_path / "a.cake")
    assert loaded.budget == 16
    assert loaded.budget_text == chat.budget_text
    for text in ("and?", "one more " * 6):
        assert say(loaded, text, max_new_tokens=6) == say(chat, text, max_new_tokens=6)


def test_a_turn_that_is_undone_or_written_again_has_the_smaller_budget_too(model_folder, force):
    chat = load(model_folder(), budget=40).chat()
    force([10] * 100)
    say(chat, "the first of them " * 9, max_new_tokens=2)
    say(chat, "and? " * 9, max_new_tokens=2)
    chat.set_budget(16)
    list(chat.regenerate(max_new_tokens=2))
    assert chat.stats.kept_tokens == 16
    chat.undo()
    rows = chat._sequence.parked
    assert rows.length.mean() == 16
    assert chat.budget == 16
    say(chat, "and? " * 9, max_new_tokens=2)
    assert chat.stats.kept_tokens == 16


@pytest.mark.parametrize("policy", [name for name in POLICIES if name not in ("full", "gate")])
def test_every_policy_gives_up_at_once_or_says_that_it_waits(model_folder, force, policy):
    engine = load(model_folder(), budget=40, policy=policy)
    chat = engine.chat()
    force([10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20] * 4)
    say(chat, "the first of them " * 9, max_new_tokens=11)
    chat.set_budget(16)
    kept = engine.runner.tenancy.lengths(chat._sequence)
    assert ("from the next message on" in chat.budget_text) == (policy in WAITS)
    if policy not in WAITS:
        assert kept.sum() == 16 * kept.size
        positions = chat._sequence.parked.position
        assert int((positions >= len(chat._sequence.ids) - 8).sum()) == 8 * kept.size, "the window is kept"
    say(chat, "and on?", max_new_tokens=3)
    assert chat.stats.kept_tokens == 16
    assert "from the next message on" not in chat.budget_text


def test_packed_rows_give_up_at_once_too(model_folder, force):
    engine = load(model_folder(), budget=60, kv_bits=4)
    chat = engine.chat()
    force([10] * 60)
    say(chat, "the first of them " * 9, max_new_tokens=11)
    chat.set_budget(16)
    kept = engine.runner.tenancy.lengths(chat._sequence)
    assert kept.sum() == 16 * kept.size
    say(chat, "and on?", max_new_tokens=3)
    assert chat.stats.kept_tokens == 16


def test_h2o_counts_each_query_once_when_the_budget_shrinks_between_turns(model_folder, dense, force, kept_positions):
    """What a token has got from the queries of the reply is added to its sum; what was read before is not again."""
    folder = model_folder()
    engine = load(folder, budget=60, policy="h2o")
    chat, model = engine.chat(), Followed(dense(folder), 400)
    force([10, 11, 12, 13, 14, 15])
    stream = chat.send("the first of them " * 9, max_new_tokens=6)
    next(stream)
    kept = kept_positions(engine.runner)
    list(stream)
    ids, before = list(chat._sequence.ids), kept_positions(engine.runner)
    model.saw(kept, len(ids) - 5, len(ids))
    chat.set_budget(16)
    rows, start = chat._sequence.parked, 0
    model.logits(ids)
    group = model.model.heads // model.model.kv_heads
    for (layer, head), count in zip(before, rows.length.reshape(-1).tolist(), strict=True):
        sums = model.model.attention[layer][head * group : (head + 1) * group].sum(1).mean(0)
        positions, score = rows.position[start : start + count], rows.score[start : start + count].double()
        start += count
        outside = positions < len(ids) - 8
        torch.testing.assert_close(score[outside], sums[positions[outside].long()], rtol=0, atol=1e-4)
        lost = set(before[layer, head]) - set(positions.tolist())
        assert sums[sorted(lost)].max() <= score[outside].min() + 1e-4


def test_kv_memory_that_has_no_room_to_shrink_in_leaves_it_to_the_next_turn(model_folder, force):
    engine = load(model_folder(), budget=400, kv_memory=150_000)
    chat = engine.chat()
    force([10] * 100)
    say(chat, "the " * 150, max_new_tokens=2)
    rows = engine.runner.tenancy.lengths(chat._sequence).sum()
    engine.runner.tenancy.kv_memory = 20_000
    chat.set_budget(16)
    assert "16 tokens per layer and KV head, from the next message on" in chat.budget_text
    assert engine.runner.tenancy.lengths(chat._sequence).sum() == rows
    engine.runner.tenancy.kv_memory = 150_000
    say(chat, "and?", max_new_tokens=2)
    assert chat.stats.kept_tokens == 16


@pytest.mark.parametrize("fail", ["a number below the window", "a policy that breaks"])
def test_a_budget_that_cannot_be_set_changes_nothing(model_folder, monkeypatch, fail):
    folder = model_folder()
    chat, twin = (load(folder, budget=40).chat() for _ in range(2))
    for one in (chat, twin):
        say(one, "the first of them " * 9, max_new_tokens=4)
        say(one, "and?", max_new_tokens=4)
    if fail == "a number below the window":
        with pytest.raises(BudgetError, match="the minimum is 8"):
            chat.set_budget(7)
    else:
        policy = chat.engine.runner.policy(16)
        with monkeypatch.context() as patch:
            patch.setattr(type(policy), "score", lambda self, view: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                chat.set_budget(16)
    assert chat.budget_text == twin.budget_text
    assert chat.messages == twin.messages
    assert say(chat, "and on?", max_new_tokens=4) == say(twin, "and on?", max_new_tokens=4)
    stream = chat.send("more", max_new_tokens=9)
    next(stream)
    with pytest.raises(OptionError, match="still being written"):
        chat.set_budget(16)
    stream.close()
