"""HTTP by hand: what is no request, heads without end, requests one behind the other, and more connections than may."""

from __future__ import annotations

import json
import socket
import time
from contextlib import suppress

import httpx
import pytest

BODY = b'{"prompt": "x", "max_tokens": 2}'
POST = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


def request(body=BODY, *headers):
    return POST + b"".join(headers) + b"Content-Length: %d\r\n\r\n" % len(body) + body


def exchange(port, *parts):
    """What comes back until the server closes, after these bytes."""
    found = b""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as sock, suppress(ConnectionError):
        for part in parts:
            sock.sendall(part)
        while data := sock.recv(1 << 16):
            found += data
    return found


def told(answer):
    """Status and error of an answer in OpenAI's form."""
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1",  # TLS
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        POST + b"Content-Length: -1\r\n\r\n",
        POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        CHUNKED + b"ZZ\r\n",
    ],
)
def test_what_is_no_request_is_told_so_as_every_other_error(serving, data):
    status, error = told(exchange(serving().port, data))
    assert status == 400
    assert "this is no request" in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "header",
    [b"Host: [", b"Host: 127.0.0.1\r\nOrigin: http://["],
)
def test_an_address_that_is_none_is_refused(serving, header):
    answer = exchange(serving().port, b"GET /health HTTP/1.1\r\n" + header + b"\r\nConnection: close\r\n\r\n")
    status, error = told(answer)
    assert status == 403
    assert "no address" in error["message"]


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (b"GET /", b"y" * 10_000),
        (b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ", b"y" * 10_000),
        (b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n", b"X: y\r\n" * 2000),
        (CHUNKED + b"1;", b"y" * 10_000),  # a chunk's extension
        (CHUNKED + b"0\r\n", b"X: y\r\n" * 2000),  # trailers
    ],
)
def test_what_has_no_end_beside_a_body_is_cut(serving, begin, more):
    started = serving()
    with socket.create_connection(("127.0.0.1", started.port), timeout=20) as sock, suppress(ConnectionError):
        sock.sendall(begin)
        sent = 0
        while sent < 40_000_000:
            sock.sendall(more)
            sent += len(more)
    assert sent < 20_000_000, "the server read on"
    assert httpx.get(f"{started.url}/health").status_code == 200


def test_a_long_body_in_tiny_chunks_is_a_request_like_any_other(serving):
    body = BODY + b" " * 30_000
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    answer = exchange(
        serving().port, CHUNKED.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"), chunks, b"0\r\n\r\n"
    )
    assert answer.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("count", [2, 40])
def test_requests_one_behind_the_other_are_answered_in_order(serving, count):
    bodies = [b'{"prompt": "%s", "max_tokens": 1, "echo": false}' % (b"x " * (1 + number)) for number in range(count)]
    last = request(bodies[-1], b"Connection: close\r\n")
    answer = exchange(serving().port, b"".join(map(request, bodies[:-1])) + last)
    used = [
        json.loads(part.split(b"\r\n\r\n")[1].split(b"HTTP/1.1")[0])["usage"] for part in answer.split(b"HTTP/1.1 ")[1:]
    ]
    lengths = [one["prompt_tokens"] for one in used]
    assert len(lengths) == count
    assert lengths == sorted(set(lengths))


def test_a_client_that_goes_away_with_a_request_behind_another_frees_its_rows(serving, slow, wait_for):
    started = serving()
    slow.seconds = 0.02
    scheduler = started.service.scheduler
    for gone in (b"", b"\1\0\0\0\0\0\0\0"):  # closed, and reset
        with socket.create_connection(("127.0.0.1", started.port), timeout=20) as sock:
            if gone:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, gone)
            sock.sendall(request(b'{"prompt": "x", "max_tokens": 3000, "ignore_eos": true}') + request())
            wait_for(lambda: scheduler.running == 1)
            time.sleep(0.05)
        before = slow.steps
        wait_for(lambda: scheduler.running == 0)
        assert slow.steps - before < 250, "it ran on for nobody"


def test_more_connections_than_may_be_are_told_to_come_back(serving, wait_for):
    started = serving(connections=2)
    with (
        socket.create_connection(("127.0.0.1", started.port)),
        socket.create_connection(("127.0.0.1", started.port)),
    ):
        answer = exchange(started.port, request())
        status, error = told(answer)
        assert status == 503
        assert "connections" in error["message"]
        assert b"\r\nretry-after: 1\r\n" in answer
    wait_for(lambda: httpx.get(f"{started.url}/health").status_code == 200)


def test_a_client_that_would_rather_speak_another_protocol_gets_its_answer(serving, capfd):
    upgrade = b"Connection: Upgrade, HTTP2-Settings, close\r\nUpgrade: h2c\r\nHTTP2-Settings: AAA\r\n"
    answer = exchange(serving().port, b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n" + upgrade + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 200")
    assert b'"status":"ok"' in answer


@pytest.mark.parametrize("together", [True, False], ids=["at once", "head, then body in two parts"])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_behind_such_an_offer_is_read(serving, chunked, together):
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAA\r\n"
    framing = b"Transfer-Encoding: chunked\r\n" if chunked else b"Content-Length: %d\r\n" % len(BODY)
    body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY) if chunked else BODY
    head = POST + upgrade + framing + b"\r\n"
    port = serving().port
    parts = (head + body,) if together else (head, body[:9], body[9:])
    with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
        for part in parts:
            sock.sendall(part)
            time.sleep(0 if together else 0.05)
        answer = b""
        while data := sock.recv(1 << 16):
            answer += data
    status, _, text = answer.partition(b"\r\n\r\n")
    assert status.startswith(b"HTTP/1.1 200")
    assert b"connection: close" in status
    assert json.loads(text)["usage"]["completion_tokens"] == 2


def test_a_broken_body_behind_such_an_offer_is_told(serving):
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAA\r\n"
    status, error = told(exchange(serving().port, POST + upgrade + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n"))
    assert (status, "this is no request" in error["message"]) == (400, True)


def test_head_is_answered_as_get_without_a_body_and_messages_keep_the_address(serving):
    started = serving()
    for path in ("/", "/health", "/metrics", "/v1/models"):
        asked, got = httpx.head(f"{started.url}{path}"), httpx.get(f"{started.url}{path}")
        assert (asked.status_code, asked.content) == (200, b"")
        assert asked.headers["content-type"] == got.headers["content-type"]
    assert httpx.get(f"{started.url}/No/Such").json()["error"]["message"] == "GET /No/Such: not found"
    assert httpx.put(f"{started.url}/health").json()["error"]["message"] == "PUT /health: method not allowed"


def half_closed(port, data):
    """What comes back for a client that says at once that it will send no more, and reads on."""
    found = b""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        while data := sock.recv(1 << 16):
            found += data
    return found


LONG = b'{"prompt": "x", "max_tokens": 40, "ignore_eos": true%s}'


@pytest.mark.parametrize("version", [b"HTTP/1.1", b"HTTP/1.0"])
def test_a_client_that_closes_its_own_direction_alone_gets_its_answer(serving, slow, version):
    started = serving()
    slow.seconds = 0.02  # several looks at the connection long
    answer = half_closed(started.port, request(LONG % b"").replace(b"HTTP/1.1", version))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert head.lower().count(b"connection: close") == 1
    assert answer.count(b"HTTP/1.1") == 1
    assert json.loads(body)["usage"]["completion_tokens"] == 40


def test_and_its_stream_to_the_end(serving, slow):
    started = serving()
    slow.seconds = 0.02
    answer = half_closed(started.port, request(LONG % b', "stream": true'))
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.count(b"HTTP/1.1") == 1
    assert answer.count(b'"text":') > 20
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_and_an_error_and_a_health_check(serving):
    started = serving()
    status, error = told(half_closed(started.port, request(b'{"prompt": 3}')))
    assert (status, error["type"]) == (400, "invalid_request_error")
    answer = half_closed(started.port, b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["status"] == "ok"


@pytest.mark.parametrize("count", [2, 40])
def test_and_the_answers_to_all_that_it_has_asked(serving, count):
    answer = half_closed(serving().port, b"".join(request() for _ in range(count)))
    parts = answer.split(b"HTTP/1.1 ")[1:]
    assert len(parts) == count
    assert all(json.loads(part.partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == 2 for part in parts)
    assert [b"connection: close" in part for part in parts] == [False] * (count - 1) + [True]


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost: ", request()[:-5]])
def test_nothing_to_answer_is_no_reason_to_stay(serving, sent):
    started = time.monotonic()
    assert half_closed(serving(patience=30).port, sent) == b""
    assert time.monotonic() - started < 20, "it waited for what cannot come"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_has_half_closed_and_then_goes_is_noticed(serving, slow, wait_for, stream):
    started = serving()
    slow.seconds = 0.02
    body = {"prompt": "x", "max_tokens": 3000, "ignore_eos": True, "stream": stream}
    with socket.create_connection(("127.0.0.1", started.port), timeout=20) as sock:
        sock.sendall(request(json.dumps(body).encode()))
        wait_for(lambda: started.service.scheduler.running == 1)
        sock.shutdown(socket.SHUT_WR)
        wait_for(lambda: slow.steps > 10)  # which are not cut
        assert started.service.scheduler.running == 1
    before = slow.steps
    wait_for(lambda: started.service.scheduler.running == 0)
    assert slow.steps - before < 250, "it ran on for nobody"
