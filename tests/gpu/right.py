"""Whether what the engine works out on a GPU is right: graph against eager, batches, families."""

from __future__ import annotations

from typing import Any

import torch
from setting import Check, allocated, free, generation, random_ids, reply_ids
from shapes import TINY

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
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "repetition_penalty": 1.1}
TIE = 1e-3  # of log-probabilities: nearer ones may fall either way, as products of other shapes round otherwise
CASES = (
    ("grow", "greedy"),
    ("grow", "sampled"),
    ("hold", "greedy"),
    ("hold", "sampled"),
    ("full", "greedy"),
    ("packed", "greedy"),
    ("packed, hold", "greedy"),
)
DRY_CASES = (("hold", "sampled"), ("packed", "greedy"))


def ids(check: Check) -> None:
    """Prompts of 5, 500, 37 and 5 tokens, twice, in fp32: the graph's ids are the eager step's, in constant memory."""
    decoder = check.decoder(check.scale.small, "float32")
    for cache, kind in DRY_CASES if check.scale.dry else CASES:
        with check.attempt(f"{cache}, {kind}"):
            _compare(check, decoder, cache, kind)
        free()


def _compare(check: Check, decoder: Any, cache: str, kind: str) -> None:
    scale = check.scale
    choice = SAMPLED if kind == "sampled" else {"temperature": 0.0}
    plan = generation(max_new_tokens=scale.new_tokens, **choice)
    evicting = {"budget": min(128, scale.budget), **CACHES[cache]}
    eager, graph = check.runner(decoder, step="eager", **evicting), check.runner(decoder, **evicting)
    prompts = {count: random_ids(count, scale.small["vocab_size"], seed=count) for count in scale.prompts}
    wanted = {count: reply_ids(eager, prompt, plan) for count, prompt in prompts.items()}
    got, memory = [], []
    for _ in range(1 if scale.dry else 2):
        for count in scale.prompts:
            got.append(reply_ids(graph, prompts[count], plan))
            memory.append(allocated())
    agree = True
    for run, ids in enumerate(got):
        count = scale.prompts[run % len(scale.prompts)]
        if ids != wanted[count]:
            agree &= kind == "greedy" and _tied(check, eager, prompts[count], ids, wanted[count])
    check.same(f"{cache}, {kind}: graph's ids are the eager step's", agree)
    again = got[0] == got[len(scale.prompts) - 1] == got[-1]
    check.same(f"{cache}, {kind}: the first and the last run agree", again)
    if not scale.dry:
        grown = memory[7] - memory[3]
        check.tell(f"{cache}, {kind}: memory after run 8 less run 4", grown, "bytes", "0", grown <= 0)
    # once for the first prompt, and once more where the longer one made the arena grow; 0 if none could be made
    captures = graph.ahead.captures
    check.tell(f"{cache}, {kind}: captures", captures, "", "1 or 2", 1 <= captures <= 2)


def _tied(check: Check, eager: Any, prompt: list[int], found: list[int], wanted: list[int]) -> bool:
    """Whether two greedy replies part at two tokens that are all but equally probable."""
    from cake_infer.engine.sequence import Sequence

    part = next((at for at, pair in enumerate(zip(found, wanted, strict=False)) if len(set(pair)) > 1), None)
    if part is None:
        return False
    plan = generation(max_new_tokens=part + 1, temperature=0.0, logprobs=2)
    token = list(eager.generate(Sequence(), prompt, plan))[-1]
    (first, best), (second, next_best) = token.logprobs.top[:2]
    check.tell(f"parts after {part} tokens, at a difference of", best - next_best, "nats")
    return {first, second} == {found[part], wanted[part]} and best - next_best < TIE


def batch(check: Check) -> None:
    """Prompts of different lengths decoded together in fp32, each with the ids that it gets alone."""
    decoder = check.decoder(check.scale.small, "float32")
    for cache in ("grow",) if check.scale.dry else ("grow", "hold", "packed"):
        with check.attempt(cache):
            check.same(f"{cache}: ids of a batch are those of each alone", _together(check, decoder, cache))
        free()


def _together(check: Check, decoder: Any, cache: str) -> bool:
    from cake_infer.engine.batch import Batch
    from cake_infer.engine.sequence import Sequence

    scale = check.scale
    runner = check.runner(decoder, **{"budget": min(128, scale.budget), **CACHES[cache]})
    prompts = [random_ids(count, scale.small["vocab_size"], seed=count) for count in scale.prompts]
    counts = [max(1, scale.new_tokens - number) for number in range(len(prompts))]
    plans = [generation(max_new_tokens=count, temperature=(0.0, 0.9)[count % 2]) for count in counts]
    alone = [reply_ids(runner, *pair) for pair in zip(prompts, plans, strict=True)]
    sequences: list[Any] = [Sequence() for _ in prompts]
    got: dict[int, list[int]] = {id(sequence): [] for sequence in sequences}
    with Batch(runner) as together:
        for sequence, prompt, plan in zip(sequences, prompts, plans, strict=True):
            together.join(sequence, prompt, plan)
        while len(together):
            for outcome in together.step():
                if outcome.error is not None:
                    raise outcome.error
                if outcome.token is not None:
                    got[id(outcome.sequence)].append(outcome.token.id)
    return [got[id(sequence)] for sequence in sequences] == alone


def families(check: Check) -> None:
    """Log-likelihoods of a text in bf16 here, and in fp32 on the CPU from the same weights; a reply's ids in fp32."""
    for family, keys in FAMILIES.items():
        with check.attempt(family):
            _family(check, family, {**TINY, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32, **keys})
        free()


def _family(check: Check, family: str, shape: dict[str, Any]) -> None:
    dry = check.scale.dry
    text = random_ids(12 if dry else 200, shape["vocab_size"])
    here, there = (
        torch.tensor(check.runner(decoder, step="eager", policy="full").score(text))
        for decoder in (check.decoder(shape, "bfloat16"), check.decoder(shape, "bfloat16", "cpu"))
    )
    error = float((here - there).abs().mean())
    check.tell(f"{family}: mean difference of log-likelihoods", error, "nats", "at most 0.05", error <= 0.05)
    if dry and family not in ("qwen3", "gemma"):
        return
    decoder, plan = check.decoder(shape, "float32"), generation(max_new_tokens=2 if dry else 16, temperature=0.0)
    eager, graph = (reply_ids(check.runner(decoder, step=step), text, plan) for step in ("eager", "graph"))
    check.same(f"{family}: graph's ids are the eager step's", eager == graph)
