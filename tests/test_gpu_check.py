"""The script that checks a GPU, at tiny shapes on a CPU: every part of it runs, and what is wrong is told."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

FOLDER = Path(__file__).parent / "gpu"
PARTS = {
    "kernels",
    "ids",
    "batch",
    "families",
    "text",
    "bandwidth",
    "decode",
    "peers",
    "launches",
    "small",
    "products",
    "prefill",
    "packed",
    "int8",
}


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The script in a process of its own, from a folder of no meaning and without this one's paths."""
    return subprocess.run(
        [sys.executable, str(FOLDER / "check.py"), *arguments],
        capture_output=True,
        text=True,
        cwd="/",
        env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        timeout=300,
    )


@pytest.fixture
def here(monkeypatch):
    """The script's modules can be imported."""
    monkeypatch.syspath_prepend(str(FOLDER))


# -- the whole ---------------------------------------------------------------------------------------------------------


def test_every_part_runs_dry_and_what_is_worked_out_is_right(tmp_path):
    pytest.importorskip("triton")
    pytest.importorskip("transformers")
    write_llama2c(tmp_path / "tiny")
    done = check("--dry", "--model", str(tmp_path / "tiny"), "--out", str(tmp_path / "out" / "gpu.json"))
    assert done.returncode == 0, done.stdout.partition("\nmissed: ")[2] + done.stderr[-6000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["missed"] == []
    assert {name.partition(":")[0] for name in found["values"]} == PARTS
    for part, name in {
        "ids": "hold, sampled: graph's ids are the eager step's",
        "batch": "grow: ids of a batch are those of each alone",
        "kernels": "hold float32: slots exchanged as in torch",
        "text": "hold: a list gives what each prompt gives alone",
    }.items():
        assert found["values"][f"{part}: {name}"] == "True"
    for name in (
        "decode: CAKE over full, 12 tokens, batch 4",
        "peers: CAKE over transformers, dynamic cache, batch 4",
        "prefill: 40 tokens: CAKE over full",
        "small: graph over eager",
        "packed: full in 4 bits, 100 tokens, batch 1",
    ):
        assert found["values"][name] > 0
    assert found["ratio"].keys() == {"full, batch 1", "full, batch 4", "transformers, batch 1", "transformers, batch 4"}
    assert found["share"] == pytest.approx(found["value"] / found["ceiling"])
    written = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert written["over"]
    assert written["values"] == found["values"]


def test_every_kernel_compiles_for_a_gpu_that_is_not_there():
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "PYTHONPATH")}
    done = subprocess.run(
        [sys.executable, str(FOLDER / "compiles.py")], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    compiled = json.loads(done.stdout.splitlines()[-1])["compiled"]
    written = {
        name
        for folder in ("cache", "engine", "models")
        for path in (FOLDER.parents[1] / folder).rglob("triton_*.py")
        for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.MULTILINE)
    }
    assert set(compiled) == written, "a kernel is never launched here"


def test_a_part_can_be_chosen_an_unknown_one_is_refused_and_a_gpu_is_needed():
    done = check("--dry", "bandwidth")
    assert done.returncode == 0
    assert {name.partition(":")[0] for name in json.loads(done.stdout.splitlines()[-1])["values"]} == {"bandwidth"}
    assert check("--dry", "nothing").returncode == 2
    import torch

    if not torch.cuda.is_available():
        done = check("bandwidth")
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == "error: there is no CUDA device here; --dry runs the functions on a CPU\n"


# -- what goes wrong ---------------------------------------------------------------------------------------------------

CHILD = """
import json, os, sys, time

def say(**message):
    print(json.dumps(message), flush=True)

def row(part, name, value, ok=None):
    say(row={"part": part, "name": name, "value": value, "unit": "", "bar": "", "ok": ok})

found = json.loads(sys.stdin.read())
say(about={"name": "card"})
for part in sys.argv[sys.argv.index("--") + 1 :]:
    say(part=part)
    row(part, "before", found.get("rate", 0.0))
    found["rate"] = found.get("rate", 0.0) + 1.0
    if part == "dies":
        os._exit(9)
    if part == "hangs":
        time.sleep(60)
    row(part, "behind", 1.0, True)
    say(done=part, found=found)
    if part == "poisons":
        sys.exit(3)
"""


@pytest.fixture
def run_lane(here, tmp_path, monkeypatch):
    """A function that runs parts in children that misbehave as their names say. Returns the table."""
    import lane
    import table

    (tmp_path / "child.py").write_text(CHILD)
    monkeypatch.setattr(lane, "SCRIPT", tmp_path / "child.py")

    def run(*parts, limit=20.0, seconds=60.0):
        found = table.Table(parts, file=tmp_path / "found.json")
        one = lane.Lane(parts, found, threading.Lock(), limit=limit, deadline=time.monotonic() + seconds)
        one.start()
        assert one.over.wait(30)
        return found

    return run


def rows_of(table):
    return [(row.part, row.name, row.value, row.ok) for row in table.rows]


def test_what_a_process_has_found_before_it_died_stays_and_another_goes_on(run_lane, tmp_path):
    table = run_lane("first", "dies", "last")
    assert rows_of(table) == [
        ("first", "before", 0.0, None),
        ("first", "behind", 1.0, True),
        ("dies", "before", 1.0, None),
        ("dies", "ended", "the process ended with 9", False),
        ("last", "before", 1.0, None),  # the figures of parts that came to their end
        ("last", "behind", 1.0, True),
    ]
    assert table.missed == ["dies: ended"]
    assert table.about == {"name": "card"}
    assert json.loads((tmp_path / "found.json").read_text())["missed"] == ["dies: ended"]


def test_a_device_that_answers_no_more_is_left_to_its_process(run_lane):
    assert [row[:2] for row in rows_of(run_lane("poisons", "last"))] == [
        ("poisons", "before"),
        ("poisons", "behind"),
        ("last", "before"),
        ("last", "behind"),
    ]


def test_a_part_that_hangs_is_ended_and_what_is_behind_it_runs(run_lane):
    assert rows_of(run_lane("hangs", "last", limit=1.0))[1:] == [
        ("hangs", "ended", "took too long: was ended", False),
        ("last", "before", 0.0, None),
        ("last", "behind", 1.0, True),
    ]


def test_when_time_is_over_what_runs_is_ended_and_the_rest_is_told(run_lane):
    assert rows_of(run_lane("hangs", "last", seconds=2.0)) == [
        ("hangs", "before", 0.0, None),
        ("hangs", "ended", "out of time", False),
        ("last", "not run", "out of time", False),
    ]


@pytest.fixture
def run_main(here, tmp_path, monkeypatch):
    """A function that runs the script's main function with these arguments and children of a kind."""
    import check as script
    import lane

    def run(*arguments, child=CHILD):
        (tmp_path / "child.py").write_text(child)
        monkeypatch.setattr(lane, "SCRIPT", tmp_path / "child.py")
        monkeypatch.setattr(sys, "argv", ["check.py", *arguments])
        return script.main()

    before = signal.getsignal(signal.SIGTERM)
    yield run
    signal.signal(signal.SIGTERM, before)


def test_on_a_gpu_what_is_not_timed_runs_beside_one_another_and_the_rest_alone_behind_it(run_main, capsys, monkeypatch):
    told = 'import time, sys\nprint(*sys.argv[3:], "from", time.time(), file=sys.stderr)\n'
    told += CHILD + 'time.sleep(0.5)\nprint(*sys.argv[3:], "to", time.time(), file=sys.stderr)\n'
    with tempfile.TemporaryFile("w+") as said:
        monkeypatch.setattr(subprocess, "Popen", partial(subprocess.Popen, stderr=said))
        assert run_main(child=told) == 0
        said.seek(0)
        times = {tuple(words[:-1]): float(words[-1]) for words in map(str.split, said)}
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {name.partition(":")[0] for name in last["values"]} == PARTS
    assert last["case"] == "card"
    lanes = {parts[:-1]: (start, times[(*parts[:-1], "to")]) for parts, start in times.items() if parts[-1] == "from"}
    assert sorted(part for parts in lanes for part in parts) == sorted(PARTS)
    *beside, alone = sorted(lanes.values())
    assert len(beside) == 3
    assert max(start for start, _ in beside) < min(end for _, end in beside)
    assert alone[0] > max(end for _, end in beside)


def test_where_nothing_can_run_one_line_says_why(run_main, capsys):
    refusing = 'import sys\nprint(\'{"refused": "no card"}\', flush=True)\nsys.exit(1)\n'
    assert run_main(child=refusing) == 1
    assert capsys.readouterr() == ("", "error: no card\n")


def test_what_has_been_found_is_reported_when_the_script_is_told_to_end(run_main, capsys):
    hanging = CHILD.replace('part == "hangs"', 'part == "decode"')
    threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    assert run_main("bandwidth", "decode", "int8", child=hanging) == 1
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["values"]["bandwidth: behind"] == 1.0
    assert last["missed"] == ["decode: ended", "int8: not run"]


def test_a_part_that_raises_is_told_and_does_not_hide_the_others(here, capsys, monkeypatch):
    import setting
    import shapes
    import table

    def broken(check):
        with check.attempt("a case"):
            raise MemoryError("CUDA out of memory")
        check.measured("figure", 1.5, "x", "at least 2", False)
        raise ValueError("a kernel went wrong\nsomewhere")

    found = table.Table(("first", "second"))
    one = setting.Check(shapes.GPU, tell_row=found.add)
    assert one.run("second", lambda check: check.tell("rate", math.nan))
    assert one.run("first", broken)
    monkeypatch.setattr(setting, "healthy", lambda: False)
    assert not one.run("second", broken), "nothing else may run in this process"
    found.about = {"name": "card"}
    assert found.report() == 1
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["missed"] == [
        "first: a case",
        "first: figure",
        "first: raised",
        "second: a case",
        "second: raised",  # and went no further
    ]
    assert last["values"]["first: raised"] == "ValueError: a kernel went wrong"
    assert last["values"]["second: rate"] is None, "JSON has no NaN"
    good = table.Table(("first",))
    setting.Check(shapes.GPU, tell_row=good.add).run("first", lambda check: check.tell("figure", 1.5, ok=True))
    assert good.report() == 0


def test_an_error_that_is_no_number_never_passes(here):
    from exact import largest

    assert math.isnan(largest([1.0, math.nan])), "max(1.0, nan) is 1.0"
    assert math.isnan(largest([math.nan, 1.0]))
    assert largest([1.0, 2.0]) == 2.0


def test_every_cache_that_is_compared_or_timed_can_be_made(here):
    """A dry run takes a few of them."""
    pytest.importorskip("triton")
    import right
    import setting
    import shapes
    import texts
    from cake_infer.cache.config import CacheConfig

    check = setting.Check(shapes.DRY)
    decoder = check.decoder(shapes.TINY)
    assert {cache for cache, _ in (*right.CASES, *right.DRY_CASES)} == set(right.CACHES)
    for options in right.CACHES.values():
        runner = check.runner(decoder, **{"budget": 8, **options})
        assert runner.ahead is not None
        assert runner.cache.policy == options["policy"]
        assert runner.layout.kv_bits == options.get("kv_bits")
        assert (runner.cache.budget == 8) == (options["policy"] != "full")
    for options in texts.CACHES.values():
        CacheConfig(**({} if options.get("policy") == "full" else {"budget": 64, "window": 32}), **options)


def test_replies_may_part_at_a_near_tie_and_nowhere_else(here):
    """As `ids` judges where the graph's ids are not the eager step's."""
    import right
    import setting
    import shapes

    def eager(*top):
        """A runner whose third token has these two best."""
        tokens = [SimpleNamespace(logprobs=None)] * 2 + [SimpleNamespace(logprobs=SimpleNamespace(top=top))]
        return SimpleNamespace(generate=lambda sequence, prompt, plan: tokens[: plan.max_new_tokens])

    check = setting.Check(shapes.GPU)
    near, far = eager((8, -1.0), (7, -1.0001)), eager((8, -1.0), (7, -1.1))
    assert right._tied(check, near, [5], [3, 4, 7, 1], [3, 4, 8, 2])
    assert not right._tied(check, far, [5], [3, 4, 7, 1], [3, 4, 8, 2])
    assert not right._tied(check, near, [5], [3, 4, 6, 1], [3, 4, 8, 2]), "6 is neither of the two"
    assert not right._tied(check, near, [5], [3, 4], [3, 4, 8]), "one is longer"


# -- models on disk ----------------------------------------------------------------------------------------------------

SHAPE = {"width": 16, "mlp": 24, "layers": 2, "heads": 4, "kv_heads": 2, "vocab": 300, "context": 64}


def write_llama2c(folder: Path) -> list[np.ndarray]:
    """A random checkpoint of llama2.c's first format. Returns its arrays in the order of the file."""
    width, mlp, layers, heads, kv_heads, vocab, context = SHAPE.values()
    dim, rng = width // heads, np.random.default_rng(0)

    def normal(*shape: int, gain: float = 1.0) -> np.ndarray:
        return (rng.standard_normal(shape) * gain * shape[-1] ** -0.5).astype(np.float32)

    arrays = [
        rng.standard_normal((vocab, width)).astype(np.float32),
        1 + normal(layers, width),
        normal(layers, heads * dim, width, gain=2),
        normal(layers, kv_heads * dim, width, gain=2),
        normal(layers, kv_heads * dim, width),
        normal(layers, width, heads * dim),
        1 + normal(layers, width),
        normal(layers, mlp, width),
        normal(layers, width, mlp),
        normal(layers, mlp, width),
        1 + normal(width),
        normal(2 * context, dim // 2),  # tables of frequencies, which are worked out
    ]
    folder.mkdir()
    (folder / "tiny.bin").write_bytes(struct.pack("7i", *SHAPE.values()) + b"".join(a.tobytes() for a in arrays))
    (folder / "tok300.bin").write_bytes(
        struct.pack("i", 9) + b"".join(struct.pack("fi", score, len(piece)) + piece for score, piece in scored_pieces())
    )
    return arrays


def scored_pieces() -> list[tuple[float, bytes]]:
    merged = [" t", "he", " a", " th", " the", "nd", "and", " and", "er", "re", "here", "in"]
    letters = [bytes([byte]) for byte in b" abcdefghijklmnopqrstuvwxyz"]
    pieces = [b"<unk>", b"\n<s>\n", b"\n</s>\n", *(f"<0x{byte:02X}>".encode() for byte in range(256))]
    scored = [(0.0, piece) for piece in pieces]
    scored += [(-float(rank), piece.encode()) for rank, piece in enumerate(merged)]
    scored += [(-100.0 - rank, piece) for rank, piece in enumerate(letters)]
    return scored + [(-500.0, f"~{rank}".encode()) for rank in range(SHAPE["vocab"] - len(scored))]


def encoded(text: str) -> list[int]:
    """As llama2.c encodes: a space in front, characters, then the best pair that is a piece, over and over."""
    scored = scored_pieces()
    ids = {piece: index for index, (_, piece) in enumerate(scored)}
    tokens = [ids[character.encode()] for character in " " + text]
    while True:
        pairs = [
            (scored[ids[both]][0], -at, ids[both])
            for at in range(len(tokens) - 1)
            if (both := scored[tokens[at]][1] + scored[tokens[at + 1]][1]) in ids
        ]
        if not pairs:
            return tokens
        _, at, merged = max(pairs)
        tokens[-at : -at + 2] = [merged]


def log_likelihoods(arrays: list[np.ndarray], ids: list[int]) -> list[float]:
    """Of each id behind the first, in float64, as run.c works it out: neighbouring numbers of a head rotate."""
    embed, norm1, wq, wk, wv, wo, norm2, w1, w2, w3, last, _ = (a.astype(np.float64) for a in arrays)
    heads, kv_heads = SHAPE["heads"], SHAPE["kv_heads"]
    dim, n = SHAPE["width"] // heads, len(ids)

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weight

    def turn(x: np.ndarray) -> np.ndarray:  # [n, heads, dim]
        angle = np.arange(n)[:, None, None] * 10000.0 ** (-np.arange(0, dim, 2) / dim)
        pairs = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angle)
        return np.stack([pairs.real, pairs.imag], -1).reshape(x.shape)

    x = embed[ids]
    for layer in range(SHAPE["layers"]):
        h = norm(x, norm1[layer])
        q, k, v = ((h @ w[layer].T).reshape(n, -1, dim) for w in (wq, wk, wv))
        q, k = turn(q), turn(k)
        out = np.zeros((n, heads, dim))
        for head in range(heads):
            kv = head // (heads // kv_heads)
            logits = q[:, head] @ k[:, kv].T / math.sqrt(dim)
            weights = np.exp(logits - logits.max(-1, keepdims=True)) * np.tri(n)
            out[:, head] = weights @ v[:, kv] / weights.sum(-1, keepdims=True)
        x = x + out.reshape(n, -1) @ wo[layer].T
        h = norm(x, norm2[layer])
        gate = h @ w1[layer].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w3[layer].T)) @ w2[layer].T
    logits = norm(x, last) @ embed.T
    logits -= logits.max(-1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    return [logits[at, token] for at, token in enumerate(ids[1:])]


def test_a_checkpoint_of_llama2c_says_what_it_says_there(here, tmp_path):
    from cake_infer import Engine
    from models_on_disk import llama2c_folder

    arrays = write_llama2c(tmp_path / "tiny")
    with Engine.load(llama2c_folder(tmp_path / "tiny", tmp_path / "made"), dtype="float32", policy="full") as engine:
        for text in ("the hen and a nether hare", "x", "there  in"):
            ids = engine.encode(text)
            assert ids == [1, *encoded(text)]
            assert engine.score(ids) == pytest.approx(log_likelihoods(arrays, ids), abs=1e-5)
        assert engine.text_tokenizer().decode(ids) == "there  in"


def test_a_random_model_loads_and_its_reply_depends_on_what_it_has_read(here, tmp_path):
    from cake_infer import Engine
    from models_on_disk import random_folder

    with Engine.load(random_folder(tmp_path / "made"), dtype="float32", step="eager") as engine:
        replies = {tuple(engine.generate(text, max_new_tokens=8, temperature=0.0).ids) for text in ("the", "a cab")}
    assert len(replies) == 2
    assert all(len(set(ids)) > 2 for ids in replies)
