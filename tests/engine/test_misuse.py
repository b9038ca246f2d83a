"""What a program may do wrong with an engine: every mistake is an error of ours, in one line, and costs nothing."""

from __future__ import annotations

import math
import threading

import pytest
from cake_infer.engine.engine import Engine
from cake_infer.errors import CakeError

PROMPT = "the first of them was not this one "
ABSURD = (10**400, 10**5000, -(10**400), -1, 1.5, math.nan, math.inf, "12", b"x", [3], {"a": 1}, object())
MESSAGE = {"role": "user", "content": "hello"}


@pytest.fixture
def engine(model_folder):
    return Engine.load(model_folder(), step="eager", window=8, budget=64)


def wrong(call, *arguments, **options):
    with pytest.raises(CakeError) as told:
        call(*arguments, **options)
    assert "\n" not in str(told.value)
    assert len(str(told.value)) < 400
    return str(told.value)


def test_numbers_that_make_no_sense_are_refused_and_the_engine_goes_on(engine):
    before = engine.generate(PROMPT, max_new_tokens=6)
    chat = engine.chat()
    list(chat.send("hello", max_new_tokens=2))
    for value in (*ABSURD, True):
        wrong(engine.generate, PROMPT, max_new_tokens=value)
        wrong(engine.generate, [PROMPT, PROMPT], batch=value)
        wrong(engine.generate, ids=[5, value])
        wrong(engine.score, [5, value])
        wrong(engine.compress, ids=[value])
        wrong(chat.send, "again", seed=value if value is not True else "x")
        if value != "12":  # where a share may stand too
            wrong(chat.set_budget, value)
        if value is not True:
            wrong(engine.generate, PROMPT, stream_prefill=value)
            wrong(engine.chat, stream_prefill=value)
            wrong(engine.compress, PROMPT, stream_prefill=value)
            wrong(engine.check_room, 10, stream_prefill=value)
        wrong(engine.check_room, value)
        wrong(Engine.load, engine.model_path, weights_seed=value)
    wrong(chat.set_budget, "9" * 5000)
    wrong(chat.set_budget, "9" * 400 + "%")
    assert engine.generate(PROMPT, max_new_tokens=6).ids == before.ids
    assert len(list(chat.send("again", max_new_tokens=2))) > 0


NO_TEXTS = {"five": 5, "huge": 10**5000, "bytes": b"bytes", "float": 1.5, "object": object(), "mapping": {"a": 1}}


@pytest.mark.parametrize("value", list(NO_TEXTS.values()), ids=list(NO_TEXTS))
def test_what_is_no_text_is_refused(engine, value):
    wrong(engine.generate, value)
    wrong(engine.generate, messages=value)
    wrong(engine.generate, messages=[value])
    wrong(engine.generate, messages=[{"role": "user", "content": value}])
    wrong(engine.generate, messages=[{"role": value, "content": "x"}])
    wrong(engine.generate, ids=value)
    wrong(engine.generate, [value, value])
    wrong(engine.generate, PROMPT, cache=value)
    wrong(engine.generate, PROMPT, config=value)
    wrong(engine.generate, PROMPT, stop=value)
    wrong(engine.compress, value)
    wrong(engine.score, value)
    wrong(engine.chat, value)
    wrong(engine.chat().send, value)


def test_a_closed_engine_says_so_whatever_is_asked_of_it(engine, tmp_path):
    document, chat = engine.compress(PROMPT), engine.chat()
    list(chat.send("hello", max_new_tokens=2))
    stream = engine.stream(PROMPT, max_new_tokens=4)
    engine.close()
    engine.close()
    for call in (
        lambda: engine.generate(PROMPT),
        lambda: engine.generate([PROMPT, PROMPT]),
        lambda: engine.generate(PROMPT, cache=document),
        lambda: engine.stream(PROMPT),
        lambda: list(stream),
        lambda: engine.score(PROMPT),
        lambda: engine.compress(PROMPT),
        lambda: engine.chat(),
        lambda: list(chat.send("again")),
        lambda: list(chat.regenerate()),
        lambda: chat.undo(),
        lambda: chat.save(tmp_path / "a.cake"),
        lambda: chat.set_budget(64),
        lambda: engine.__enter__(),
    ):
        assert "closed" in wrong(call)


def test_two_threads_get_what_each_would_get_alone(engine):
    prompts = [PROMPT, "another one that was left "]
    alone = [engine.generate(prompt, max_new_tokens=20).ids for prompt in prompts]
    found: dict[int, object] = {}

    def ask(number):
        try:
            found[number] = [engine.generate(prompts[number], max_new_tokens=20).ids for _ in range(5)]
        except BaseException as error:  # shown below
            found[number] = error

    threads = [threading.Thread(target=ask, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {number: [ids] * 5 for number, ids in enumerate(alone)}
