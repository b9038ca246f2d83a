"""Whether what the GPU works out is right: kernels against torch, graph against eager, families, batches, text."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch
from setting import TINY, Check, allocated, free, generation, random_ids
from torch import Tensor

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral, sliding": {"model_type": "mistral", "sliding_window": 8},
    "qwen2": {"model_type": "qwen2", "use_sliding_window": False},
    "qwen3": {"model_type": "qwen3", "use_sliding_window": False, "attention_bias": False},
    "gemma": {"model_type": "gemma", "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
}
CACHES = {
    "grow": {"policy": "cake"},
    "hold": {"policy": "cake", "decode_policy": "hold"},
    "full": {"policy": "full"},
    "packed": {"policy": "cake", "kv_bits": 4},
    "packed, hold": {"policy": "cake", "kv_bits": 8, "decode_policy": "hold"},
}
# each is compiled anew, some seconds in all
SHAPES = {  # head_dim and query heads of a KV head
    torch.float32: ((64, 3), (128, 4)),
    torch.float16: ((128, 8),),
    torch.bfloat16: ((64, 1), (96, 2), (128, 4), (256, 8)),
}
CLOSE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}


def kernels(check: Check) -> None:
    """Ragged attention with hold, and the window's statistics, over random shapes, against float64 and fp32."""
    chance = random.Random(0)
    dry = check.scale.dry
    for dtype, shapes in SHAPES.items():
        if dry and dtype != torch.float32:
            continue
        worst, exchanged = 0.0, True
        for head_dim, group in ((16, 2),) if dry else shapes:
            error, same = _attention(check, chance, dtype, head_dim, group, 20 if dry else 30000)
            worst, exchanged = max(worst, error), exchanged and same
        name = str(dtype).removeprefix("torch.")
        check.tell(f"attention {name}: largest error", worst, "", f"at most {CLOSE[dtype]:g}", worst <= CLOSE[dtype])
        check.tell(f"hold {name}: slots exchanged as in torch", str(exchanged), ok=exchanged)
    for bits, dtype in ((8, torch.float32), (4, torch.bfloat16), (2, torch.float16)):
        if dry and dtype != torch.float32:
            continue
        error = _packed(check, bits, dtype, 16 if dry else 128, 40 if dry else 30000)
        name = f"attention over {bits}-bit rows, {str(dtype).removeprefix('torch.')}: largest error"
        check.tell(name, error, "", f"at most {CLOSE[dtype]:g}", error <= CLOSE[dtype])
    error = max(_statistics(check, n, sliding) for n in ((40,) if dry else (700, 20000)) for sliding in (None, 17))
    check.tell("window statistics: largest relative error", error, "", "at most 1e-3", error <= 1e-3)


def _attention(
    check: Check, chance: random.Random, dtype: torch.dtype, head_dim: int, group: int, most: int
) -> tuple[float, bool]:
    from cake_infer.engine.attention import ragged
    from cake_infer.engine.attention import rows as plain

    batch, kv_heads, device = 3, 2, check.device
    lengths = [[chance.choice([-1, 0, 1, 17, chance.randrange(most)]) for _ in range(kv_heads)] for _ in range(batch)]
    lengths[0][0] = most
    length = torch.tensor(lengths, dtype=torch.int32)
    room = (length + 2).clamp(min=0).flatten()
    offset = (room.cumsum(0) - room).view(batch, kv_heads).int()
    slots = int(room.sum())
    generator = torch.Generator(device=device).manual_seed(head_dim * group)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    rows = plain.Rows(
        keys=normal(slots, head_dim),
        values=normal(slots, head_dim),
        position=torch.randperm(slots, generator=generator, device=device).int(),
        offset=offset.to(device),
        length=length.to(device),
        query_position=torch.full((batch,), slots, dtype=torch.int32, device=device),
        longest=most + 1,
    )
    queries = normal(batch, kv_heads * group, head_dim)
    new_keys, new_values = normal(batch, kv_heads, head_dim), normal(batch, kv_heads, head_dim)
    limit = torch.where(rows.length > 5, rows.length, rows.length + 9)  # some are full, some are not
    wide = replace(rows, keys=rows.keys.double(), values=rows.values.double(), position=rows.position.clone())
    wide = replace(wide, length=rows.length.clone())
    ragged.store_newcomers(rows, new_keys, new_values)
    plain.store_newcomers(wide, new_keys.double(), new_values.double())
    error = 0.0
    for sliding in (slots // 2, None):
        out, means = ragged.attend_rows(queries, rows, scale=head_dim**-0.5, sliding=sliding, weights=True)
        wanted, _ = plain.attend_rows(queries.double(), wide, scale=head_dim**-0.5, sliding=sliding)
        error = max(error, float((out.double() - wanted).abs().max()))
    assert means is not None
    # by the kernel's own weights: rounding may order two slots that are all but equal the other way round
    plain.exchange_least_attended(wide, means, limit, window=4)
    ragged.exchange_least_attended(rows, means, limit, window=4)
    same = torch.equal(rows.length, wide.length) and torch.equal(rows.position, wide.position)
    return error, same and torch.equal(rows.keys.double(), wide.keys)


def _packed(check: Check, bits: int, dtype: torch.dtype, head_dim: int, most: int) -> float:
    """Rows in two parts, against float64 over the numbers that torch makes of the codes."""
    from cake_infer.cache.layout import ArenaLayout
    from cake_infer.cache.packed_store import PackedStore
    from cake_infer.cache.quantise import pack_keys, pack_values, whole_groups, widen_keys, widen_values
    from cake_infer.engine.attention.packed import PackedPart
    from cake_infer.engine.attention.ragged_packed import attend_packed
    from cake_infer.engine.attention.rows import Rows

    device, lengths, group = check.device, [[most, 0], [33, most // 2]], 3
    generator = torch.Generator(device=device).manual_seed(bits)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    layout = ArenaLayout(1, 2, head_dim, dtype, dtype, kv_bits=bits, window=8)
    store = PackedStore(layout, sum(whole_groups(n) for row in lengths for n in row), device)
    offsets, numbers, end = [], [], 0
    for n in (n for row in lengths for n in row):
        keys, values = torch.zeros(n, head_dim, device=device), torch.zeros(n, head_dim, device=device)
        if n:
            stop = end + whole_groups(n)
            parts = pack_keys(normal(n, head_dim), bits), pack_values(normal(n, head_dim), bits)
            store.key_codes[end:stop], store.value_codes[end : end + n] = parts[0][0], parts[1][0]
            store.key_scale[end // 32 : stop // 32], store.key_minimum[end // 32 : stop // 32] = parts[0][1:]
            store.value_scale[end : end + n], store.value_minimum[end : end + n] = parts[1][1:]
            widen_keys(keys, *parts[0], bits)
            widen_values(values, *parts[1], bits)
        offsets.append(end)
        numbers.append((keys, values))
        end += whole_groups(n)
    length, offset = (torch.tensor(table, dtype=torch.int32).view(2, 2) for table in (lengths, offsets))
    rest = torch.tensor([[0, 9], [18, 27]], dtype=torch.int32, device=device)
    rows = Rows(
        keys=normal(40, head_dim),
        values=normal(40, head_dim),
        position=torch.zeros(40, dtype=torch.int32, device=device),
        offset=rest,
        length=torch.full_like(rest, 8),
        query_position=torch.zeros(2, dtype=torch.int32, device=device),
        longest=9,
    )
    queries = normal(2, 2 * group, head_dim)
    scale = head_dim**-0.5
    out = attend_packed(queries, rows, PackedPart(store, offset.to(device), length.to(device), most), scale=scale)
    error = 0.0
    for index, (keys, values) in enumerate(numbers):
        sequence, head = divmod(index, 2)
        span, mine = slice(9 * index, 9 * index + 9), slice(head * group, (head + 1) * group)
        all_keys = torch.cat([keys.double(), rows.keys[span].double()])
        all_values = torch.cat([values.double(), rows.values[span].double()])
        wanted = torch.softmax(queries[sequence, mine].double() @ all_keys.T * scale, -1) @ all_values
        error = max(error, float((out[sequence, mine].double() - wanted).abs().max()))
    return error


def _statistics(check: Check, n: int, sliding: int | None) -> float:
    from cake_infer.cache.scores import cake_statistics, device_statistics
    from cake_infer.cache.view import LayerView

    generator = torch.Generator().manual_seed(n)
    window, head_dim = check.scale.window, 16 if check.scale.dry else 128
    view = LayerView(
        layer=0,
        keys=torch.randn(2, n, head_dim, generator=generator),
        positions=torch.arange(n).repeat(2, 1),
        queries=2 * torch.randn(8, window, head_dim, generator=generator),
        query_positions=torch.arange(n - window, n),
        window=window,
        scale=head_dim**-0.5,
        sliding_window=sliding,
        total=n,
    )
    there = {name: getattr(view, name).to(check.device) for name in ("keys", "positions", "queries", "query_positions")}
    ours, theirs = device_statistics(replace(view, **there, memo={}), 200.0, 5), cake_statistics(view, 200.0, 5)
    errors = [
        abs(ours.dispersion - theirs.dispersion) / max(theirs.dispersion, 1e-9),
        abs(ours.shift - theirs.shift) / max(theirs.shift, 1e-9),
        float((ours.indicator.cpu() - theirs.indicator).abs().max() / theirs.indicator.abs().max()),
    ]
    return max(errors)


def ids(check: Check) -> None:
    """Prompts of 5, 500, 37 and 5 tokens, twice, in fp32: the graph's ids are the eager step's, in constant memory."""
    scale = check.scale
    decoder = check.decoder(scale.small, "float32")
    for cache, options in CACHES.items():
        for kind, choice in {"greedy": {}, "sampled": {"temperature": 0.8, "top_p": 0.9, "top_k": 50}}.items():
            dry = ("hold", "sampled"), ("packed", "greedy"), ("packed, hold", "greedy")
            if (cache, kind) in (("full", "sampled"), ("packed", "sampled"), ("packed, hold", "sampled")) or (
                scale.dry and (cache, kind) not in dry
            ):
                continue
            plan = generation(max_new_tokens=scale.new_tokens, repetition_penalty=1.1, **choice)
            evicting = {"budget": min(128, scale.budget), **options}
            eager = check.runner(decoder, step="eager", **evicting)
            graph = check.runner(decoder, **evicting)
            got, memory, agree = [], [], True
            for _ in range(1 if scale.dry else 2):
                for count in scale.prompts:
                    prompt = random_ids(count, scale.small["vocab_size"], seed=count)
                    got.append(_ids(graph, prompt, plan))
                    memory.append(allocated())
                    agree &= got[-1] == _ids(eager, prompt, plan)
            check.tell(f"{cache}, {kind}: graph's ids are the eager step's", str(agree), ok=agree)
            again = got[0] == got[len(scale.prompts) - 1] == got[-1]
            check.tell(f"{cache}, {kind}: the first and the last run agree", str(again), ok=again)
            if not scale.dry:
                grown = memory[7] - memory[3]
                check.tell(f"{cache}, {kind}: memory after run 8 less run 4", grown, "bytes", "0", grown <= 0)
            # once for the first prompt, and once more where the longer one made the arena grow
            check.tell(f"{cache}, {kind}: captures", graph.ahead.captures, "", "at most 2", graph.ahead.captures <= 2)
            del eager, graph
            free()


def _ids(runner: Any, prompt: list[int], plan: Any) -> list[int]:
    from cake_infer.engine.sequence import Sequence

    return [token.id for token in runner.generate(Sequence(), prompt, plan)]


def batch(check: Check) -> None:
    """Prompts of different lengths decoded together in fp32, each with the ids that it gets alone."""
    from cake_infer.engine.batch import Batch
    from cake_infer.engine.sequence import Sequence

    scale = check.scale
    decoder = check.decoder(scale.small, "float32")
    for cache in ("grow",) if scale.dry else ("grow", "hold"):
        runner = check.runner(decoder, **CACHES[cache])
        prompts = [random_ids(count, scale.small["vocab_size"], seed=count) for count in scale.prompts]
        plans = [
            generation(max_new_tokens=scale.new_tokens - i, temperature=[0.0, 0.9][i % 2]) for i in range(len(prompts))
        ]
        alone = [_ids(runner, *pair) for pair in zip(prompts, plans, strict=True)]
        sequences: list[Any] = [Sequence() for _ in prompts]
        got: dict[int, list[int]] = {id(sequence): [] for sequence in sequences}
        with Batch(runner) as together:
            for sequence, prompt, plan in zip(sequences, prompts, plans, strict=True):
                together.join(sequence, prompt, plan)
            while len(together):
                for outcome in together.step():
                    if outcome.token is not None:
                        got[id(outcome.sequence)].append(outcome.token.id)
        same = [got[id(sequence)] for sequence in sequences] == alone
        check.tell(f"{cache}: ids of a batch are those of each alone", str(same), ok=same)


def families(check: Check) -> None:
    """Log-likelihoods of a text in bf16 here, and in fp32 on the CPU from the same weights; a reply's ids in fp32."""
    scale = check.scale
    for family, keys in FAMILIES.items():
        shape = {**TINY, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32, **keys}
        text = random_ids(12 if scale.dry else 200, shape["vocab_size"])
        here, there = (
            torch.tensor(check.runner(decoder, step="eager", policy="full").score(text))
            for decoder in (check.decoder(shape, "bfloat16"), check.decoder(shape, "bfloat16", "cpu"))
        )
        error = float((here - there).abs().mean())
        check.tell(f"{family}: mean difference of log-likelihoods", error, "nats", "at most 0.05", error <= 0.05)
        if scale.dry and family not in ("qwen3", "gemma"):
            continue
        decoder, plan = check.decoder(shape, "float32"), generation(max_new_tokens=2 if scale.dry else 16)
        eager, graph = (_ids(check.runner(decoder, step=step), text, plan) for step in ("eager", "graph"))
        check.tell(f"{family}: graph's ids are the eager step's", str(eager == graph), ok=eager == graph)


def text(check: Check) -> None:
    """A real model's greedy text, graph against eager; told only where no model is given."""
    if check.model is None:
        check.tell("no --model given", "not run")
        return
    from cake_infer import Engine

    replies = []
    for step in ("eager", "graph"):
        with Engine.load(check.model, device=str(check.device), dtype="float32", step=step, budget=256) as engine:
            replies.append(engine.generate("The capital of France is", max_new_tokens=24, temperature=0.0).text)
    check.tell("graph's text is the eager step's", repr(replies[1]), ok=replies[0] == replies[1])


PARTS = {"kernels": kernels, "ids": ids, "batch": batch, "families": families, "text": text}
