"""Texts that are read in pieces: what is kept, what it takes, and texts that are still being written."""

from __future__ import annotations

import itertools

import pytest
import torch
from cake_infer.cache.layout import arena_bytes
from cake_infer.cache.policies import make_policy
from cake_infer.engine.document import document_cache
from cake_infer.engine.engine import Engine
from cake_infer.engine.generation import GenerationConfig, resolve_generation
from cake_infer.engine.pieces import ListedPieces, piece_size
from cake_infer.engine.sequence import Sequence
from cake_infer.engine.timing import Timing
from cake_infer.errors import OptionError, PromptError

BUDGET, WINDOW = 24, 4
WORDS = "the first of them was not this one, and all that is left is for him to have one\n"


def greedy(new_tokens):
    return resolve_generation(GenerationConfig(max_new_tokens=new_tokens, temperature=0.0, seed=0), None)


def reply(runner, sequence, ids, new_tokens=6, **options):
    return [token.id for token in runner.generate(sequence, ids, greedy(new_tokens), **options)]


@pytest.fixture
def runner(make_runner, model_folder):
    folder = model_folder()

    def make(**options):
        return make_runner(folder, **{"step": "eager", "budget": BUDGET, "window": WINDOW, "chunk": 16, **options})

    return make


# -- what is kept -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"decode_policy": "hold"}, {"policy": "cake", "heads": "adaptive"}, {"policy": "snapkv"}]
)
@pytest.mark.parametrize("size", [90, 91, 4000])
def test_a_piece_that_holds_the_whole_text_is_the_whole_prefill(runner, random_ids, kept_positions, options, size):
    whole, streamed = runner(**options), runner(**options)
    ids = random_ids(90)
    first, second = Sequence(), Sequence()
    expected = reply(whole, first, ids)
    assert reply(streamed, second, ListedPieces(ids, size)) == expected
    assert second.ids == first.ids
    assert kept_positions(streamed) == kept_positions(whole)


@pytest.mark.parametrize(
    "options", [{}, {"decode_policy": "hold"}, {"policy": "h2o"}, {"policy": "cake", "heads": "adaptive"}]
)
@pytest.mark.parametrize(("tokens", "size"), [(100, 17), (96, 32), (60, 3), (33, 32), (40, 1)])
def test_pieces_are_the_turns_of_a_conversation(runner, random_ids, kept_positions, options, tokens, size):
    """Each goes on from what is kept of those before: the same rows, and the same reply, as feeding turn by turn."""
    turns, streamed = runner(**options), runner(**options)
    ids = random_ids(tokens)
    first, second = Sequence(), Sequence()
    cuts = range(0, tokens, size)
    for start in cuts[:-1]:
        part = ids[start : start + size]
        turns.feed(first, part, turns.prepare(first, len(part), 6) and 0)
    expected = reply(turns, first, ids[cuts[-1] :])
    timing = Timing()
    assert reply(streamed, second, ListedPieces(ids, size), timing=timing) == expected
    assert kept_positions(streamed) == kept_positions(turns)
    assert (timing.pieces, timing.prompt_tokens, timing.total) == (len(cuts), tokens, tokens)


@pytest.mark.parametrize("bits", [8, 2])
def test_pieces_of_packed_rows_are_turns_too(make_runner, model_folder, random_ids, bits):
    folder = model_folder(head_dim=32)
    turns, streamed = (
        make_runner(folder, step="eager", budget=64, window=WINDOW, chunk=16, kv_bits=bits) for _ in range(2)
    )
    ids, first = random_ids(170), Sequence()
    for start in (0, 50, 100):
        turns.feed(first, ids[start : start + 50], turns.prepare(first, 50, 6) and 0)
    expected = reply(turns, first, ids[150:])
    assert reply(streamed, Sequence(), ListedPieces(ids, 50)) == expected


def test_what_pieces_keep_is_what_the_paper_says_of_rows_and_piece(runner, dense, model_folder, random_ids):
    """In float64 from the formulas: kept columns of the first piece and all of the second compete, and no others."""
    made, sequence, ids = runner(policy="cake"), Sequence(), random_ids(80)
    assert len(list(made.generate(sequence, ListedPieces(ids, 50), greedy(1)))) == 1
    arena = made.tenancy.arena
    layers, heads = arena.length.shape
    kept = {(a, b): arena.row(a, b)[2].tolist() for a in range(layers) for b in range(heads)}
    model = dense(model_folder("again"))
    model.logits(ids[:50])
    rows = [(layer, head) for layer in range(layers) for head in range(heads)]
    first = model.cake({row: list(range(50)) for row in rows}, 50, budget=BUDGET, window=WINDOW)
    visible = {}
    for row in rows:  # later tokens do not see what the first piece dropped
        seen = torch.ones(80, 80, dtype=torch.bool)
        gone = sorted(set(range(50)) - first[row])
        seen[50:, gone] = False
        visible[row] = seen
    model.logits(ids, visible)
    columns = {row: sorted(first[row] | set(range(50, 80))) for row in rows}
    expected = model.cake(columns, 80, budget=BUDGET, window=WINDOW)
    model.assert_chosen(kept, expected)


# -- what it takes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"decode_policy": "hold"}])
def test_the_arena_does_not_depend_on_the_length_of_the_text(runner, random_ids, options):
    sizes = set()
    for tokens in (200, 400, 1600):
        made = runner(**options)
        reply(made, Sequence(), ListedPieces(random_ids(tokens), 40))
        sizes.add(arena_bytes(made.layout, made.tenancy.arena.size))
    assert len(sizes) == 1
    whole = runner(**options)
    reply(whole, Sequence(), random_ids(1600))
    assert max(sizes) < arena_bytes(whole.layout, whole.tenancy.arena.size) / 3


def test_others_have_the_engine_between_two_pieces(runner, random_ids):
    alone, shared = runner(), runner()
    text, other = random_ids(100), random_ids(40, seed=1)
    expected, expected_other = reply(alone, Sequence(), ListedPieces(text, 30)), reply(alone, Sequence(), other)
    between = []

    class Interrupted(ListedPieces):
        def __iter__(self):
            for piece in super().__iter__():
                yield piece
                between.append(reply(shared, Sequence(), other))

    assert reply(shared, Sequence(), Interrupted(text, 30)) == expected
    assert between == [expected_other] * 4


def test_kv_memory_holds_while_pieces_are_read(runner, random_ids):
    made = runner(budget=1024, kv_memory=60_000, context=4000)
    sequence = Sequence()
    reply(made, sequence, ListedPieces(random_ids(700), 40))
    assert WINDOW <= sequence.budget < 700
    assert made.tenancy.arena.nbytes <= 60_000


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_a_text_longer_than_the_context_is_told_with_both_numbers_at_that_piece(runner, random_ids, kept_positions):
    made = runner(context=100)
    text, read = ListedPieces(random_ids(300), 40), []
    with pytest.raises(PromptError, match=r"at least 120 tokens, but the model's context is 100"):
        reply(made, Sequence(), text, on_tokens=lambda tokens, total: read.append((tokens, total)))
    assert read[-1] == (80, 300)
    ids = random_ids(50)
    assert reply(made, Sequence(), ids) == reply(runner(context=100), Sequence(), ids)


def test_what_needs_the_whole_text_is_refused_before_any_of_it_is_asked_for(runner, make_runner, model_folder):
    class Untouched(ListedPieces):
        def __iter__(self):
            raise AssertionError

    unknown = Untouched([], 40)
    unknown.tokens = None
    scaled = model_folder("scaled", rope_scaling={"rope_type": "dynamic", "factor": 4.0})
    cases = [
        (runner(budget="10%"), "not known while it is read in pieces"),
        (make_runner(model_folder("full"), policy="full"), "pieces would save nothing"),
        (make_runner(scaled, budget=BUDGET, window=WINDOW, context=16000), "depend on the length of the whole text"),
    ]
    for made, message in cases:
        with pytest.raises(OptionError, match=message):
            reply(made, Sequence(), unknown)


def test_a_share_of_a_known_text_is_of_all_of_it(runner, random_ids):
    made, sequence = runner(budget="20%"), Sequence()
    reply(made, sequence, ListedPieces(random_ids(200), 30))
    assert sequence.budget == 40


def test_piece_sizes():
    assert [piece_size(given) for given in (None, False, True, 5)] == [None, None, 2048, 5]
    for wrong in (0, -1, 2.5, "many"):
        with pytest.raises(OptionError, match="stream_prefill must be a whole number between 1"):
            piece_size(wrong)


# -- texts that come --------------------------------------------------------------------------------------------------


@pytest.fixture
def engine(model_folder):
    return Engine.load(model_folder(), step="eager", budget=64, window=8)


def test_a_text_that_comes_gives_the_reply_of_one_that_is_there(engine):
    text = WORDS * 80
    expected = engine.generate(text, max_new_tokens=8, stream_prefill=300)
    assert expected.stats.pieces > 2
    coming = engine.generate(iter(text.splitlines(keepends=True)), max_new_tokens=8, stream_prefill=300)
    assert (coming.text, coming.ids) == (expected.text, expected.ids)
    assert coming.stats.layer_lengths == expected.stats.layer_lengths
    messages = [{"role": "system", "content": "<|im_end|> is text"}, {"role": "user", "content": text}]
    told = engine.generate(messages=messages, max_new_tokens=8, stream_prefill=300)
    messages[1]["content"] = (text[i : i + 7] for i in range(0, len(text), 7))
    assert engine.generate(messages=messages, max_new_tokens=8, stream_prefill=300).ids == told.ids
    assert f" in {told.stats.pieces} pieces" in told.stats.line()


def test_no_more_of_a_text_is_asked_for_than_the_next_piece_takes(engine):
    asked = []

    def endless():
        for number in itertools.count():
            asked.append(number)
            yield WORDS

    read = []
    stream = engine.stream(endless(), stream_prefill=200, on_progress=lambda progress: read.append(progress))
    with pytest.raises(PromptError, match="at least 4,"):  # the context ends, the text does not
        next(stream)
    assert len(asked) < 2.1 * 4096 / len(engine.encode(WORDS)) + 80
    assert read[0].stage == "prefill"
    assert read[0].total == 0
    assert [one.tokens for one in read] == sorted(one.tokens for one in read)


def test_a_text_that_breaks_off_leaves_the_engine_as_it_was(engine):
    expected = engine.generate(WORDS * 3, max_new_tokens=6).ids

    def broken():
        yield WORDS * 40
        raise PromptError("the text ends in the middle")

    for text, error in ((broken(), "ends in the middle"), (iter(["", ""]), None), (iter([WORDS, 5]), "must be a text")):
        if error is None:
            assert engine.generate(text, max_new_tokens=2, stream_prefill=True).stats.prompt_tokens == 1  # the BOS
            continue
        with pytest.raises(PromptError, match=error):
            engine.generate(text, max_new_tokens=6, stream_prefill=100)
        assert engine.generate(WORDS * 3, max_new_tokens=6).ids == expected
    with pytest.raises(PromptError, match="the prompt is empty"):
        engine.generate(messages=[{"role": "user", "content": iter([])}], stream_prefill=100)


def test_where_pieces_mean_nothing_they_are_refused(engine):
    document = engine.compress(WORDS * 20)
    with pytest.raises(OptionError, match="a question to a document is read whole"):
        engine.generate("What?", cache=document, stream_prefill=True)
    with pytest.raises(OptionError, match="the prompts of a list are read whole"):
        engine.generate(["a", "b"], stream_prefill=True)


def test_a_document_that_is_read_in_pieces_answers_behind_what_pieces_keep(engine):
    text = WORDS * 60
    whole, one, many = (engine.compress(text, stream_prefill=size) for size in (None, 100000, 200))
    assert torch.equal(one.snapshot.rows.keys, whole.snapshot.rows.keys)
    assert one.snapshot.ids == many.snapshot.ids == whole.snapshot.ids
    runner, sequence = engine.runner, Sequence()
    sequence.budget, sequence.policy = 64, make_policy(document_cache(engine.cache, None), runner.model, 64)
    for start in range(0, many.tokens, 200):
        part = many.snapshot.ids[start : start + 200]
        runner.feed(sequence, part, runner.prepare(sequence, len(part), 512) and 0)
    assert torch.equal(many.snapshot.rows.position, runner.tenancy.copy(sequence).parked.position)
    assert not torch.equal(many.snapshot.rows.position, whole.snapshot.rows.position)
    answer = engine.generate("What is left?", cache=many, max_new_tokens=4)
    assert answer.ids == engine.generate("What is left?", cache=many, max_new_tokens=4).ids


def test_a_turn_of_a_chat_that_is_longer_than_a_piece_is_read_in_pieces(engine):
    plain, pieces, large = (engine.chat(stream_prefill=size) for size in (None, 100, 100000))
    replies = []
    for chat in (plain, pieces, large):
        *_, last = chat.send(WORDS * 20, max_new_tokens=5, temperature=0.0)
        replies.append((chat.messages[-1]["content"], last.stats.pieces))
        *_, last = chat.send("and all that is left", max_new_tokens=5, temperature=0.0)
        assert last.stats.pieces == 0
    assert replies[0] == replies[2]
    assert replies[1][1] > 3
