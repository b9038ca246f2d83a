"""Many clients at once: the same ids whoever is beside, bounded queues, clients that vanish or never read."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

CHAT = "/v1/chat/completions"


def prompt(number):
    return [{"role": "user", "content": f"{number} " + "what is the world " * (1 + 7 * (number % 5))}]


def send(sock, body, path=CHAT):
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(data)}\r\n\r\n"
    sock.sendall(head.encode() + data)


def idle(started):
    scheduler = started.service.scheduler
    return lambda: scheduler.running == scheduler.waiting == 0 and not scheduler._batch.arena.members


def test_parallel_streams_give_each_client_what_it_would_get_alone(serving, alone, wait_for):
    started = serving(queue=40)
    client = started.client()

    def ask(number):
        chunks = client.chat.completions.create(
            model="tiny",
            messages=prompt(number),
            max_tokens=5 + number,
            temperature=0.9,
            seed=number,
            stream=True,
            extra_body={"cake": {"budget": 16 + number, "stats": True}},
        )
        text, last = "", None
        for chunk in chunks:
            text, last = text + (chunk.choices[0].delta.content or ""), chunk
        return text, last.model_extra["cake"]["stats"][0]

    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(ask, range(12)))
    from cake_infer import Engine

    for number, (text, stats) in enumerate(found):
        with Engine.load(started.engine.model_path, budget=16 + number, window=8, chunk=64, step="eager") as engine:
            expected = engine.generate(messages=prompt(number), max_new_tokens=5 + number, temperature=0.9, seed=number)
        assert text == expected.text, number
        assert stats["budget"] == 16 + number
        assert stats["layer_lengths"] == [list(lengths) for lengths in expected.stats.layer_lengths]
    assert any(stats["kept_share"] < 1 for _, stats in found)
    wait_for(idle(started))


def test_a_newcomer_joins_while_another_reply_runs(serving, slow, wait_for):
    started = serving()
    slow.seconds = 0.02
    client = started.client()
    first = client.chat.completions.create(
        model="tiny", messages=prompt(0), max_tokens=1000, stream=True, extra_body={"ignore_eos": True}
    )
    next(first)
    second = client.chat.completions.create(model="tiny", messages=prompt(1), max_tokens=3)
    assert second.usage.completion_tokens <= 3
    assert started.service.scheduler.running == 1, "the first one was to run on beside it"
    slow.seconds = 0.0
    assert list(first)[-1].choices[0].finish_reason == "length"


def test_a_long_prompt_is_read_in_chunks_between_the_steps_of_the_others(serving, slow):
    started = serving()
    client = started.client()
    events = []
    stream = client.completions.create(
        model="tiny", prompt="x", max_tokens=200, stream=True, extra_body={"ignore_eos": True}
    )
    next(stream)
    slow.seconds = 0.005
    long = started.engine.encode("x y " * 500)

    def ask():
        client.completions.create(model="tiny", prompt=long, max_tokens=1)
        events.append(("read", slow.steps))

    before = slow.steps
    thread = threading.Thread(target=ask)
    thread.start()
    tokens = 0
    for _ in stream:
        tokens += not events
    thread.join()
    # each step reads one chunk of 64 tokens and writes one token of the stream
    chunks = -(-len(long) // 64)
    assert events[0][1] - before >= chunks
    assert tokens >= chunks // 2


def test_a_short_prompt_does_not_wait_until_a_long_one_has_been_read(serving, slow, wait_for):
    started = serving()
    slow.seconds = 0.2  # 47 chunks take long enough for a client on a busy machine
    scheduler, client = started.service.scheduler, started.client()
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(client.completions.create, model="tiny", prompt="x y " * 1000, max_tokens=1)
        wait_for(lambda: scheduler.running == 1 and slow.steps > 2)
        client.completions.create(model="tiny", prompt="x", max_tokens=1)
        assert not long.done()
        assert scheduler.running == 1
        slow.seconds = 0.0
        assert long.result().usage.prompt_tokens > 2000


def test_a_request_may_have_a_policy_of_its_own(serving):
    from cake_infer import Engine

    started = serving()
    url = f"{started.url}/v1/completions"
    body = {"prompt": "what is the world and who " * 12, "max_tokens": 8, "temperature": 0.0}
    texts = {}
    for name, budget in (("cake", 24), ("snapkv", 24), ("streaming-llm", 24), ("full", None), ("squeeze", 40)):
        cake = {"policy": name, "stats": True} | ({} if budget is None else {"budget": budget})
        answer = httpx.post(url, json=body | {"cake": cake}, timeout=30)
        assert answer.status_code == 200, answer.text
        options = {} if budget is None else {"budget": budget, "window": 8}
        with Engine.load(started.engine.model_path, policy=name, chunk=64, step="eager", **options) as engine:
            expected = engine.generate(body["prompt"], max_new_tokens=8, temperature=0.0)
        (stats,) = answer.json()["cake"]["stats"]
        texts[name] = answer.json()["choices"][0]["text"]
        assert texts[name] == expected.text, name
        assert stats["layer_lengths"] == [list(lengths) for lengths in expected.stats.layer_lengths], name
        if name != "full":
            assert stats["policy"] == expected.stats.policy
    assert len(set(texts.values())) >= 3
    for cake in ({"policy": "magic"}, {"policy": "full", "budget": 40}):
        assert httpx.post(url, json=body | {"cake": cake}).status_code == 400


@pytest.mark.parametrize("when", ["while it is written", "while it is read", "while it waits"])
def test_a_client_that_goes_away_frees_its_rows_at_once(serving, slow, alone, wait_for, when):
    started = serving(parallel=1)
    client = started.client()
    slow.seconds = 0.02
    scheduler = started.service.scheduler
    with contextlib.ExitStack() as stack:
        if when == "while it waits":
            other = stack.enter_context(socket.create_connection(("127.0.0.1", started.port)))
            send(other, {"messages": prompt(3), "max_tokens": 3000, "stream": True, "ignore_eos": True})
            wait_for(lambda: scheduler.running == 1)
        sock = socket.create_connection(("127.0.0.1", started.port))
        content = "x y " * (800 if when == "while it is read" else 5)
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 500, "ignore_eos": True}
        send(sock, body | {"stream": True})
        if when == "while it is written":
            while b"data: " not in sock.recv(4096):
                pass
        elif when == "while it is read":
            wait_for(lambda: scheduler.running == 1 and slow.steps > 2)
        else:
            wait_for(lambda: scheduler.waiting == 1)
        sock.close()
        gone_at = slow.steps
        if when == "while it waits":
            wait_for(lambda: scheduler.waiting == 0)
            other.close()
        wait_for(idle(started))
        assert slow.steps - gone_at < 250, "it ran on for nobody"
    answer = client.chat.completions.create(
        model="tiny", messages=prompt(2), max_tokens=6, temperature=0.9, seed=4, stream=True
    )
    expected = alone(started, messages=prompt(2), max_new_tokens=6, temperature=0.9, seed=4)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in answer) == expected.text


def test_an_answer_in_one_piece_is_given_up_too_when_nobody_waits_for_it(serving, slow, wait_for):
    started = serving()
    slow.seconds = 0.01
    with socket.create_connection(("127.0.0.1", started.port)) as sock:
        send(sock, {"messages": prompt(0), "max_tokens": 2000, "ignore_eos": True})
        wait_for(lambda: started.service.scheduler.running == 1)
    wait_for(idle(started), 5)
    assert slow.steps < 600


def test_a_client_that_never_reads_is_dropped_and_the_others_go_on(serving, wait_for):
    started = serving(backlog=100, parallel=2, load={"context": 4000})
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", started.port))
        send(
            sock,
            {
                "messages": prompt(0),
                "max_tokens": 3900,
                "stream": True,
                "logprobs": True,
                "top_logprobs": 20,
                "ignore_eos": True,
            },
        )
        wait_for(lambda: started.service.scheduler.running == 1)
        answer = started.client().chat.completions.create(model="tiny", messages=prompt(1), max_tokens=3)
        assert answer.usage.completion_tokens <= 3
        wait_for(idle(started), 60)
        written = [
            sample.value
            for metric in started.service.metrics.registry.collect()
            for sample in metric.samples
            if sample.name == "cake_replies_total" and sample.labels["finish_reason"] == "cancelled"
        ]
        assert written == [1.0], "it was to be given up, not written to its end"
        sock.settimeout(10)
        with contextlib.suppress(ConnectionError):  # aborted: what had been sent before may still come
            while sock.recv(1 << 16):
                pass


def test_connections_that_ask_nothing_are_closed(serving):
    started = serving(patience=0.3)
    for begin in (b"", b"POST /v1/chat/comple", b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Le"):
        with socket.create_connection(("127.0.0.1", started.port), timeout=10) as sock:
            sock.sendall(begin)
            assert sock.recv(100) == b""
    with socket.create_connection(("127.0.0.1", started.port), timeout=10) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n{")
        assert b" 408 " in sock.recv(1000)


def test_a_full_queue_says_when_to_come_back(serving, slow, wait_for):
    started = serving(parallel=1, queue=2)
    slow.seconds = 0.2  # the first reply takes 8 s, long enough to be refused on a busy machine
    client = started.client()
    scheduler = started.service.scheduler
    with ThreadPoolExecutor(3) as pool:
        calls = [
            pool.submit(
                client.chat.completions.create,
                model="tiny",
                messages=prompt(number),
                max_tokens=40,
                extra_body={"ignore_eos": True},
            )
            for number in range(3)
        ]
        wait_for(lambda: scheduler.running + scheduler.waiting == 3)
        with pytest.raises(openai.RateLimitError) as raised:
            client.chat.completions.create(model="tiny", messages=prompt(0), max_tokens=2)
        assert int(raised.value.response.headers["Retry-After"]) >= 1
        assert raised.value.code == "queue_full"
        slow.seconds = 0.0
        assert all(call.result().usage.completion_tokens == 40 for call in calls)
    # the openai client comes back by itself when it may
    assert client.with_options(max_retries=3).chat.completions.create(model="tiny", messages=prompt(0), max_tokens=1)


def test_what_the_arena_has_no_room_for_waits_its_turn(serving, slow, wait_for, alone):
    started = serving(limit=210_000, parallel=4)
    slow.seconds = 0.002
    client = started.client()
    options = {"max_tokens": 150, "extra_body": {"ignore_eos": True}, "temperature": 0.0}
    together = []

    def ask(number):
        answer = client.chat.completions.create(model="tiny", messages=prompt(number), **options)
        return answer.choices[0].message.content

    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(ask, number) for number in range(4)]
        while not all(call.done() for call in calls):
            together.append(started.service.scheduler.running)
            time.sleep(0.005)
    assert 1 <= max(together) < 4
    for number, call in enumerate(calls):
        expected = alone(started, messages=prompt(number), max_new_tokens=150, temperature=0.0)
        assert expected.text
        assert call.result().startswith(expected.text), number
    wait_for(idle(started))


def test_metrics_count_what_was_done(serving, wait_for):
    started = serving()
    client = started.client()
    used = [client.completions.create(model="tiny", prompt="x y z", max_tokens=4).usage for _ in range(3)]
    httpx.post(f"{started.url}{CHAT}", content=b"{")
    wait_for(idle(started))
    text = httpx.get(f"{started.url}/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values['cake_requests_total{route="/v1/completions",status="200"}']) == 3
    assert float(values['cake_requests_total{route="/v1/chat/completions",status="400"}']) == 1
    assert float(values["cake_prompt_tokens_total"]) == sum(one.prompt_tokens for one in used)
    assert float(values["cake_reply_tokens_total"]) >= sum(one.completion_tokens for one in used)
    assert float(values["cake_first_token_seconds_count"]) == 3
    assert float(values["cake_arena_used_bytes"]) == 0
    assert float(values["cake_arena_limit_bytes"]) == 32 * (1 << 20)
    assert float(values["cake_running"]) == float(values["cake_waiting"]) == 0


def test_a_step_that_fails_ends_its_requests_and_no_others(serving, monkeypatch):
    from cake_infer.engine.batch import Batch

    started = serving()
    client = started.client()
    step, failing = Batch._step, [True]

    def broken(batch, members):
        if failing:
            failing.clear()
            raise RuntimeError("a fault of the hardware")
        return step(batch, members)

    monkeypatch.setattr(Batch, "_step", broken)
    with pytest.raises(openai.InternalServerError, match="RuntimeError"):
        client.chat.completions.create(model="tiny", messages=prompt(0), max_tokens=5)
    assert client.chat.completions.create(model="tiny", messages=prompt(0), max_tokens=5).choices


def test_a_prompt_that_cannot_be_read_costs_the_others_no_token(serving, slow, monkeypatch, alone):
    from cake_infer.engine import prefill

    started = serving()
    client = started.client()
    slow.seconds = 0.01
    stream = client.chat.completions.create(
        model="tiny", messages=prompt(0), max_tokens=60, temperature=0.9, seed=2, stream=True
    )
    text = next(stream).choices[0].delta.content or ""
    whole = prefill._whole_layer

    def broken(*arguments, **options):
        raise RuntimeError("no memory for a product")

    monkeypatch.setattr(prefill, "_whole_layer", broken)
    with pytest.raises(openai.InternalServerError, match="RuntimeError"):
        client.completions.create(model="tiny", prompt="x y z " * 30, max_tokens=2)
    monkeypatch.setattr(prefill, "_whole_layer", whole)
    text += "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == alone(started, messages=prompt(0), max_new_tokens=60, temperature=0.9, seed=2).text


def test_a_fault_of_the_scheduler_is_told_and_nobody_waits_for_ever(serving, monkeypatch):
    started = serving()
    client = started.client(timeout=10)
    monkeypatch.setattr(started.service.scheduler, "_admit", lambda: 1 / 0)
    for status in (500, 503):
        with pytest.raises(openai.InternalServerError) as raised:
            client.chat.completions.create(model="tiny", messages=prompt(0))
        assert raised.value.status_code == status
    assert httpx.get(f"{started.url}/health").status_code == 503


def test_stopping_cuts_what_runs_refuses_what_waits_and_frees_the_port(serving, slow, wait_for):
    started = serving(parallel=1, grace=0.3)
    slow.seconds = 0.02
    client = started.client()
    stream = client.chat.completions.create(
        model="tiny", messages=prompt(0), max_tokens=3000, stream=True, extra_body={"ignore_eos": True}
    )
    next(stream)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.chat.completions.create, model="tiny", messages=prompt(1))
        wait_for(lambda: started.service.scheduler.waiting == 1)
        started.server.stop()
        chunks = list(stream)
        assert chunks[-1].choices[0].finish_reason == "length"
        assert 1 <= len(chunks) < 200
        with pytest.raises(openai.InternalServerError) as raised:
            waiting.result()
        assert raised.value.status_code == 503
    started.thread.join(10)
    assert not started.thread.is_alive()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", started.port), timeout=5)
