"""What is not to be answered is refused in OpenAI's form, and nothing of it harms the server."""

from __future__ import annotations

import json
import socket

import httpx
import openai
import pytest

HELLO = [{"role": "user", "content": "Hello"}]
CHAT, COMPLETION, DOCUMENTS = "/v1/chat/completions", "/v1/completions", "/v1/documents"


def is_openai_error(response):
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    return error


WRONG = {
    "no messages": (CHAT, {}, "messages"),
    "empty messages": (CHAT, {"messages": []}, "messages"),
    "a message of the user without a content": (CHAT, {"messages": [{"role": "user"}]}, "messages.0.content"),
    "a role that there is not": (CHAT, {"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
    "an image": (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
        "messages.0.content.0",
    ),
    "a tool's answer": (CHAT, {"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages.0"),
    "tools": (CHAT, {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    "json": (CHAT, {"messages": HELLO, "response_format": {"type": "json_object"}}, "response_format"),
    "logit bias": (CHAT, {"messages": HELLO, "logit_bias": {"5": 100}}, "logit_bias"),
    "audio": (CHAT, {"messages": HELLO, "modalities": ["text", "audio"]}, "modalities"),
    "echo": (COMPLETION, {"prompt": "x", "echo": True}, "echo"),
    "best of": (COMPLETION, {"prompt": "x", "best_of": 3}, "best_of"),
    "suffix": (COMPLETION, {"prompt": "x", "suffix": "y"}, "suffix"),
    "no prompts": (COMPLETION, {"prompt": []}, "prompt"),
    "n of 0": (CHAT, {"messages": HELLO, "n": 0}, "n"),
    "negative max_tokens": (CHAT, {"messages": HELLO, "max_tokens": -1}, "max_tokens"),
    "two limits": (CHAT, {"messages": HELLO, "max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
    "temperature as a list": (CHAT, {"messages": HELLO, "temperature": [1]}, "temperature"),
    "negative temperature": (CHAT, {"messages": HELLO, "temperature": -1}, None),
    "top_p above 1": (CHAT, {"messages": HELLO, "top_p": 1.5}, None),
    "penalty above 2": (CHAT, {"messages": HELLO, "presence_penalty": 3}, None),
    "seed of 400 digits": (CHAT, {"messages": HELLO, "seed": 10**400}, None),
    "empty stop": (CHAT, {"messages": HELLO, "stop": ""}, None),
    "too many stops": (CHAT, {"messages": HELLO, "stop": ["a"] * 17}, "stop"),
    "top_logprobs alone": (CHAT, {"messages": HELLO, "top_logprobs": 2}, "top_logprobs"),
    "top_logprobs of 21": (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    "stream_options alone": (CHAT, {"messages": HELLO, "stream_options": {"include_usage": True}}, "stream_options"),
    "ids outside the vocabulary": (COMPLETION, {"prompt": [5, 100000]}, None),
    "unknown part of the extension": (CHAT, {"messages": HELLO, "cake": {"windows": 3}}, "cake.windows"),
    "budget below the window": (CHAT, {"messages": HELLO, "cake": {"budget": 3}}, None),
    "budget in words": (CHAT, {"messages": HELLO, "cake": {"budget": "much"}}, None),
    "unknown document": (CHAT, {"messages": HELLO, "cake": {"document": "doc-1"}}, "cake.document"),
    "an empty document": (DOCUMENTS, {"text": ""}, "text"),
}


def test_what_cannot_be_applied_is_refused_with_400(serving):
    started = serving()
    with httpx.Client(base_url=started.url) as client:
        for name, (path, body, param) in WRONG.items():
            response = client.post(path, content=json.dumps(body))
            assert response.status_code == 400, (name, response.text)
            error = is_openai_error(response)
            assert error["type"] == "invalid_request_error", name
            assert error["param"] == param, (name, error)
    with pytest.raises(openai.BadRequestError) as raised:
        started.client().chat.completions.create(model="tiny", messages=HELLO, logit_bias={"5": 1})
    assert raised.value.param == "logit_bias"
    assert started.service.scheduler.running == started.service.scheduler.waiting == 0


GARBAGE = {
    "nothing": b"",
    "no JSON": b"{",
    "a list": b"[1]",
    "a word": b'"x"',
    "not UTF-8": b'{"messages": "\xff"}',
    "a lone surrogate": b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    "NaN": b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}',
    "very deep": b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
}


def test_garbage_is_refused_and_the_server_goes_on(serving):
    started = serving()
    for name, body in GARBAGE.items():
        response = httpx.post(f"{started.url}{CHAT}", content=body)
        assert response.status_code == 400, (name, response.text)
        is_openai_error(response)
    for noise in (
        b"\x00\x01\x02\xff" * 100,
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1 HTTP/1.1\r\nContent-Length: -4\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", started.port), timeout=10) as sock:
            sock.sendall(noise)
            sock.settimeout(10)
            while sock.recv(65536):
                pass
    answer = started.client().chat.completions.create(model="tiny", messages=HELLO, max_tokens=2)
    assert answer.usage.completion_tokens <= 2


def test_routes_and_methods_that_there_are_not(serving):
    started = serving()
    for method, path, status in (("GET", "/v1/nothing", 404), ("GET", CHAT, 405), ("GET", "/v1/documents/doc-x", 404)):
        response = httpx.request(method, f"{started.url}{path}")
        assert response.status_code == status
        is_openai_error(response)


def test_a_huge_body_is_refused_and_not_kept(serving):
    started = serving(max_body=10_000)
    fits = json.dumps({"messages": [{"role": "user", "content": "x" * 500}], "max_tokens": 1, "pad": "y" * 9_000})
    assert httpx.post(f"{started.url}{CHAT}", content=fits).status_code == 200
    for content in (b"x" * 10_001, b"x" * 5_000_000):
        response = httpx.post(f"{started.url}{CHAT}", content=content)
        assert response.status_code == 413
        assert "10,000 bytes" in is_openai_error(response)["message"]
    in_parts = httpx.post(f"{started.url}{CHAT}", content=(b"x" * 1000 for _ in range(40)))  # of no stated length
    assert in_parts.status_code == 413


def test_a_prompt_that_is_too_long_is_told_with_both_figures(serving):
    started = serving(load={"context": 128}, max_prompt=100)
    limited, client = started.client(), serving(load={"context": 128}).client()
    for one, words, figures in ((limited, 35, "106 tokens.*100"), (client, 60, "181 tokens.*128")):
        with pytest.raises(openai.BadRequestError, match=figures) as raised:
            one.completions.create(model="tiny", prompt="x y " * words)
        assert raised.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match=r"129 messages.*128") as raised:
        client.chat.completions.create(model="tiny", messages=HELLO[:1] * 129)
    assert raised.value.code == "context_length_exceeded"
    long = client.completions.create(model="tiny", prompt="x y " * 12, max_tokens=1000, extra_body={"ignore_eos": True})
    assert long.usage.total_tokens == 128
    assert long.choices[0].finish_reason == "length"


def test_a_request_that_no_empty_arena_holds_is_refused_and_not_kept_waiting(serving):
    started = serving(limit=200_000)
    client = started.client()
    with pytest.raises(openai.BadRequestError, match="KV memory"):
        client.completions.create(model="tiny", prompt="x y " * 300, max_tokens=2000)
    assert client.completions.create(model="tiny", prompt="x", max_tokens=2).usage.completion_tokens <= 2


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", b'{"prompt": [' + b"[], " * 400_000 + b"[]]}"),
        ("/v1/completions", b'{"prompt": [' + b'"a", ' * 400_000 + b'"a"]}'),
        ("/v1/completions", b'{"prompt": [1, ' + b"{}, " * 400_000 + b"{}]}"),
        ("/v1/completions", b'{"prompt": "x", "stop": [' + b"1, " * 400_000 + b"1]}"),
        (CHAT, b'{"messages": [' + b"{}, " * 400_000 + b"{}]}"),
        (CHAT, b'{"messages": [' + b'{"role": "user", "content": "x"}, ' * 10_000 + b'{"role": "user"}]}'),
        (CHAT, b'{"messages": [{"role": "user", "content": [' + b"1, " * 400_000 + b"1]}]}"),
    ],
)
def test_lists_without_end_are_refused_before_each_item_is_looked_at(serving, monkeypatch, path, body):
    from cake_infer.engine.engine import Engine

    started = serving()
    monkeypatch.setattr(Engine, "encode", lambda *_, **__: pytest.fail("nothing was to be encoded"))
    response = httpx.post(f"{started.url}{path}", content=body, timeout=30)
    assert response.status_code == 400
    assert len(is_openai_error(response)["message"]) < 300


def test_one_error_of_a_list_is_enough():
    from cake_infer.engine.serving.schemas import ChatRequest, CompletionRequest
    from pydantic import ValidationError

    for kind, body in (
        (ChatRequest, {"messages": [{}] * 50}),
        (ChatRequest, {"messages": [{"role": "user", "content": [1] * 50}]}),
        (CompletionRequest, {"prompt": [1, *[{}] * 50]}),
        (CompletionRequest, {"prompt": "x", "stop": [1] * 50}),
    ):
        with pytest.raises(ValidationError) as raised:
            kind.model_validate(body)
        assert raised.value.error_count() < 8


def test_a_template_that_refuses_is_a_bad_request(serving):
    started = serving(template="{{ raise_exception('not these messages') }}")
    with pytest.raises(openai.BadRequestError, match="not these messages"):
        started.client().chat.completions.create(model="tiny", messages=HELLO)
    bare = serving(template=None)
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        bare.client().chat.completions.create(model="tiny", messages=HELLO)
    assert bare.client().completions.create(model="tiny", prompt="x", max_tokens=1).object == "text_completion"


def test_the_key_is_asked_for_everywhere_but_for_health(serving):
    started = serving(api_key="very secret")
    assert started.client(api_key="very secret").models.list().data[0].id == "tiny"
    with pytest.raises(openai.AuthenticationError) as raised:
        started.client(api_key="wrong").chat.completions.create(model="tiny", messages=HELLO)
    assert raised.value.code == "invalid_api_key"
    for path in ("/v1/models", "/metrics", DOCUMENTS, "/v1/nothing"):
        response = httpx.get(f"{started.url}{path}")
        assert response.status_code == 401, path
        is_openai_error(response)
    for header in ("Basic very secret", "very secret", "Bearer", "Bearer very secrets"):
        assert httpx.get(f"{started.url}/v1/models", headers={"Authorization": header}).status_code == 401
    assert httpx.get(f"{started.url}/health").status_code == 200


def test_pages_from_elsewhere_cannot_use_a_local_server(serving):
    started = serving()
    url = f"{started.url}/v1/models"
    assert httpx.get(url, headers={"Origin": "http://evil.example"}).status_code == 403
    assert httpx.get(url, headers={"Host": "evil.example"}).status_code == 403
    assert httpx.get(url, headers={"Origin": started.url}).status_code == 200
    assert httpx.get(url, headers={"Host": f"localhost:{started.port}"}).status_code == 200


HUGE = b"9" * 400
ENDLESS = b"9" * 5000
NO_NUMBERS = (
    *(b"true", b"false", b'"5"', b'"yes"', b"[1]", b"{}", HUGE, b"-" + HUGE),
    *(ENDLESS, b"1e400", b"1e300", b"NaN"),
)
NO_TRUTHS = (b"1", b"0", b'"true"', b'"yes"', b"[]", b"{}", b"1.0")


def fields_of(kind):
    """Every field of every body that is a number or true or false: the body's class and the JSON around a value."""
    from cake_infer.engine.serving import schemas

    chat = b'"messages": [{"role": "user", "content": "x"}]'
    bodies = {"ChatRequest": chat, "CompletionRequest": b'"prompt": "x"', "DocumentRequest": b'"text": "x"'}
    for name, body in bodies.items():
        cls = getattr(schemas, name)
        owners = {"": cls, "cake": schemas.CakeOptions}
        if name != "DocumentRequest":
            owners["stream_options"] = schemas.StreamOptions
        for outer, owner in owners.items():
            for field, info in owner.model_fields.items():
                hint = str(info.annotation)
                numeric = ("int" in hint or "float" in hint) and field not in ("prompt", "messages", "cake")
                if ("bool" in hint) if kind == "truth" else numeric:
                    inner = f'"{field}": %s'
                    inner = f'"{outer}": {{{inner}}}' if outer else inner
                    yield pytest.param(cls, b"{%s, %s}" % (body, inner.encode()), id=f"{name} {outer} {field}")


def apply(cls, body):
    """What the routes do with a body before a model is asked."""
    from cake_infer.cache.budget import Budget
    from cake_infer.engine.generation import GenerationConfig

    asked = cls.parse(body)
    if hasattr(asked, "generation"):
        asked.generation(GenerationConfig())
    if asked.cake.budget is not None:
        Budget.parse(asked.cake.budget)


def refused(cls, body):
    """A body is a bad request, in a few words."""
    from cake_infer.engine.serving.errors import as_api_error

    with pytest.raises(Exception) as raised:  # noqa: PT011 (as_api_error knows which)
        apply(cls, body)
    told = as_api_error(raised.value)
    assert told.status == 400, (body[:200], told.message)
    assert len(told.message) < 300


@pytest.mark.parametrize(("cls", "body"), list(fields_of("number")))
def test_a_number_is_a_number_that_there_can_be(cls, body):
    for value in NO_NUMBERS:
        if not (value == b'"5"' and b"budget" in body):  # where a share of the prompt may stand too
            refused(cls, body.replace(b"%s", value))


@pytest.mark.parametrize(("cls", "body"), list(fields_of("truth")))
def test_true_and_false_are_nothing_else(cls, body):
    for value in NO_TRUTHS:
        refused(cls, body.replace(b"%s", value))


def test_absurd_numbers_are_bad_requests_and_the_server_goes_on(serving):
    started = serving()
    with httpx.Client(base_url=started.url) as client:
        for name in ("max_tokens", "n", "best_of", "seed", "top_k", "temperature", "logprobs"):
            for value in NO_NUMBERS:
                response = client.post(COMPLETION, content=b'{"prompt": "x", "%s": %s}' % (name.encode(), value))
                assert response.status_code == 400, (name, value[:20], response.text)
                is_openai_error(response)
        for prompt in (b"[true]", b"[1, 1.5]", b"[[1], [true]]", b"[%s]" % HUGE, b"true", b"5"):
            assert client.post(COMPLETION, content=b'{"prompt": %s}' % prompt).status_code == 400, prompt[:20]
        answer = client.post(COMPLETION, content=b'{"prompt": [5, 6], "max_tokens": 1, "temperature": 0, "n": null}')
        assert answer.json()["usage"]["completion_tokens"] == 1
