"""Chat and completion over a real socket, by OpenAI's own client: what an engine alone gives, in OpenAI's form."""

from __future__ import annotations

import json

import httpx
import openai
import pytest

HELLO = [{"role": "user", "content": "Hello world, what is it?"}]


def raw_events(url, body, path="/v1/chat/completions"):
    """The data of each event of a stream, as text."""
    with httpx.stream("POST", f"{url}{path}", json=body, timeout=30) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    return [line.removeprefix("data: ") for line in lines]


def test_a_reply_is_the_engines_whole_and_streamed(serving, alone):
    started = serving()
    client = started.client()
    options = {"model": "tiny", "messages": HELLO, "max_tokens": 12, "temperature": 0.9, "seed": 7}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(stream=True, **options))
    expected = alone(started, messages=HELLO, max_new_tokens=12, temperature=0.9, seed=7)
    assert expected.text.strip()
    assert whole.choices[0].message.content == expected.text
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason == "length"
    assert whole.object == "chat.completion"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.text
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    prompt = len(started.engine.encode(messages=HELLO))
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (
        prompt,
        12,
        prompt + 12,
    )


@pytest.mark.parametrize("include", [False, True])
def test_a_stream_begins_with_the_role_and_ends_as_clients_expect(serving, include):
    started = serving()
    body = {"messages": HELLO, "max_tokens": 5, "seed": 1, "stream": True, "temperature": 1.0}
    if include:
        body["stream_options"] = {"include_usage": True}
    events = raw_events(started.url, body)
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [chunk["object"] for chunk in chunks] == ["chat.completion.chunk"] * len(chunks)
    with_choice = [chunk for chunk in chunks if chunk["choices"]]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in with_choice]
    assert reasons == [None] * (len(reasons) - 1) + ["length"]
    if include:
        assert [chunk["choices"] == [] for chunk in chunks] == [False] * len(with_choice) + [True]
        assert all(chunk["usage"] is None for chunk in with_choice)
        whole = httpx.post(f"{started.url}/v1/chat/completions", json={**body, "stream": False, "stream_options": None})
        assert chunks[-1]["usage"] == whole.json()["usage"]
        assert chunks[-1]["usage"]["completion_tokens"] == 5
    else:
        assert len(with_choice) == len(chunks)
        assert all("usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
def test_one_token_is_one_token_and_none_is_none(serving, stream):
    started = serving()
    client = started.client()
    usage = {"stream_options": {"include_usage": True}} if stream else {}
    for count in (1, 0):
        answer = client.chat.completions.create(
            model="tiny",
            messages=HELLO,
            max_tokens=count,
            stream=stream,
            **usage,
        )
        if stream:
            chunks = list(answer)
            assert chunks[-1].usage.completion_tokens == count
            assert chunks[-2].choices[0].finish_reason == "length"
        else:
            assert answer.usage.completion_tokens == count
            assert answer.choices[0].finish_reason == "length"
            if not count:
                assert answer.choices[0].message.content == ""


def test_a_stop_token_and_a_stop_text_end_a_reply_with_stop(serving, alone):
    started = serving()
    client = started.client()
    options = {"max_new_tokens": 30, "temperature": 0.9, "seed": 3}
    plain = alone(started, messages=HELLO, **options)
    text = plain.text
    middle = text[len(text) // 2 : len(text) // 2 + 2]
    expected = alone(started, messages=HELLO, stop=(middle,), **options)
    assert expected.finish_reason == "stop"
    for stop in (middle, [middle, "never there"]):
        answer = client.chat.completions.create(
            model="tiny", messages=HELLO, max_tokens=30, temperature=0.9, seed=3, stop=stop
        )
        assert answer.choices[0].message.content == expected.text
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.completion_tokens == len(expected.ids)
        streamed = client.chat.completions.create(
            model="tiny", messages=HELLO, max_tokens=30, temperature=0.9, seed=3, stop=stop, stream=True
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == expected.text


def test_an_end_token_is_no_text_and_ignore_eos_goes_on(serving, alone):
    plain = serving()
    ids = alone(plain, messages=HELLO, max_new_tokens=12, temperature=0.0).ids
    assert ids[5] not in ids[:5]
    started = serving(checkpoint={"eos_token_id": ids[5]})
    client = started.client()
    answer = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=12, temperature=0.0)
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("stop", 5)
    more = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=12, temperature=0.0, extra_body={"ignore_eos": True}
    )
    assert (more.choices[0].finish_reason, more.usage.completion_tokens) == ("length", 12)


def test_penalties_and_filters_are_the_engines(serving, alone):
    started = serving()
    client = started.client()
    base = {"max_new_tokens": 20, "temperature": 0.8, "seed": 11}
    plain = alone(started, prompt="Hello", **base).text
    for name, value in {
        "presence_penalty": 2.0,
        "frequency_penalty": 2.0,
        "top_p": 0.2,
        "top_k": 3,
        "min_p": 0.4,
        "repetition_penalty": 1.9,
    }.items():
        expected = alone(started, prompt="Hello", **base, **{name: value}).text
        assert expected != plain, name
        own = {name: value} if name in ("presence_penalty", "frequency_penalty", "top_p") else {}
        extra = {} if own else {name: value}
        answer = client.completions.create(
            model="tiny", prompt="Hello", max_tokens=20, temperature=0.8, seed=11, extra_body=extra, **own
        )
        assert answer.choices[0].text == expected, name


def test_several_choices_have_seeds_of_their_own(serving, alone):
    started = serving()
    client = started.client()
    answer = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=8, temperature=1.0, seed=5, n=3)
    results = [alone(started, messages=HELLO, max_new_tokens=8, temperature=1.0, seed=5 + i) for i in range(3)]
    expected = [result.text for result in results]
    assert len(set(expected)) == 3
    assert [choice.message.content for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage.completion_tokens == sum(len(result.ids) for result in results)
    assert answer.usage.prompt_tokens == len(results[0].prompt_ids)
    texts = ["", "", ""]
    ends = []
    for chunk in client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=8, temperature=1.0, seed=5, n=3, stream=True
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends += [choice.index] if choice.finish_reason else []
    assert texts == expected
    assert sorted(ends) == [0, 1, 2]
    with pytest.raises(openai.BadRequestError, match="4 are the most"):
        client.chat.completions.create(model="tiny", messages=HELLO, n=5)


def test_completions_take_texts_and_ids_one_or_several(serving, alone):
    started = serving()
    client = started.client()
    ids = started.engine.encode("of the world")
    prompts = ["Hello", "of the world"]
    expected = [alone(started, prompt=prompt, max_new_tokens=6, temperature=0.0).text for prompt in prompts]
    options = {"model": "tiny", "max_tokens": 6, "temperature": 0.0}
    answer = client.completions.create(prompt=prompts, **options)
    assert [choice.text for choice in answer.choices] == expected
    assert answer.object == "text_completion"
    assert answer.usage.prompt_tokens == sum(len(started.engine.encode(prompt)) for prompt in prompts)
    assert client.completions.create(prompt=ids, **options).choices[0].text == expected[1]
    both = client.completions.create(prompt=[started.engine.encode("Hello"), ids], **options)
    assert [choice.text for choice in both.choices] == expected
    streamed = client.completions.create(prompt="Hello", stream=True, **options)
    chunks = list(streamed)
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected[0]
    assert chunks[-1].choices[0].finish_reason == "length"


def test_log_probabilities_are_those_of_the_engine_and_finite(serving, alone):
    started = serving()
    client = started.client()
    expected = alone(started, messages=HELLO, max_new_tokens=6, temperature=1.0, top_k=1, seed=2, logprobs=3)
    options = {"model": "tiny", "messages": HELLO, "max_tokens": 6, "temperature": 1.0, "seed": 2}
    answer = client.chat.completions.create(logprobs=True, top_logprobs=3, extra_body={"top_k": 1}, **options)
    told = answer.choices[0].logprobs.content
    assert [one.logprob for one in told] == [one.logprob for one in expected.logprobs]
    assert [[top.logprob for top in one.top_logprobs] for one in told] == [
        [value for _, value in one.top[:3]] for one in expected.logprobs
    ]
    tokenizer = started.engine.tokenizer
    assert [bytes(one.bytes) for one in told] == [tokenizer.token_bytes(index) for index in expected.ids]
    streamed = client.chat.completions.create(
        logprobs=True, top_logprobs=3, stream=True, extra_body={"top_k": 1}, **options
    )
    found = [one for chunk in streamed if chunk.choices[0].logprobs for one in chunk.choices[0].logprobs.content]
    assert [one.logprob for one in found] == [one.logprob for one in told]
    legacy = client.completions.create(model="tiny", prompt="Hello", max_tokens=6, temperature=0.0, logprobs=2)
    plain = alone(started, prompt="Hello", max_new_tokens=6, temperature=0.0, logprobs=2)
    assert legacy.choices[0].logprobs.token_logprobs == [one.logprob for one in plain.logprobs]
    assert all(len(top) >= 1 for top in legacy.choices[0].logprobs.top_logprobs)
    assert legacy.choices[0].logprobs.text_offset[0] == 0


def test_parts_are_joined_null_is_empty_and_unknown_fields_are_ignored(serving, alone):
    started = serving()
    url = f"{started.url}/v1/chat/completions"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = {
        "messages": [{"role": "developer", "content": None, "name": "x"}, {"role": "user", "content": parts, "new": 1}],
        "max_completion_tokens": 3,
        "temperature": 0.0,
        "never_heard_of": {"a": [1, 2]},
        "tools": [],
        "response_format": {"type": "text"},
        "user": "somebody",
        "cake": {"stats": True},
    }
    answer = httpx.post(url, json=body)
    assert answer.status_code == 200, answer.text
    messages = [{"role": "system", "content": ""}, {"role": "user", "content": parts}]
    expected = alone(started, messages=messages, max_new_tokens=3, temperature=0.0)
    assert answer.json()["choices"][0]["message"]["content"] == expected.text
    assert answer.json()["usage"]["completion_tokens"] == 3
    assert answer.json()["cake"]["stats"][0]["prompt_tokens"] == len(started.engine.encode(messages=messages))


def test_models_are_listed_and_others_are_not_found(serving):
    started = serving()
    client = started.client()
    (model,) = client.models.list().data
    assert model.id == "tiny"
    assert client.models.retrieve("other-name").id == "tiny"
    assert client.chat.completions.create(model="other-name", messages=HELLO, max_tokens=1).model == "tiny"
    for call in (
        lambda: client.models.retrieve("gpt-5"),
        lambda: client.chat.completions.create(model="gpt-5", messages=HELLO),
    ):
        with pytest.raises(openai.NotFoundError) as raised:
            call()
        assert raised.value.code == "model_not_found"
