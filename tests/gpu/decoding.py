"""How fast decoding is, each figure beside what the machine could do: a step's bytes at the rate of a copy."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from filled import Filled, needed
from setting import WAITS, Check, calls, free, generation, random_ids, sync

LAUNCHES = ("cudaLaunchKernel", "cudaLaunchCooperativeKernel", "cuLaunchKernel")
SHARE = 0.8  # of a copy's bandwidth
NEAR = 0.1  # how far a ratio may be from what the bytes predict


def bandwidth(check: Check) -> None:
    """Bytes a second of a copy on the device, read and written: the practical ceiling of everything below."""
    ways = _rates(check)
    for name, rate in ways.items():
        check.tell(name, rate / 1e9, "GB/s")


def _rates(check: Check) -> dict[str, float]:
    """The largest of two ways to copy is what shares are of; a sum, which only reads, is told beside it."""
    count = check.scale.copied // 4
    source = torch.empty(count, dtype=torch.float32, device=check.device).normal_()
    target = torch.empty_like(source)
    for _ in range(2 if check.scale.dry else 200):  # clocks rise under load alone
        target.copy_(source)
    nbytes = 2 * source.nbytes
    found = {
        "copy": nbytes / _seconds(check, lambda: target.copy_(source)),
        "copy by a kernel": nbytes / _seconds(check, lambda: torch.add(source, 1.0, out=target)),
        "read alone": source.nbytes / _seconds(check, source.sum),
    }
    check.found["copy"] = max(found["copy"], found["copy by a kernel"])
    return found


def _seconds(check: Check, work: Callable[[], Any]) -> float:
    """Of one call: the least of some timings of some calls each."""
    calls, best = 1 if check.scale.dry else 10, math.inf
    for _ in range(2 if check.scale.dry else 5):
        sync()
        started = time.perf_counter()
        for _ in range(calls):
            work()
        sync()
        best = min(best, (time.perf_counter() - started) / calls)
    return best


def _share(check: Check, moved: int, seconds: float) -> float:
    if "copy" not in check.found:
        _rates(check)
        free()
    return moved / seconds / check.found["copy"]


def _timed(
    check: Check, runner: Any, name: str, lengths: np.ndarray, context: int, batch: int, *, more: int = 0
) -> tuple[float, float]:
    """Rows of a table of one filled batch. Returns seconds and bytes of a step, NaN where it could not be run.

    more: steps behind them in which it is told what waits for the device.
    """
    seconds = moved = math.nan
    with check.attempt(name):
        filled = Filled(check, runner, lengths, context, batch, needed(check) + more)
        try:
            seconds, moved = filled.seconds(check), filled.moved
            waits = filled.waits(more)
        finally:
            filled.close()
        if more:
            check.tell(f"{name}: what waits in {more} steps", waits or "nothing")
        check.tell(name, batch / seconds, "tok/s")
        share, short = _share(check, moved, seconds), batch == 1 and context == check.scale.contexts[0]
        if short and runner.layout.kv_bits is None and runner.decoder.dtype != torch.int8:
            check.measured(f"{name}: share of a copy", share, "", f"at least {SHARE}", share >= SHARE)
        else:
            check.tell(f"{name}: share of a copy", share)
    free()
    return seconds, moved


def decode(check: Check) -> None:
    """Tokens a second: full at batch 1 and 4, CAKE at batch 1, 4 and 8, at every context; and CAKE over full."""
    scale = check.scale
    decoder = check.decoder(scale.large)
    found: dict[tuple[str, int, int], tuple[float, float]] = {}
    for policy, batches in (("cake", (1, 4) if scale.dry else (1, 4, 8)), ("full", (1, 4))):
        runner = check.runner(decoder, policy=policy)
        for context in scale.contexts:
            for batch in batches:
                name = f"{policy}, {context:,} tokens, batch {batch}"
                lengths = kept_lengths(check, decoder, policy, context)
                found[policy, context, batch] = _timed(check, runner, name, lengths, context, batch)
        del runner
    longest, shortest = scale.contexts[-1], scale.contexts[0]
    if not scale.dry:
        runner = check.runner(decoder, policy="cake", decode_policy="hold")
        name, lengths = f"cake, hold, {longest:,} tokens, batch 1", kept_lengths(check, decoder, "cake", longest)
        _timed(check, runner, name, lengths, longest, 1)
    seconds, moved = found["full", shortest, 1]
    check.found |= {"decode": 1 / seconds, "decode, at most": check.found.get("copy", math.nan) / moved}
    for batch in (1, 4):
        full, cake = found["full", longest, batch], found["cake", longest, batch]
        check.found[f"cake {longest} {batch}"] = cake[0]
        ratio, by_bytes = full[0] / cake[0], full[1] / cake[1]
        bar = f"{by_bytes:.2f} by bytes, within {NEAR:.0%}"
        check.found[f"over full, batch {batch}"] = ratio
        name = f"CAKE over full, {longest:,} tokens, batch {batch}"
        check.measured(name, ratio, "x", bar, abs(ratio / by_bytes - 1) <= NEAR)


def kept_lengths(check: Check, decoder: Any, policy: str, context: int) -> np.ndarray:
    """How many slots each layer's rows have: all, or with CAKE more or less of the budget."""
    layers = decoder.config.num_layers
    if policy == "full":
        return np.full(layers, context)
    return (np.linspace(0.5, 1.5, layers) * min(check.scale.budget, context)).astype(np.int64)


def cake_seconds(check: Check, context: int, batch: int) -> float:
    """Seconds of a step with CAKE, as `decode` has found them, or timed now."""
    name = f"cake {context} {batch}"
    if name not in check.found:
        decoder = check.decoder(check.scale.large)
        lengths = kept_lengths(check, decoder, "cake", context)
        about = (f"cake, {context:,} tokens, batch {batch}", lengths, context, batch)
        check.found[name] = _timed(check, check.runner(decoder, policy="cake"), *about)[0]
    return check.found[name]


def packed(check: Check) -> None:
    """Rows in 8, 4 and 2 bits, all that was read and CAKE's share of it, at the longest context."""
    scale = check.scale
    decoder, context = check.decoder(scale.large), scale.contexts[-1]
    # a group is 32 tokens: with fewer outside of the window nothing would be packed
    context = max(context, 100)
    for bits in (4,) if scale.dry else (None, 8, 4, 2):
        for policy in ("full",) if scale.dry else ("full", "cake"):
            runner = check.runner(decoder, policy=policy, **({} if bits is None else {"kv_bits": bits}))
            name = f"{policy} in {bits or 16} bits, {context:,} tokens, batch 1"
            lengths = kept_lengths(check, decoder, policy, context)
            # in so many steps each row fills a group, and packs it
            _timed(check, runner, name, lengths, context, 1, more=0 if scale.dry or bits is None else 40)
            del runner


def int8(check: Check) -> None:
    """int8 weights at a short context: whether they beat bf16 at batch 1."""
    from cake_infer.models.packed import as_quantised

    scale, context = check.scale, check.scale.contexts[0]
    seconds: dict[str, dict[int, float]] = {"bf16": {}, "int8": {}}
    decoder = check.decoder(scale.large)
    for kind, found in seconds.items():
        if kind == "int8":
            decoder = as_quantised(decoder, "int8")
            decoder.int8_products = True  # so it is on a GPU; a dry run has the interpreter
            free()
        runner = check.runner(decoder, policy="full")
        for batch in (1,) if scale.dry else (1, 4):
            name = f"{kind}, {context:,} tokens, batch {batch}"
            lengths = kept_lengths(check, decoder, "full", context)
            found[batch] = _timed(check, runner, name, lengths, context, batch)[0]
        del runner
    ratio = seconds["bf16"][1] / seconds["int8"][1]
    check.measured("int8 over bf16, batch 1", ratio, "x", "above 1", ratio > 1)


def small(check: Check) -> None:
    """A small model, whose steps are short: what the graph saves of the launches, of the faster eager step."""
    scale = check.scale
    decoder = check.decoder(scale.small)
    prompt = random_ids(scale.prompts[1], scale.small["vocab_size"])
    rates = {}
    for step, attention in (("eager", "triton"), ("eager", "sdpa"), ("graph", "triton")):
        if scale.dry and attention == "sdpa":
            continue
        runner = check.runner(decoder, step=step, attention=attention)
        for _ in range(1 if scale.dry else 3):  # the first one compiles
            rate = _rate(runner, prompt, 2 if scale.dry else 100)
            rates[step] = max(rates.get(step, 0.0), rate)
        check.tell(f"{step}, attention {attention}: decode", rate, "tok/s")
    ratio = rates["graph"] / rates["eager"]
    check.measured("graph over eager", ratio, "x", "at least 2", ratio >= 2)


def _rate(runner: Any, prompt: list[int], tokens: int) -> float:
    """Tokens a second behind the first one."""
    from cake_infer.engine.sequence import Sequence

    running = runner.generate(Sequence(), prompt, generation(max_new_tokens=tokens, temperature=0.0))
    next(running)
    sync()
    started = time.perf_counter()
    count = sum(1 for _ in running)
    return count / (time.perf_counter() - started)


def launches(check: Check) -> None:
    """What the host asks of the device for each token, by the profiler; and that nothing in the loop waits."""
    decoder = check.decoder(check.scale.small)
    kinds: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "greedy": ({}, {"temperature": 0.0}),
        "hold, sampled": ({"decode_policy": "hold"}, {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1}),
    }
    for kind, (cache, options) in kinds.items():
        with check.attempt(kind):
            _count(check, decoder, kind, cache, options)
        free()


def _count(check: Check, decoder: Any, kind: str, cache: dict[str, Any], options: dict[str, Any]) -> None:
    scale, steps = check.scale, 1 if check.scale.dry else 16
    runner = check.runner(decoder, policy="cake", **cache)
    lengths = np.full(decoder.config.num_layers, scale.budget)
    filled = Filled(check, runner, lengths, 2 * scale.budget, 1, scale.warm + 2 * steps, **options)
    try:
        with torch.inference_mode():
            filled.steps(scale.warm)
            with calls(check) as counted:
                filled.steps(steps)
        waits = filled.waits(steps)
    finally:
        filled.close()
    graphs, kernels = counted("cudaGraphLaunch") / steps, counted(*LAUNCHES) / steps
    stops = counted(*WAITS)  # one is of `calls`, one or two are the profiler's
    check.measured(f"{kind}: graph launches a token", graphs, "", "1", graphs == 1)
    check.measured(f"{kind}: other kernel launches a token", kernels, "", "0", kernels == 0)
    check.measured(f"{kind}: waits for the device in {steps} tokens", stops, "", "the check's own, 3", stops <= 3)
    check.measured(f"{kind}: what waits in the loop", waits or "nothing", "", "nothing", not waits)
