"""Documents: read once through the batch, asked by id, bounded, deleted."""

from __future__ import annotations

import threading

import httpx
import openai
import pytest

TEXT = "The harbour office keeps watch. " * 30
DOCUMENTS = "/v1/documents"


def upload(started, **body):
    return httpx.post(f"{started.url}{DOCUMENTS}", json={"text": TEXT, **body}, timeout=30)


def ask(started, document, question, **options):
    answer = started.client().chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": question}],
        temperature=0.0,
        max_tokens=8,
        extra_body={"cake": {"document": document}},
        **options,
    )
    return answer


def test_a_document_answers_as_the_engines_own_does(serving):
    from cake_infer import Engine

    started = serving()
    told = upload(started, name="harbour", system="Be brief.")
    assert told.status_code == 201, told.text
    document = told.json()
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXT}]
    with Engine.load(started.engine.model_path, cache=started.engine.cache, chunk=64, step="eager") as engine:
        expected = engine.compress(messages=messages)
        assert (document["tokens"], document["kept_tokens"]) == (expected.tokens, expected.kept_tokens)
        assert document["layer_lengths"] == [list(heads) for heads in expected.layer_lengths]
        assert document["kept_tokens"] < document["tokens"] / 2
        for question in ("What is it?", "And who?", "What is it?"):
            answer = ask(started, document["id"], question)
            result = engine.generate(question, cache=expected, max_new_tokens=8, temperature=0.0)
            assert answer.choices[0].message.content == result.text
            assert answer.usage.prompt_tokens == expected.tokens + len(result.prompt_ids)
            assert answer.usage.prompt_tokens_details.cached_tokens == expected.tokens


def test_a_raw_document_is_continued_by_completions(serving):
    from cake_infer import Engine

    started = serving()
    document = upload(started, raw=True, cake={"budget": 40}).json()
    with Engine.load(started.engine.model_path, budget=40, window=8, chunk=64, step="eager") as engine:
        result = engine.generate("\n\nSo", cache=engine.compress(TEXT), max_new_tokens=8, temperature=0.0)
    answer = started.client().completions.create(
        model="tiny",
        prompt="\n\nSo",
        temperature=0.0,
        max_tokens=8,
        extra_body={"cake": {"document": document["id"]}},
    )
    assert answer.choices[0].text == result.text
    with pytest.raises(openai.BadRequestError, match="raw"):
        ask(started, document["id"], "What?")


def test_documents_are_listed_found_and_deleted(serving):
    started = serving()
    url = f"{started.url}{DOCUMENTS}"
    assert httpx.get(url).json() == {"object": "list", "data": []}
    first, second = (upload(started, name=name).json() for name in ("one", "two"))
    assert first["id"] != second["id"]
    assert [one["id"] for one in httpx.get(url).json()["data"]] == [first["id"], second["id"]]
    assert httpx.get(f"{url}/{first['id']}").json() == first
    assert httpx.delete(f"{url}/{first['id']}").json() == {"id": first["id"], "object": "document", "deleted": True}
    assert httpx.delete(f"{url}/{first['id']}").status_code == 404
    with pytest.raises(openai.BadRequestError) as raised:
        ask(started, first["id"], "What?")
    assert raised.value.code == "document_not_found"
    assert ask(started, second["id"], "What?").choices


def test_a_full_shelf_refuses_until_something_is_deleted(serving):
    started = serving(documents=1)
    document = upload(started).json()
    full = upload(started)
    assert full.status_code == 507
    assert full.json()["error"]["code"] == "documents_full"
    httpx.delete(f"{started.url}{DOCUMENTS}/{document['id']}")
    assert upload(started).status_code == 201
    small = serving(document_bytes=document["bytes"] - 1)
    assert upload(small).status_code == 507
    assert small.service.shelf.nbytes == 0


def test_a_question_needs_one_message_and_no_budget_of_its_own(serving):
    started = serving()
    document = upload(started).json()["id"]
    url = f"{started.url}/v1/chat/completions"
    question = {"role": "user", "content": "What?"}
    for body in (
        {"messages": [{"role": "system", "content": "x"}, question], "cake": {"document": document}},
        {"messages": [question], "cake": {"document": document, "budget": 32}},
    ):
        assert httpx.post(url, json=body).status_code == 400


def test_a_document_is_read_beside_replies_that_go_on(serving, slow):
    started = serving()
    stream = started.client().completions.create(
        model="tiny", prompt="x", max_tokens=300, stream=True, extra_body={"ignore_eos": True}
    )
    next(stream)
    slow.seconds = 0.02  # 6 s for the upload to come through on a busy machine
    answers = []
    thread = threading.Thread(target=lambda: answers.append(upload(started)))
    thread.start()
    beside = 0
    for _ in stream:
        beside += not answers
        slow.seconds = 0.0 if answers else slow.seconds
    thread.join()
    assert answers[0].status_code == 201
    assert beside >= answers[0].json()["tokens"] // 64
