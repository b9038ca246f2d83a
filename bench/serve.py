"""The server under load: time to the first token, gaps between tokens, and what eight clients get of one's rate.

    python bench/serve.py --model smollm2-135m

A server of its own process on a port of its own; clients are raw sockets in this one. Replies have a fixed length.
The ceiling is the engine's batch in this process, without a server, measured in turn with it: both are medians of
ROUNDS. All on the same cores, so the share of them that clients and the server's event loop take is told too.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from report import report

CLIENTS = 8
ROUNDS = 3  # of engine and server in turn
SENTENCE = "the harbour office keeps a watch on every ship that comes in from the north with the tide at night"


def text(words: int, seed: int) -> str:
    return " ".join(random.Random(seed).choices(SENTENCE.split(), k=words))


@contextmanager
def server(args: argparse.Namespace):
    """Starts the command and gives its port and its process id."""
    flags = ["--model", args.model, "--budget", str(args.budget), "--port", "0", "--parallel", str(2 * CLIENTS)]
    flags += [] if args.quant is None else ["--quant", args.quant]
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
        yield int(line.split("http://127.0.0.1:")[1].split("/")[0]), process.pid
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


def engine_rate(engine: Any, count: int, tokens: int) -> float:
    """Tokens a second of the engine's batch of so many sequences, without a server."""
    from cake_infer import GenerationConfig
    from cake_infer.engine.batch import Batch
    from cake_infer.engine.sequence import Sequence

    config = engine.resolved(GenerationConfig(max_new_tokens=tokens, temperature=0.0, logprobs=0))
    with Batch(engine.runner, most=count) as batch:
        for seed in range(count):
            batch.join(Sequence(), engine.encode(text(60, seed)), config)
        batch.read()
        times = [time.perf_counter()]
        while len(batch) == count:
            batch.step()
            times.append(time.perf_counter())
    return count * (len(times) - 1) / (times[-1] - times[0])


def loop_seconds(pid: int) -> float:
    """CPU seconds of a process's main thread, in which the server's event loop runs; 0 where Linux's /proc is not."""
    try:
        fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--quant", choices=("int8", "int4"))
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=80, help="of each reply")
    parser.add_argument("--long", type=int, default=2400, help="words of the long prompt")
    parser.add_argument("--rounds", type=int, default=1, help="requests of each client in the mixed load")
    parser.add_argument("--only", choices=PARTS, action="append", help="these parts; default all")
    args = parser.parse_args()
    with server(args) as (port, pid):
        asyncio.run(together(completion(port, 60, 8, 0)))
        for part in args.only or PARTS:
            PARTS[part](args, port, pid)


def decoding(args: argparse.Namespace, port: int, pid: int) -> None:
    from cake_infer import Engine

    rates: dict[str, list[float]] = {name: [] for name in ("engine 1", "engine", "1", "all", "clients", "loop")}
    one, many = [], []
    with Engine.load(args.model, budget=args.budget, quant=args.quant) as engine:
        for _ in range(ROUNDS):
            rates["engine 1"].append(engine_rate(engine, 1, args.tokens))
            rates["engine"].append(engine_rate(engine, CLIENTS, args.tokens))
            alone = asyncio.run(together(completion(port, 60, args.tokens, 0)))
            used, loop, started = time.process_time(), loop_seconds(pid), time.perf_counter()
            found = asyncio.run(together(*(completion(port, 60, args.tokens, seed) for seed in range(CLIENTS))))
            seconds = time.perf_counter() - started
            rates["clients"].append((time.process_time() - used) / seconds)
            rates["loop"].append((loop_seconds(pid) - loop) / seconds)
            rates["1"].append(rate(alone))
            rates["all"].append(rate(found))
            one, many = one + alone, many + found
    middle = {name: statistics.median(values) for name, values in rates.items()}
    print(f"  of one core: clients {middle['clients']:.1%}, the server's event loop {middle['loop']:.1%}")
    report("serve", "decode, 1 client", middle["1"], "tok/s", middle["engine 1"], percentiles=told("1 client", one))
    report(
        "serve",
        f"decode, {CLIENTS} clients",
        middle["all"],
        "tok/s",
        middle["engine"],
        {"1 client": middle["1"]},
        percentiles=told(f"{CLIENTS} clients", many),
        engine_ratio=middle["engine"] / middle["engine 1"],
        cores={"clients": middle["clients"], "event loop": middle["loop"]},
        rounds=rates,
    )


def documents(args: argparse.Namespace, port: int, pid: int) -> None:
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


def reading(args: argparse.Namespace, port: int, pid: int) -> None:
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


def loading(args: argparse.Namespace, port: int, pid: int) -> None:
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
