"""What the parts of the check share: the device, the shapes, models and runners of them, and the report."""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SMOLLM_135M = {
    **LLAMA_8B,
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "rope_scaling": None,
    "tie_word_embeddings": True,
}
TINY = {
    **SMOLLM_135M,
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": False,
}


def register() -> None:
    """Make `cake_infer` this checkout, wherever it is and whatever is installed; the interpreter is put in front."""
    folder = tempfile.TemporaryDirectory(prefix="cake-infer-check-")
    atexit.register(folder.cleanup)
    (Path(folder.name) / "cake_infer").symlink_to(ROOT, target_is_directory=True)
    sys.path.insert(0, folder.name)


@dataclass(frozen=True)
class Scale:
    """How large everything is: on a GPU the real shapes, in a dry run shapes that a CPU works in a second."""

    dry: bool
    large: dict[str, Any]
    small: dict[str, Any]
    contexts: tuple[int, ...]
    prefills: tuple[int, ...]
    budget: int
    window: int
    chunk: int
    steps: int
    prompts: tuple[int, ...]
    new_tokens: int
    dtype: str
    copied: int  # bytes of the buffer that bandwidth is measured with


GPU = Scale(
    dry=False,
    large=LLAMA_8B,
    small=SMOLLM_135M,
    contexts=(1024, 32768, 131072),
    prefills=(8192, 32768, 131072),
    budget=1024,
    window=32,
    chunk=4096,
    steps=24,
    prompts=(5, 500, 37, 5),
    new_tokens=40,
    dtype="bfloat16",
    copied=4 << 30,
)
DRY = replace(
    GPU,
    dry=True,
    large=TINY,
    small=TINY,
    contexts=(12,),
    prefills=(20, 40),
    budget=8,
    window=4,
    chunk=16,
    steps=1,
    prompts=(3, 20, 3),
    new_tokens=3,
    dtype="float32",
    copied=1 << 16,
)


@dataclass
class Row:
    """One line of the table. ok: whether it is what was asked for; None where it is only told."""

    part: str
    name: str
    value: float | str
    unit: str = ""
    bar: str = ""
    ok: bool | None = None


@dataclass
class Check:
    """A run: its scale, its device, and what it has found."""

    scale: Scale
    model: str | None = None
    rows: list[Row] = field(default_factory=list)
    part: str = ""
    bandwidth: float = math.nan  # bytes a second that a copy reads and writes
    found: dict[str, float] = field(default_factory=dict)

    def tell(self, name: str, value: float | str, unit: str = "", bar: str = "", ok: bool | None = None) -> None:
        """Add a line to the table and say it at once."""
        row = Row(self.part, name, value, unit, bar, ok)
        self.rows.append(row)
        print("  " + line(row), file=sys.stderr, flush=True)

    def measured(self, name: str, value: float, unit: str, bar: str, ok: bool) -> None:
        """A line with a bar on a figure: in a dry run figures mean nothing, so that the bar is not judged."""
        self.tell(name, value, unit, bar, None if self.scale.dry else ok)

    def run(self, part: str, work: Callable[[Check], None]) -> None:
        """One part; what it raises is a line of the table, and the others go on."""
        self.part, started = part, time.perf_counter()
        print(f"== {part}", file=sys.stderr, flush=True)
        try:
            work(self)
        except Exception as error:
            traceback.print_exc()
            self.tell("raised", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", ok=False)
        free()
        self.tell("took", time.perf_counter() - started, "s")

    # -- models and runners -------------------------------------------------------------------------------------------

    @property
    def device(self) -> Any:
        import torch

        return torch.device("cpu" if self.scale.dry else "cuda")

    def config(self, keys: dict[str, Any]) -> Any:
        from cake_infer.models.config import ModelConfig

        return ModelConfig.from_dict({key: value for key, value in keys.items() if value is not None}, where="check")

    def decoder(self, keys: dict[str, Any], dtype: str | None = None, device: Any = None) -> Any:
        from cake_infer.models.weights import random_decoder

        return random_decoder(self.config(keys), device=device or self.device, dtype=dtype or self.scale.dtype)

    def runner(self, decoder: Any, *, step: str = "graph", context: int | None = None, **cache: Any) -> Any:
        """A runner with the Triton kernels; in a dry run its graph is the step uncaptured, in the interpreter."""
        from cake_infer.cache.config import CacheConfig
        from cake_infer.engine.runner import Runner
        from cake_infer.engine.stepper import GraphStep

        options = {"budget": self.scale.budget, "window": self.scale.window}
        config = CacheConfig(**({**options, **cache} if cache.get("policy") != "full" else cache))
        runner = Runner(
            decoder,
            config,
            context=context or 2 * max(self.scale.contexts + self.scale.prefills),
            chunk=self.scale.chunk,
            step="eager" if self.scale.dry else step,
            attention="triton" if decoder.device.type == "cuda" or self.scale.dry else "auto",
        )
        if self.scale.dry and step == "graph":
            runner.step = GraphStep(decoder, runner.attention, runner.make_ahead(), runner.rule)
        return runner


def sync() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def free() -> None:
    """Give back what a part has left."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def allocated(peak: bool = False) -> int:
    import torch

    if not torch.cuda.is_available():
        return 0
    return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever makes the host wait for the whole device, or reads a value of it, raises."""
    import torch

    if not torch.cuda.is_available():
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def generation(**options: Any) -> Any:
    from cake_infer.engine.generation import GenerationConfig, resolve_generation

    return resolve_generation(GenerationConfig(**{"seed": 7, **options}), {})


def random_ids(count: int, vocab: int, seed: int = 0) -> list[int]:
    import random

    chance = random.Random(seed)
    return [chance.randrange(3, vocab) for _ in range(count)]


def line(row: Row) -> str:
    value = row.value
    if not isinstance(value, str):
        value = f"{value:,.4g}" if abs(value) < 100 else f"{value:,.0f}"
    verdict = {None: "", True: "ok", False: "MISSED"}[row.ok]
    return f"{row.name:<52} {value:>12} {row.unit:<8} {row.bar:<22} {verdict}".rstrip()


def report(check: Check, seconds: float, name: str) -> int:
    """Print the table and the line of JSON. Returns the exit status."""
    part = ""
    print(f"{name}, {seconds:.0f} s" + (", dry: figures mean nothing" if check.scale.dry else ""))
    for row in check.rows:
        if row.part != part:
            part = row.part
            print(f"\n{part}")
        print("  " + line(row))
    missed = [f"{row.part}: {row.name}" for row in check.rows if row.ok is False]
    print("\n" + ("missed: " + "; ".join(missed) if missed else "nothing missed"))
    values = {f"{row.part}: {row.name}": row.value for row in check.rows}
    print(
        json.dumps(
            {"bench": "gpu", "case": name, "dry": check.scale.dry, "seconds": round(seconds, 1), "missed": missed}
            | {"values": values}
        )
    )
    return 1 if missed else 0


def use_interpreter() -> None:
    """Before anything imports triton."""
    os.environ["TRITON_INTERPRET"] = "1"
