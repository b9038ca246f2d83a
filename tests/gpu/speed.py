"""How fast it is, each figure beside what the machine could do: copies, decode, prefill, launches, transformers."""

from __future__ import annotations

import importlib.util
import math
import time
from typing import Any

import numpy as np
import torch
from setting import Check, allocated, free, generation, no_waiting, random_ids, sync

WARM = 2  # steps before those that are timed
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize")


def bandwidth(check: Check) -> None:
    """Bytes a second of a copy on the device, read and written: the practical ceiling of everything below."""
    source = torch.ones(check.scale.copied, dtype=torch.uint8, device=check.device)
    target, best = torch.empty_like(source), math.inf
    for _ in range(6):
        sync()
        started = time.perf_counter()
        target.copy_(source)
        sync()
        best = min(best, time.perf_counter() - started)
    check.bandwidth = 2 * source.numel() / best
    check.tell("copy", check.bandwidth / 1e9, "GB/s")


class Filled:
    """Sequences of `total` tokens, their rows, `lengths` slots a layer, full of random numbers: no prefill needed."""

    def __init__(self, check: Check, runner: Any, lengths: np.ndarray, total: int, batch: int, room: int) -> None:
        from cake_infer.cache.layout import ArenaSize
        from cake_infer.cache.shared import SharedArena
        from cake_infer.engine.seat import Seat
        from cake_infer.engine.sequence import QueryRing, Sequence

        config, layout = runner.decoder.config, runner.layout
        rows = np.repeat(lengths[:, None], layout.num_kv_heads, 1).astype(np.int64)  # [layers, kv_heads]
        capacity = rows + room
        size = ArenaSize(0, 0, int(capacity.sum()))
        self.runner, self.shared = runner, SharedArena(layout, check.device, batch=batch)
        self.shared.reserve([size] * batch)
        for table in (self.shared.store.keys, self.shared.store.values):
            for part in table.split(1 << 22):
                part.normal_()
        self.seats = []
        for _ in range(batch):
            arena = self.shared.admit(size)
            arena.length[:], arena.capacity[:] = rows, capacity
            arena.offset[:] = arena.first + (capacity.cumsum() - capacity.ravel()).reshape(capacity.shape)
            sequence = Sequence(ids=[5] * total, rotary=runner.rotary(total + room))
            if runner.cache.policy != "full":
                shape = (config.num_layers, runner.cache.window, config.num_heads, config.head_dim)
                sequence.ring = QueryRing(*shape, runner.decoder.compute_dtype, check.device)
            picker = runner.picker(sequence, generation(max_new_tokens=room), room, frozenset())
            self.seats.append(Seat(sequence, picker, 5, arena))
        decoder = runner.decoder
        tied = decoder.lm_head is decoder.embed_tokens
        self.weights = decoder.nbytes - (0 if tied else decoder.embed_tokens.nbytes)
        self.kv = batch * int(rows.sum()) * 2 * layout.head_dim * layout.kv_dtype.itemsize

    def steps(self, count: int) -> None:
        for _ in range(count):
            for chosen in self.runner.ahead.advance(self.seats, room=len(self.seats)):
                chosen.seat.picker.accept(chosen.token, chosen.logits)

    def seconds(self, count: int) -> float:
        """Of one step, over `count` of them, none of which may wait for the device."""
        with torch.inference_mode():
            self.steps(WARM)
            sync()
            started = time.perf_counter()
            with no_waiting():
                self.steps(count)
            sync()
            return (time.perf_counter() - started) / count

    def close(self) -> None:
        self.runner.ahead.land()
        self.shared.clear()
        self.seats = []
        free()


def decode(check: Check) -> None:
    """Tokens a second and the share of the bandwidth: full at batch 1 and 4, CAKE at batch 1, 4 and 8."""
    scale = check.scale
    decoder = check.decoder(scale.large)
    layers = decoder.config.num_layers
    uneven = np.linspace(0.5, 1.5, layers)  # layers keep more or less of the budget
    room = scale.steps + WARM + 3
    found: dict[tuple[str, int, int], tuple[float, int]] = {}
    for policy, batches in (("full", (1, 4)), ("cake", (1, 4) if scale.dry else (1, 4, 8))):
        runner = check.runner(decoder, policy=policy)
        for context in scale.contexts:
            for batch in batches:
                budget = min(scale.budget, context)
                lengths = np.full(layers, context) if policy == "full" else (uneven * budget).astype(np.int64)
                filled = Filled(check, runner, lengths, context, batch, room)
                seconds, moved = filled.seconds(scale.steps), filled.weights + filled.kv
                filled.close()
                found[policy, context, batch] = seconds, moved
                check.found[f"{policy} {context} {batch}"] = seconds
                share = moved / seconds / check.bandwidth
                name = f"{policy}, {context:,} tokens, batch {batch}"
                check.tell(name, batch / seconds, "tok/s")
                if policy == "full" and context == scale.contexts[0] and batch == 1:
                    check.measured(f"{name}: share of the bandwidth", share, "", "at least 0.8", share >= 0.8)
                else:
                    check.tell(f"{name}: share of the bandwidth", share)
    longest = scale.contexts[-1]
    for batch in (1, 4):
        full, cake = found["full", longest, batch], found["cake", longest, batch]
        ratio, bytes_ratio = full[0] / cake[0], full[1] / cake[1]
        bar = f"at least {0.9 * bytes_ratio:.2f} (bytes)"
        check.measured(f"CAKE over full, batch {batch}", ratio, "x", bar, ratio >= 0.9 * bytes_ratio)


def int8(check: Check) -> None:
    """int8 weights at batch 1 and a short context: whether they beat bf16 (needs the part decode for that)."""
    from cake_infer.models.packed import as_quantised

    scale, context = check.scale, check.scale.contexts[0]
    decoder = as_quantised(check.decoder(scale.large), "int8")
    decoder.int8_products = True  # so it is on a GPU; a dry run has the interpreter
    runner = check.runner(decoder, policy="full")
    lengths = np.full(decoder.config.num_layers, context)
    filled = Filled(check, runner, lengths, context, 1, scale.steps + WARM + 3)
    seconds, moved = filled.seconds(scale.steps), filled.weights + filled.kv
    filled.close()
    check.tell(f"int8, {context:,} tokens, batch 1", 1 / seconds, "tok/s")
    check.tell(f"int8, {context:,} tokens, batch 1: share of the bandwidth", moved / seconds / check.bandwidth)
    wide = check.found.get(f"full {context} 1")
    if wide is not None:
        check.measured("int8 over bf16, batch 1", wide / seconds, "x", "above 1", wide > seconds)


def small(check: Check) -> None:
    """A small model, whose steps are short: what the graph saves of the launches."""
    scale = check.scale
    decoder = check.decoder(scale.small)
    prompt = random_ids(scale.prompts[1], scale.small["vocab_size"])
    rates = {}
    for step in ("eager", "graph"):
        runner = check.runner(decoder, step=step)
        for _ in range(2):  # the first one compiles
            sync()
            rates[step] = _rate(runner, prompt, 4 * scale.steps + 2)
        check.tell(f"{step}: decode", rates[step], "tok/s")
    ratio = rates["graph"] / rates["eager"]
    check.measured("graph over eager", ratio, "x", "at least 2", ratio >= 2)


def _rate(runner: Any, prompt: list[int], tokens: int) -> float:
    """Tokens a second behind the first one."""
    from cake_infer.engine.sequence import Sequence

    running = runner.generate(Sequence(), prompt, generation(max_new_tokens=tokens))
    next(running)
    started = time.perf_counter()
    count = sum(1 for _ in running)
    return count / (time.perf_counter() - started)


def launches(check: Check) -> None:
    """What the host asks of the device for each token, by the profiler."""
    scale, steps = check.scale, 2 if check.scale.dry else 8
    runner = check.runner(check.decoder(scale.small))
    layers = runner.decoder.config.num_layers
    filled = Filled(check, runner, np.full(layers, scale.budget), 2 * scale.budget, 1, steps + WARM + 3)
    with torch.inference_mode():
        filled.steps(WARM)
        activities = [torch.profiler.ProfilerActivity.CPU]
        if check.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as profile:
            filled.steps(steps)
            sync()
    counts = {event.key: event.count for event in profile.key_averages()}
    filled.close()
    graphs = counts.get("cudaGraphLaunch", 0) / steps
    kernels = sum(counts.get(name, 0) for name in LAUNCHES) / steps
    waits = sum(counts.get(name, 0) for name in WAITS)  # one is `sync` above
    check.measured("graph launches a token", graphs, "", "1", graphs == 1)
    check.measured("other kernel launches a token", kernels, "", "0", kernels == 0)
    check.measured(f"waits for the device in {steps} tokens", waits, "", "the check's own, 3", waits <= 3)


def prefill(check: Check) -> None:
    """Time and peak memory of reading a prompt, everything kept and CAKE; what CAKE itself costs."""
    from cake_infer.engine.memory import plan_run

    scale = check.scale
    decoder = check.decoder(scale.large)
    new = 64
    for policy in ("cake", "full"):
        _read(check, check.runner(decoder, policy=policy), scale.prefills[0], new)  # libraries and kernels wake up
    for count in scale.prefills:
        times: dict[str, list[float]] = {"full": [], "cake": []}
        for _ in range(2 if count < scale.prefills[-1] else 1):
            for policy in times:
                runner = check.runner(decoder, policy=policy)
                base = allocated()
                if check.device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                times[policy].append(_read(check, runner, count, new))
                peak, arena = allocated(peak=True) - base, runner.tenancy.arena.nbytes
                cache = runner.cache
                del runner
                free()
            if policy == "cake" and len(times["cake"]) == 1:
                most = _designed(decoder.config, min(scale.budget, count), count, new, decoder.dtype.itemsize)
                bar = f"at most {most / 2**20:,.1f}"
                check.tell(f"{count:,} tokens: KV arena with CAKE", arena / 2**20, "MiB", bar, arena <= most)
                plan = plan_run(
                    decoder.config,
                    cache,
                    weights=0,
                    stored=decoder.dtype,
                    prompt_tokens=count,
                    new_tokens=new,
                    chunk=scale.chunk,
                    device=check.device,
                )
                limit = 1.15 * (plan.arena + plan.transient) + (16 << 20)
                bar = f"at most {limit / 2**20:,.0f}"
                check.measured(f"{count:,} tokens: peak above weights, CAKE", peak / 2**20, "MiB", bar, peak <= limit)
        for policy, found in times.items():
            check.tell(f"{count:,} tokens: prefill, {policy}", min(found), "s")
        cost = min(times["cake"]) / min(times["full"])
        if count == scale.prefills[-2]:
            check.measured(f"{count:,} tokens: CAKE over full", cost, "x", "at most 1.03", cost <= 1.03)
        else:
            check.tell(f"{count:,} tokens: CAKE over full", cost, "x")


def _read(check: Check, runner: Any, count: int, new: int) -> float:
    from cake_infer.engine.sequence import Sequence

    sequence, prompt = Sequence(), random_ids(count, runner.decoder.config.vocab_size)
    limit = runner.prepare(sequence, count, new)
    sync()
    started = time.perf_counter()
    logits = runner.feed(sequence, prompt, limit)
    sync()
    seconds = time.perf_counter() - started
    assert bool(torch.isfinite(logits).all()), "the logits are no numbers"
    return seconds


def _designed(config: Any, budget: int, tokens: int, new: int, itemsize: int) -> int:
    """The arena that a one-shot prefill may have, from its formula: the budget of all layers and one layer's tokens."""
    slots = config.num_kv_heads * (config.num_layers * budget + max(tokens, config.num_layers * new))
    return int(slots * (2 * config.head_dim * itemsize + 8)) + 4096  # alignment


def peers(check: Check) -> None:
    """transformers with everything kept, at the longest context: its own default cache, and one that does not grow."""
    if importlib.util.find_spec("transformers") is None:
        check.tell("transformers is not installed", "not run")
        return
    scale = check.scale
    context = scale.contexts[-1]
    model = _transformers(check)
    for batch in (1, 4):
        seconds = {}
        for kind in ("dynamic", "static"):
            try:
                seconds[kind] = _peer_seconds(check, model, kind, context, batch)
                check.tell(f"transformers, {kind}, {context:,} tokens, batch {batch}", batch / seconds[kind], "tok/s")
            except (RuntimeError, TypeError, ValueError, AttributeError) as error:
                check.tell(f"transformers, {kind}, batch {batch}", f"{type(error).__name__}: {error}"[:60])
            free()
        ours = check.found.get(f"cake {context} {batch}")
        if ours is None or "dynamic" not in seconds:
            check.tell(f"CAKE over transformers, batch {batch}", "needs the part decode")
            continue
        ratio = seconds["dynamic"] / ours
        if batch == 4:
            check.measured(f"CAKE over transformers, batch {batch}", ratio, "x", "at least 10", ratio >= 10)
        else:
            check.tell(f"CAKE over transformers, batch {batch}", ratio, "x")


def _transformers(check: Check) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    keys = {key: value for key, value in check.scale.large.items() if key != "model_type" and value is not None}
    default = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, check.scale.dtype))
    try:
        with check.device:
            model = LlamaForCausalLM._from_config(LlamaConfig(**keys), attn_implementation="sdpa")
    finally:
        torch.set_default_dtype(default)
    return model.eval()


def _peer_seconds(check: Check, model: Any, kind: str, context: int, batch: int) -> float:
    from transformers import DynamicCache, StaticCache

    config, steps = model.config, 4
    shape = (batch, config.num_key_value_heads, context, config.head_dim)
    if kind == "dynamic":
        cache = DynamicCache(config=config)
    else:
        cache = StaticCache(config=config, max_cache_len=context + steps + 2)
    dtype = getattr(torch, check.scale.dtype)
    with torch.inference_mode():
        for layer in range(config.num_hidden_layers):
            keys, values = (torch.randn(shape, dtype=dtype, device=check.device) for _ in range(2))
            cache.update(keys, values, layer, {"cache_position": torch.arange(context, device=check.device)})
            del keys, values
        token = torch.full((batch, 1), 5, device=check.device)
        for step in range(steps + 2):
            if step == 2:
                sync()
                started = time.perf_counter()
            at = torch.tensor([context + step], device=check.device)
            out = model(
                input_ids=token,
                past_key_values=cache,
                cache_position=at,
                position_ids=at[None].expand(batch, 1),
                use_cache=True,
            )
            token = out.logits[:, -1:].argmax(-1)
        sync()
        return (time.perf_counter() - started) / steps


PARTS = {
    "launches": launches,
    "bandwidth": bandwidth,
    "decode": decode,
    "int8": int8,
    "small": small,
    "prefill": prefill,
    "peers": peers,
}
