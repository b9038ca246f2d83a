"""What the parts of the check share: the device, models and runners, and where they say what they have found."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shapes import Scale
from table import Row

ROOT = Path(__file__).resolve().parents[2]
WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize")  # calls that wait for the device


def register() -> None:
    """Make `cake_infer` this checkout, wherever it is and whatever is installed; it is put in front of the path."""
    folder = tempfile.TemporaryDirectory(prefix="cake-infer-check-")
    atexit.register(folder.cleanup)
    (Path(folder.name) / "cake_infer").symlink_to(ROOT, target_is_directory=True)
    sys.path.insert(0, folder.name)


def use_interpreter(wanted: bool) -> None:
    """Run Triton's kernels on a CPU, or not even where the environment says so: before anything imports triton."""
    os.environ["TRITON_INTERPRET"] = str(int(wanted))


@dataclass
class Check:
    """A run of some parts: its scale, its device, and what it has found.

    found: figures that other parts need, by name. tell_row: called with every row; raised: whether a part has raised.
    """

    scale: Scale
    model: str | None = None
    found: dict[str, float] = field(default_factory=dict)
    tell_row: Callable[[Row], None] = lambda row: None
    part: str = ""

    def tell(self, name: str, value: float | str, unit: str = "", bar: str = "", ok: bool | None = None) -> None:
        """Add a line to the table."""
        self.tell_row(Row(self.part, name, value, unit, bar, None if ok is None else bool(ok)))

    def measured(self, name: str, value: float | str, unit: str, bar: str, ok: bool) -> None:
        """A line with a bar on a figure: in a dry run figures mean nothing, so that the bar is not judged."""
        self.tell(name, value, unit, bar, None if self.scale.dry else ok)

    def same(self, name: str, ok: bool) -> None:
        """A line that says whether two things agree, as they must, in a dry run too."""
        self.tell(name, str(bool(ok)), ok=ok)

    @contextlib.contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """What raises inside, running out of memory above all, is a line of the table, and what follows goes on.

        Raises where the device answers no more: then nothing that follows in this process would be true.
        """
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.tell(name, _said(error), ok=False)
            del error
            free()
            if not healthy():
                raise

    def run(self, part: str, work: Callable[[Check], None]) -> bool:
        """One part. Returns whether the next one may run in this process."""
        self.part, started = part, time.perf_counter()
        try:
            work(self)
        except Exception as error:
            traceback.print_exc()
            self.tell("raised", _said(error), ok=False)
        free()
        self.tell("took", time.perf_counter() - started, "s")
        return healthy()

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

    def runner(
        self, decoder: Any, *, step: str = "graph", attention: str | None = None, chunk: int | None = None, **cache: Any
    ) -> Any:
        """A runner with the Triton kernels; in a dry run its graph is the step uncaptured, in the interpreter."""
        from cake_infer.cache.config import CacheConfig
        from cake_infer.engine.runner import Runner

        options = {"budget": self.scale.budget, "window": self.scale.window, **cache}
        if cache.get("policy") == "full":  # refused where it has no effect
            del options["budget"], options["window"]
        config = CacheConfig(**options)
        kernels = "triton" if decoder.device.type == "cuda" or self.scale.dry else "auto"
        runner = Runner(
            decoder,
            config,
            context=2 * max(self.scale.contexts + self.scale.prefills),
            chunk=chunk or self.scale.chunk,
            step="eager" if self.scale.dry else step,
            attention=attention or kernels,
        )
        if self.scale.dry and step == "graph":
            graph_in_dry_run(runner)
        return runner


def graph_in_dry_run(runner: Any) -> None:
    """Let a runner on a CPU make its steps as a GPU's graph does, with nothing captured."""
    from cake_infer.engine.stepper import GraphStep

    runner.step = GraphStep(runner.decoder, runner.attention, runner.make_ahead(), runner.rule)


def _said(error: BaseException) -> str:
    """The error's type and first line, short enough for a table."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:120]


def sync() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def healthy() -> bool:
    """Whether the device still answers: after an illegal access it never does again in this process."""
    try:
        sync()
    except Exception:
        return False
    return True


def free() -> None:
    """Give back what a part has left."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        with contextlib.suppress(RuntimeError):  # of a device that answers no more
            torch.cuda.empty_cache()


def allocated(peak: bool = False) -> int:
    import torch

    if not torch.cuda.is_available():
        return 0
    return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever makes the host wait for the whole device, or for a stream, or reads a value of the device, raises.

    torch's own mode sees reads and copies that are not pinned; calls that wait and say so are caught by name.
    """
    import torch

    if not torch.cuda.is_available():
        yield
        return

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("the loop waits for the device")

    kept = torch.cuda.synchronize, torch.cuda.Stream.synchronize
    torch.cuda.set_sync_debug_mode("error")
    torch.cuda.synchronize, torch.cuda.Stream.synchronize = refuse, refuse
    try:
        yield
    finally:
        torch.cuda.synchronize, torch.cuda.Stream.synchronize = kept
        torch.cuda.set_sync_debug_mode("default")


@contextlib.contextmanager
def calls(check: Check) -> Iterator[Callable[..., int]]:
    """What is asked of the device inside, by the profiler. Gives a function that counts, behind it, by how names of
    calls begin; one call that waits for the device at the end is in it."""
    import torch

    activities = [torch.profiler.ProfilerActivity.CPU]
    if check.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    counts: dict[str, int] = {}
    with torch.profiler.profile(activities=activities) as profile:
        yield lambda *names: sum(count for name, count in counts.items() if name.startswith(names))
        sync()
    counts |= {event.key: event.count for event in profile.key_averages()}


def generation(**options: Any) -> Any:
    from cake_infer.engine.generation import GenerationConfig, resolve_generation

    return resolve_generation(GenerationConfig(**{"seed": 7, **options}), {})


def random_ids(count: int, vocab: int, seed: int = 0) -> list[int]:
    import random

    chance = random.Random(seed)
    return [chance.randrange(3, vocab) for _ in range(count)]


def reply_ids(runner: Any, prompt: list[int], plan: Any) -> list[int]:
    """The ids of a reply to one prompt, alone."""
    from cake_infer.engine.sequence import Sequence

    return [token.id for token in runner.generate(Sequence(), prompt, plan)]
