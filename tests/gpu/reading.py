"""Reading a prompt: time and peak memory, everything kept and CAKE, and what CAKE itself costs."""

from __future__ import annotations

import gc
import time
from typing import Any

import torch
from setting import WAITS, Check, allocated, calls, free, random_ids, sync

COST = 1.03  # of a prefill with CAKE over one that keeps everything
PEAK = 1.15  # of a prefill's memory over hidden states, arena and one chunk
NEW = 64


def prefill(check: Check) -> None:
    """Time and peak memory of reading a prompt, everything kept and CAKE; what CAKE itself costs."""
    scale = check.scale
    decoder = check.decoder(scale.large)
    for policy in ("cake", "full"):
        _read(check, check.runner(decoder, policy=policy), scale.prefills[0])  # libraries and kernels wake up
        free()
    with check.attempt("waits"):
        _waits(check, decoder, scale.prefills[0])
    free()
    for count, repeats in zip(scale.prefills, scale.repeats, strict=True):
        with check.attempt(f"{count:,} tokens"):
            _compare(check, decoder, count, repeats)
        free()
    if not scale.dry:
        with check.attempt("with other options"):
            _others(check, decoder, scale.prefills[1])


def _compare(check: Check, decoder: Any, count: int, repeats: int) -> None:
    times: dict[str, list[float]] = {"full": [], "cake": []}
    for _ in range(repeats):
        for policy, found in times.items():
            runner = check.runner(decoder, policy=policy)
            base = allocated()
            if check.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            found.append(_read(check, runner, count))
            peak, arena = allocated(peak=True) - base, runner.tenancy.arena.nbytes
            del runner
            gc.collect()  # what torch holds is not given back: the next reading would wait to be given it again
            if len(found) == 1:
                _memory(check, decoder, policy, count, peak, arena)
    for policy, found in times.items():
        check.tell(f"{count:,} tokens: prefill, {policy}", min(found), "s")
        check.tell(f"{count:,} tokens: prefill, {policy}: rate", count / min(found), "tok/s")
    cost = min(times["cake"]) / min(times["full"])
    check.measured(f"{count:,} tokens: CAKE over full", cost, "x", f"at most {COST}", cost <= COST)


def _waits(check: Check, decoder: Any, count: int) -> None:
    """How often the host waits for the device: once for a layer, for the numbers that budgets follow from."""
    runner, layers = check.runner(decoder, policy="cake"), decoder.config.num_layers
    with calls(check) as counted:
        _read(check, runner, count)
    stops = counted(*WAITS) - (0 if check.scale.dry else 3)  # two are `_read`'s own, one is of `calls`
    check.measured(
        f"{count:,} tokens: waits in {layers} layers, CAKE", stops, "", f"at most {layers + 5}", stops <= layers + 5
    )


def _memory(check: Check, decoder: Any, policy: str, count: int, peak: int, arena: int) -> None:
    budget = min(check.scale.budget, count) if policy == "cake" else count
    most = _designed(decoder.config, budget, count, decoder.dtype.itemsize)
    bar = f"at most {most / 2**20:,.1f}"
    check.tell(f"{count:,} tokens: KV arena, {policy}", arena / 2**20, "MiB", bar, arena <= most)
    limit = PEAK * (arena + _transient(decoder.config, count, check.scale.chunk, decoder.dtype.itemsize)) + (16 << 20)
    bar = f"at most {limit / 2**20:,.0f}"
    check.measured(f"{count:,} tokens: peak above weights, {policy}", peak / 2**20, "MiB", bar, peak <= limit)


def _others(check: Check, decoder: Any, count: int) -> None:
    """What the default policy costs beside CAKE, and the engine's default chunk of tokens beside a larger one."""
    for name, options in {"policy auto": {"policy": "auto"}, "chunks of 512": {"policy": "cake", "chunk": 512}}.items():
        runner = check.runner(decoder, **options)
        _read(check, runner, check.scale.prefills[0])
        found = _read(check, check.runner(decoder, **options), count)
        del runner
        free()
        check.tell(f"{count:,} tokens: prefill, {name}", found, "s")


def _read(check: Check, runner: Any, count: int) -> float:
    from cake_infer.engine.sequence import Sequence

    sequence, prompt = Sequence(), random_ids(count, runner.decoder.config.vocab_size)
    limit = runner.prepare(sequence, count, NEW)
    sync()
    started = time.perf_counter()
    logits = runner.feed(sequence, prompt, limit)
    sync()
    seconds = time.perf_counter() - started
    assert bool(torch.isfinite(logits).all()), "the logits are no numbers"
    return seconds


def _designed(config: Any, budget: int, tokens: int, itemsize: int) -> int:
    """The arena that a one-shot prefill may have, from its formula: the budget of all layers and one layer's tokens."""
    slots = config.num_kv_heads * (config.num_layers * budget + max(tokens, config.num_layers * NEW))
    return int(slots * (2 * config.head_dim * itemsize + 8)) + 4096  # alignment


def _transient(config: Any, tokens: int, chunk: int, itemsize: int) -> int:
    """Hidden states, rotary tables and ids of all tokens, and what a chunk's layer makes: queries, their attention in
    two parts and its join, norms, and the MLP's two halves and their product."""
    wide = tokens * (config.hidden_size * itemsize + config.head_dim * 4 + 8)
    queries = config.num_heads * config.head_dim
    return wide + min(chunk, tokens) * itemsize * (4 * queries + 2 * config.hidden_size + 3 * config.intermediate_size)
