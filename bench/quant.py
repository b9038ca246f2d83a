"""What each number format of weights, and of kept keys and values, changes in the model's distribution over real text.

    python bench/quant.py

The reference has fp32 weights, fp32 products and fp32 keys and values. Mean Kullback-Leibler divergence in nats per
token from the reference, and how often the most probable token is the same, over the text that is read (weights) and
over decode steps that are fed the text's own continuation (keys and values).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
from cake_infer import Engine
from cake_infer.cache.arena import Arena
from cake_infer.cache.layout import ArenaSize
from cake_infer.engine import prefill
from cake_infer.engine.sequence import Sequence
from report import report

ROOT = Path(__file__).resolve().parent.parent


@torch.inference_mode()
def logits_of_text(engine: Engine, ids: list[int]) -> Tensor:
    """Logits `[tokens, vocab]` of every position (a short text: this is the whole matrix)."""
    runner = engine.runner
    arena = Arena(runner.layout, ArenaSize(0, len(ids) * engine.config.num_kv_heads, 0))
    sequence = Sequence(rotary=runner.rotary(len(ids)))
    hidden = prefill.read_all(runner.decoder, arena, sequence, torch.tensor(ids), chunk=256)
    return torch.cat([runner.decoder.logits(part) for part in hidden.split(64)])


@torch.inference_mode()
def logits_of_steps(engine: Engine, ids: list[int], prompt: int) -> Tensor:
    """Logits of each decode step after a prefill of `prompt` tokens."""
    runner, sequence = engine.runner, Sequence()
    runner.feed(sequence, ids[:prompt], runner.prepare(sequence, prompt, len(ids) - prompt + 1))
    return torch.stack(
        [runner.step(runner.tenancy.arena, sequence, token, window=runner.cache.window) for token in ids[prompt:]]
    )


def compare(reference: Tensor, other: Tensor) -> tuple[float, float]:
    """Mean KL in nats and the share of equal most probable tokens."""
    p, q = torch.log_softmax(reference.double(), -1), torch.log_softmax(other.double(), -1)
    divergence = (p.exp() * (p - q)).sum(-1).mean()
    return float(divergence), float((reference.argmax(-1) == other.argmax(-1)).double().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--text", type=Path, default=ROOT / "examples" / "harbour.md")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=200, help="of these tokens, how many are decoded")
    args = parser.parse_args()
    exact = {"policy": "full", "kv_dtype": "float32"}
    ways = {
        "float32": {"dtype": "float32", **exact},
        "bfloat16": exact,
        "int8": {"quant": "int8", **exact},
        "int4": {"quant": "int4", **exact},
        "float32, KV bfloat16": {"dtype": "float32", "policy": "full", "kv_dtype": "bfloat16"},
        "int8, KV bfloat16": {"quant": "int8", "policy": "full", "kv_dtype": "bfloat16"},
    }
    references: list[Tensor] = []
    for name, options in ways.items():
        with Engine.load(args.model, **options) as engine:
            ids = engine.encode(args.text.read_text(encoding="utf-8"))[: args.tokens]
            nbytes = engine.runner.decoder.nbytes
            found = [logits_of_text(engine, ids), logits_of_steps(engine, ids, len(ids) - args.steps)]
        references = references or found
        for what, reference, other in zip(("text read", "steps"), references, found, strict=True):
            divergence, same = compare(reference, other)
            report("quant", f"{name}, {what}", divergence, "nats", None, same_token=same, weight_bytes=nbytes)


if __name__ == "__main__":
    main()
