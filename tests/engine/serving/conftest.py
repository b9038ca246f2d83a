"""A real server over a tiny random model: uvicorn in a thread, on a port of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

MIB = 1 << 20
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Slow:
    """Makes every step of an engine's batch last at least `seconds`, and counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from cake_infer.engine.batch import Batch

        self.seconds, self.steps = 0.0, 0
        step = Batch.step

        def slowly(batch: Batch) -> Any:
            self.steps += 1
            time.sleep(self.seconds)
            return step(batch)

        monkeypatch.setattr(Batch, "step", slowly)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Slow:
    return Slow(monkeypatch)


@pytest.fixture
def serving(
    tmp_path: Path, write_checkpoint: Callable[..., Path], write_byte_tokenizer: Callable[..., None]
) -> Iterator[Callable[..., Any]]:
    """A function `(*, load={}, limit=32 MiB, template=..., checkpoint={}, **ServeOptions fields)` that starts a server.

    What it gives has url, port, engine, service, server, and `client(**options)`, an OpenAI client. Options of the
    engine are those of `Engine.load`; replies stop at their length, as the model's end token is out of its vocabulary.
    """
    from cake_infer import Engine
    from cake_infer.engine.serving.options import ServeOptions
    from cake_infer.engine.serving.server import Server, listen
    from cake_infer.engine.serving.service import Service

    running: list[Any] = []

    def start(
        *,
        load: dict[str, Any] | None = None,
        limit: int = 32 * MIB,
        template: str | None = CHAT_TEMPLATE,
        checkpoint: dict[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        from openai import OpenAI

        folder = write_checkpoint(
            tmp_path / f"model{len(running)}", **{"num_hidden_layers": 2, "eos_token_id": 319, **(checkpoint or {})}
        )
        write_byte_tokenizer(folder, 300, chat_template=template)
        engine = Engine.load(folder, **{"budget": 64, "window": 8, "step": "eager", "chunk": 64, **(load or {})})
        settings = ServeOptions(**{"port": 0, "grace": 1.0, "parallel": 4, "queue": 8, **options})
        service = Service(engine, settings, names=("tiny", "other-name"), limit=limit)
        sock = listen("127.0.0.1", 0)
        server = Server(service)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
        thread.start()
        port = sock.getsockname()[1]
        url = f"http://127.0.0.1:{port}"

        def client(**more: Any) -> OpenAI:
            return OpenAI(**{"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0, "timeout": 30, **more})

        started = SimpleNamespace(
            url=url, port=port, engine=engine, service=service, server=server, client=client, thread=thread
        )
        running.append(started)
        wait_for(lambda: server.started)
        return started

    yield start
    for one in running:
        one.server.stop()
        one.thread.join(20)
        assert not one.thread.is_alive()
        one.engine.close()


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


@pytest.fixture(name="wait_for")
def wait_for_fixture() -> Callable[..., None]:
    return wait_for


@pytest.fixture
def alone() -> Callable[..., Any]:
    """A function `(started, **arguments of generate)`: what the engine gives without a server, once it has stopped."""
    from cake_infer import Engine

    def generate(started: Any, **arguments: Any) -> Any:
        engine = started.engine
        with Engine.load(engine.model_path, cache=engine.cache, chunk=engine.chunk, step="eager") as fresh:
            return fresh.generate(**arguments)

    return generate


@contextmanager
def connection(port: int) -> Iterator[Any]:
    import socket

    with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
        yield sock


@pytest.fixture(name="connection")
def connection_fixture() -> Callable[..., Any]:
    return connection
