"""Peak memory of a prefill above the weights, against what it cannot do without.

    python bench/memory.py                            # smollm2-135m, prompts of 1k, 2k, 4k and 8k tokens
    python bench/memory.py --hold 20000               # a long reply at a fixed budget: the peak must not move

Each figure comes from a process of its own. A model of a few thousand random weights reads a short prompt first, so
that library code is resident (10 to 40 MB, mostly pages of files; `--cold` leaves this out). Then the model is loaded,
every page of its weights is touched, so that mapped weights (ours) and copied ones (transformers') are both resident,
malloc gives back what it holds, and the kernel's high-water mark of resident memory is reset (Linux:
/proc/self/clear_refs). The prompt is read and one token is chosen. Peak = high-water mark - resident memory before:
every tensor, and whatever malloc and the libraries hold beside them.

The ceiling is hidden states + KV arena + one widened layer + one chunk; the arena is the kept budget
and one staged layer. `bound` is 1.15 * ideal + 16 MB. `plan` is what `cake-infer plan` says for the same run.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from report import report

MIB = 2**20
TOKENS = (1024, 2048, 4096, 8064)
BOUND_SHARE, BOUND_BYTES = 1.15, 16_000_000
PLAN_ERROR = 0.05
# what the small model that is read first has instead of the measured one's
WARM = {
    "num_hidden_layers": 1,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1024,
}
WARM_TOKENS = 600
# a model whose context leaves room for a long reply; its weights are random
LONG = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100_000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


@dataclass(frozen=True)
class Run:
    """One measurement, as its process is told."""

    engine: str  # "cake", "full" or "transformers"
    model: str
    tokens: int
    new_tokens: int
    budget: int
    chunk: int
    threads: int
    random_weights: bool = False
    decode_policy: str = "grow"
    policy: str = "auto"
    cold: bool = False

    def measure(self) -> dict[str, Any]:
        """The figures of a fresh process."""
        command = [sys.executable, __file__, "--child", json.dumps(self.__dict__)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            sys.exit(f"error: measuring {self.engine} at {self.tokens} tokens failed, see above")
        figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return figures


# -- in the measured process ------------------------------------------------------------------------------------------


def status(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


class Peak:
    """Resident memory before, and the most since."""

    def __init__(self) -> None:
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        self.before = status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")

    def above(self) -> int:
        return status("VmHWM") - self.before


def touch(tensors: list[Any]) -> None:
    """Make every page of the tensors resident."""
    import torch

    for tensor in tensors:
        flat = tensor.detach().view(-1).view(torch.uint8)
        flat[:: os.sysconf("SC_PAGE_SIZE")].sum()
        flat[-1].item()


def prompt_ids(count: int, vocab_size: int) -> list[int]:
    return random.Random(count).choices(range(100, vocab_size), k=count)


def warm_ours(run: Run) -> None:
    """Use every part of a prefill once, in an engine that is closed again."""
    from cake_infer import Engine
    from cake_infer.models.hub import resolve_model

    source = Path(run.model) if run.random_weights else resolve_model(run.model)
    config = {**json.loads((source / "config.json").read_text()), **WARM}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        with Engine.load(folder, budget=64, threads=run.threads, device="cpu", random_weights=True) as engine:
            engine.generate(ids=prompt_ids(WARM_TOKENS, WARM["vocab_size"]), max_new_tokens=2, temperature=0.0)


def measure_ours(run: Run) -> dict[str, Any]:
    from cake_infer import CacheConfig, Engine

    if not run.cold:
        warm_ours(run)
    cache = (
        CacheConfig(policy="full")
        if run.engine == "full"
        else CacheConfig(policy=run.policy, budget=run.budget, decode_policy=run.decode_policy)
    )
    with Engine.load(
        run.model, cache=cache, chunk=run.chunk, threads=run.threads, device="cpu", random_weights=run.random_weights
    ) as engine:
        decoder = engine.runner.decoder
        touch(
            [decoder.embed_tokens, decoder.lm_head, *(t for layer in decoder.layers for _, t in layer.named_tensors())]
        )
        ids = prompt_ids(run.tokens, engine.config.vocab_size)
        peak = Peak()
        after_prefill, count = 0, 0
        for piece in engine.stream(ids=ids, max_new_tokens=run.new_tokens, temperature=0.0):
            count += piece.id is not None
            if count == 1 and not after_prefill:
                after_prefill = peak.above()
        return {
            "peak": after_prefill,
            "peak_after_reply": peak.above(),
            "new_tokens": count,
            "weights": decoder.nbytes,
            **plan_figures(engine, run),
        }


def plan_figures(engine: Any, run: Run) -> dict[str, int]:
    """What the engine's own plan says, and the ideal, both without the weights."""
    from cake_infer.engine.memory import layer_elements, plan_run

    config, decoder = engine.config, engine.runner.decoder
    plan = plan_run(
        config,
        engine.cache,
        weights=decoder.nbytes,
        stored=decoder.dtype,
        prompt_tokens=run.tokens,
        new_tokens=run.new_tokens,
        chunk=run.chunk,
        device="cpu",
    )
    chunk, queries = min(run.chunk, run.tokens), config.num_heads * config.head_dim
    # products are in fp32, or in bf16 on a CPU with instructions for it; hidden states are always fp32
    item = decoder.product_dtype.itemsize
    hidden = run.tokens * config.hidden_size * 4
    widened = layer_elements(config) * item if decoder.dtype != decoder.product_dtype else 0
    # a chunk's normed input with its queries and their result, or with gate and up
    widest = config.hidden_size + max(2 * queries, 2 * config.intermediate_size)
    return {
        "ideal": hidden + plan.arena + widened + chunk * widest * item,
        "arena": plan.arena,
        "plan": plan.total - plan.weights,
    }


def measure_transformers(run: Run) -> dict[str, Any]:
    import torch
    from cake_infer.models.hub import resolve_model
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(run.threads)
    path = resolve_model(run.model)
    if not run.cold:
        config = AutoConfig.from_pretrained(path, **WARM)
        with torch.inference_mode():
            small = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()
            small(torch.tensor([prompt_ids(WARM_TOKENS, WARM["vocab_size"])]), use_cache=True, logits_to_keep=1)
            del small
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa").eval()
    touch(list(model.parameters()))
    ids = torch.tensor([prompt_ids(run.tokens, model.config.vocab_size)])
    peak = Peak()
    with torch.inference_mode():
        model(ids, use_cache=True, logits_to_keep=1)
    weights = {p.data_ptr(): p.nbytes for p in model.parameters()}
    return {"peak": peak.above(), "weights": sum(weights.values())}


# -- in the process that is started -----------------------------------------------------------------------------------


def prefill_case(args: argparse.Namespace, engine: str, tokens: int, peer: dict[str, Any] | None) -> bool:
    """Measure and report one prompt length. Returns whether bound and plan hold."""
    run = Run(engine, args.model, tokens, 1, args.budget, args.chunk, args.threads, cold=args.cold, policy=args.policy)
    mine = run.measure()
    bound = BOUND_SHARE * mine["ideal"] + BOUND_BYTES
    error = mine["plan"] / mine["peak"] - 1
    within = mine["peak"] <= bound
    whole = (mine["plan"] + mine["weights"]) / (mine["peak"] + mine["weights"]) - 1
    planned = abs(whole) <= PLAN_ERROR
    verdict = "within" if within else "BROKEN"
    if tokens < 2000:
        verdict += " (it is meant for 2k and more)"
    print(
        f"bound {bound / MIB:.1f} MiB: {verdict}; plan {mine['plan'] / MIB:.1f} MiB, {error:+.1%} above the weights, "
        f"{whole:+.1%} of the whole"
    )
    case = f"{f'{args.policy} {args.budget}' if engine == 'cake' else engine}, S={tokens}"
    report(
        "memory",
        case,
        mine["peak"] / MIB,
        "MiB",
        mine["ideal"] / MIB,
        {"transformers": peer["peak"] / MIB} if peer else {},
        bound=bound / MIB,
        within_bound=within,
        plan=mine["plan"] / MIB,
        plan_error=error,
        plan_error_of_whole=whole,
        arena=mine["arena"] / MIB,
        weights=mine["weights"] / MIB,
        model=args.model,
        threads=args.threads,
    )
    return (within or tokens < 2000) and planned


def hold_case(args: argparse.Namespace) -> bool:
    """A long reply with decode policy hold, and the same prompt with a short one."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LONG))
        peaks = {}
        for new_tokens in (64, 64, args.hold):  # the first one may compile the decode step, which takes 100 MB
            run = Run("cake", folder, 2048, new_tokens, args.budget, args.chunk, args.threads, True, "hold")
            peaks[new_tokens] = run.measure()
    short, long = peaks[64], peaks[args.hold]
    assert long["new_tokens"] == args.hold, f"the reply ended after {long['new_tokens']} tokens"
    report(
        "memory",
        f"hold, {args.hold} new tokens after S=2048",
        long["peak_after_reply"] / MIB,
        "MiB",
        long["ideal"] / MIB,
        {"64 new tokens": short["peak_after_reply"] / MIB},
        after_prefill=long["peak"] / MIB,
        budget=args.budget,
    )
    return bool(long["peak_after_reply"] <= short["peak_after_reply"] + MIB)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", default="smollm2-135m", help="folder or alias of a model that transformers can load")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, metavar="S")
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--policy", default="auto", help="what keeps the budget (default auto)")
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--cold", action="store_true", help="count library code that is first used in the prefill")
    parser.add_argument("--no-peer", action="store_true", help="without transformers")
    parser.add_argument("--hold", type=int, metavar="N", help="only the long reply: N new tokens (2000, or 20000)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        run = Run(**json.loads(args.child))
        print(json.dumps(measure_transformers(run) if run.engine == "transformers" else measure_ours(run)))
        return 0
    if args.hold:
        return 0 if hold_case(args) else 1
    good = True
    for tokens in args.tokens:
        peer_run = Run("transformers", args.model, tokens, 1, args.budget, args.chunk, args.threads, cold=args.cold)
        peer = None if args.no_peer else peer_run.measure()
        for engine in ("cake", "full"):
            good &= prefill_case(args, engine, tokens, peer)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
