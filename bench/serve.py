"""The server under load: time to the first token, gaps between tokens, and what eight clients get of one's rate.

    python bench/serve.py --model smollm2-135m

A server of its own process on a port of its own; clients are raw sockets in this one. Replies have a fixed length.
The ceiling is the engine's batch in this process, without a server. All on the same cores.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import random
import subprocess
import sys
import time
from collections.abc import Awaitable
from contextlib import contextmanager
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from report import report

CLIENTS = 8
SENTENCE = "the harbour office keeps a watch on every ship that comes in from the north with the tide at night"


def text(words: int, seed: int) -> str:
    return " ".join(random.Random(seed).choices(SENTENCE.split(), k=words))


@contextmanager
def server(args: argparse.Namespace):
    """Starts the command and gives its port."""
    flags = ["--model", args.model, "--budget", str(args.budget), "--port", "0", "--parallel", str(2 * CLIENTS)]
    process = subprocess.Popen(
        [sys.executable, "-m", "cake_infer", "serve", *flags],
        stderr=subprocess.PIPE,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    try:
        for line in process.stderr:
            if "http://" in line:
                break
            print(f"  server: {line.strip()}")
        else:
            raise SystemExit("the server did not start")
        yield int(line.split("http://127.0.0.1:")[1].split("/")[0])
    finally:
        process.terminate()
        process.wait(20)


async def ask(port: int, path: str, **body: object) -> tuple[float, list[float]]:
    """Streams one reply; when it was asked for, and when each event with text came."""
    data = json.dumps({"stream": True, "ignore_eos": True, "temperature": 0.0, **body}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    asked, times = time.perf_counter(), []
    writer.write(head.encode() + data)
    status = await reader.readline()
    if b" 200 " not in status:
        raise SystemExit((await reader.read()).decode())
    while line := await reader.readline():
        if line.startswith(b"data: {") and b'"finish_reason":null' in line and b'"role"' not in line:
            times.append(time.perf_counter())
    writer.close()
    return asked, times


def completion(port: int, words: int, tokens: int, seed: int) -> Awaitable[tuple[float, list[float]]]:
    """A reply of exactly so many tokens; log-probabilities make an event of every token, also of one without text."""
    return ask(port, "/v1/completions", prompt=text(words, seed), max_tokens=tokens, logprobs=0)


async def together(*calls: Awaitable[tuple[float, list[float]]]) -> list[tuple[float, list[float]]]:
    return list(await asyncio.gather(*calls))


def gaps(found: list[tuple[float, list[float]]]) -> np.ndarray:
    """Seconds between the tokens of each reply."""
    return np.concatenate([np.diff(times) for _, times in found])


def rate(found: list[tuple[float, list[float]]]) -> float:
    """Tokens a second of all replies together while all of them are past their first and before their last token."""
    first, last = max(times[0] for _, times in found), min(times[-1] for _, times in found)
    return sum(first < at <= last for _, times in found for at in times) / (last - first)


def told(name: str, found: list[tuple[float, list[float]]]) -> dict[str, float]:
    """Percentiles in milliseconds."""
    firsts = np.array([times[0] - asked for asked, times in found]) * 1e3
    between = gaps(found) * 1e3
    values = {
        f"{what}_p{p}": round(float(np.percentile(data, p)), 1)
        for what, data in (("first", firsts), ("gap", between))
        for p in (50, 99)
    }
    print(
        f"  {name}: first token p50 {values['first_p50']} p99 {values['first_p99']} ms, "
        f"gaps p50 {values['gap_p50']} p99 {values['gap_p99']} longest {between.max():.1f} ms"
    )
    return values


def post(port: int, path: str, body: dict[str, object]) -> dict[str, object]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("POST", path, json.dumps(body))
    return json.loads(connection.getresponse().read())


def engine_rates(args: argparse.Namespace) -> dict[int, float]:
    """Tokens a second of the engine's batch with 1 and with all sequences, without a server."""
    from cake_infer import Engine, GenerationConfig
    from cake_infer.engine.batch import Batch
    from cake_infer.engine.sequence import Sequence

    found = {}
    with Engine.load(args.model, budget=args.budget) as engine:
        config = engine.resolved(GenerationConfig(max_new_tokens=args.tokens, temperature=0.0, logprobs=0))
        for count in (1, CLIENTS):
            with Batch(engine.runner, most=count) as batch:
                for seed in range(count):
                    batch.join(Sequence(), engine.encode(text(60, seed)), config)
                batch.read()
                times = []
                while len(batch) == count:
                    batch.step()
                    times.append(time.perf_counter())
                found[count] = count / float(np.median(np.diff(times)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=80, help="of each reply")
    parser.add_argument("--long", type=int, default=2400, help="words of the long prompt")
    parser.add_argument("--rounds", type=int, default=1, help="requests of each client in the mixed load")
    parser.add_argument("--only", choices=PARTS, action="append", help="these parts; default all")
    args = parser.parse_args()
    parts = args.only or PARTS
    ceiling = engine_rates(args) if "decode" in parts else {}
    with server(args) as port:
        asyncio.run(together(completion(port, 60, 8, 0)))
        for part in parts:
            PARTS[part](args, port, ceiling)


def decoding(args: argparse.Namespace, port: int, ceiling: dict[int, float]) -> None:
    one = asyncio.run(together(completion(port, 60, args.tokens, 0)))
    many = asyncio.run(together(*(completion(port, 60, args.tokens, seed) for seed in range(CLIENTS))))
    report("serve", "decode, 1 client", rate(one), "tok/s", ceiling[1], percentiles=told("1 client", one))
    alone = rate(one)
    report(
        "serve",
        f"decode, {CLIENTS} clients",
        rate(many),
        "tok/s",
        ceiling[CLIENTS],
        {"1 client": alone},
        percentiles=told(f"{CLIENTS} clients", many),
        engine_ratio=ceiling[CLIENTS] / ceiling[1],
    )


def documents(args: argparse.Namespace, port: int, ceiling: dict[int, float]) -> None:
    document = post(port, "/v1/documents", {"text": text(1800, 1), "raw": True})
    cake = {"document": document["id"]}

    def question(seed: int) -> Awaitable[tuple[float, list[float]]]:
        prompt = f"\n\nQuestion {seed}: {text(12, seed)}?"
        return ask(port, "/v1/completions", prompt=prompt, max_tokens=args.tokens, logprobs=0, cake=cake)

    started = time.perf_counter()
    for seed in range(CLIENTS // 2):
        asyncio.run(together(question(seed)))
    after_another = (time.perf_counter() - started) * 2
    started = time.perf_counter()
    found = asyncio.run(together(*(question(seed) for seed in range(CLIENTS))))
    at_once = time.perf_counter() - started
    report(
        "serve",
        f"{CLIENTS} questions to a document of {document['tokens']} tokens, end to end",
        CLIENTS / at_once,
        "replies/s",
        None,
        {"one after another": CLIENTS / after_another},
        percentiles=told("questions", found),
    )


def reading(args: argparse.Namespace, port: int, ceiling: dict[int, float]) -> None:
    async def beside() -> tuple[list[tuple[float, list[float]]], list[tuple[float, list[float]]]]:
        running = [asyncio.create_task(completion(port, 60, 3 * args.tokens, seed)) for seed in range(3)]
        await asyncio.sleep(1.0)
        long = asyncio.create_task(completion(port, args.long, 2, 7))
        await asyncio.sleep(0.3)
        short = asyncio.create_task(completion(port, 30, 2, 8))
        newcomers = [await long, await short]
        return newcomers, [await task for task in running]

    alone_long = asyncio.run(together(completion(port, args.long, 2, 9)))
    (long, short), running = asyncio.run(beside())
    chunk = (alone_long[0][1][0] - alone_long[0][0]) / max(1.0, args.long * 1.05 / 512)
    during = [
        float(np.diff([at for at in times if long[0] <= at <= long[1][0]]).max())
        for _, times in running
        if times[-1] > long[1][0]
    ] or [float(gaps(running).max())]
    report("serve", "longest gap of others while a long prompt is read", max(during), "s", None, {"one chunk": chunk})
    report(
        "serve",
        "first token of a short prompt behind a long one",
        short[1][0] - short[0],
        "s",
        None,
        {"the long one's": long[1][0] - long[0], "the long one alone": alone_long[0][1][0] - alone_long[0][0]},
    )


def loading(args: argparse.Namespace, port: int, ceiling: dict[int, float]) -> None:
    async def client(number: int) -> list[tuple[float, list[float]]]:
        chance = random.Random(number)
        return [
            await completion(port, chance.choice([20, 100, 300, 800]), args.tokens // 2, 100 * number + i)
            for i in range(args.rounds)
        ]

    async def load() -> list[tuple[float, list[float]]]:
        return [one for each in await asyncio.gather(*map(client, range(CLIENTS))) for one in each]

    mixed = asyncio.run(load())
    values = told("mixed load", mixed)
    report(
        "serve",
        f"{CLIENTS} clients, prompts of 20 to 800 words: gap between tokens, p99",
        values["gap_p99"],
        "ms",
        None,
        percentiles=values,
    )


PARTS = {"decode": decoding, "document": documents, "prefill": reading, "load": loading}

if __name__ == "__main__":
    main()
