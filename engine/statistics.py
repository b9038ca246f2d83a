"""The figures of one reply, as a line for people and a dictionary for programs."""

from __future__ import annotations

import math
import resource
import sys
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Statistics:
    """What one reply cost. Times in seconds, sizes in bytes; every field has a neutral default.

    prompt_tokens: tokens that this reply's prefill read, in prefill_s seconds; pieces: in how many pieces, each evicted
        from before the next was read (0 for a text that was read whole).
    kept_tokens, full_tokens: tokens a layer and KV head holds after the prefill on average, and would hold had nothing
        been evicted (earlier turns included); kept_bytes, full_bytes: the same in bytes of keys and values.
    layer_lengths: [L][K] kept tokens after the prefill.
    new_tokens: tokens of the reply; decode_steps: forward passes after the prefill, in decode_s seconds (None: as many
        as new tokens). The reply's first token comes out of the prefill.
    peak_memory: most bytes the process (on a GPU: the device) has held, None if unknown.
    kv_bits: of what is kept outside of the window, None where it is not packed.
    policy: the eviction policy as it describes itself; seed: what the random numbers were made from.
    """

    prompt_tokens: int = 0
    pieces: int = 0
    prefill_s: float = 0.0
    kept_tokens: float = 0
    full_tokens: int = 0
    kept_bytes: int = 0
    full_bytes: int = 0
    new_tokens: int = 0
    decode_s: float = 0.0
    decode_steps: int | None = None
    peak_memory: int | None = None
    load_s: float = 0.0
    layer_lengths: tuple[tuple[int, ...], ...] = ()
    budget: int | None = None
    kv_bits: int | None = None
    policy: str = ""
    seed: int | None = None
    finish_reason: str | None = None

    @property
    def prefill_rate(self) -> float | None:
        """Prompt tokens a second; None if nothing was measured."""
        return _rate(self.prompt_tokens, self.prefill_s)

    @property
    def decode_rate(self) -> float | None:
        """Tokens a second after the first; None if nothing was measured."""
        return _rate(self.new_tokens if self.decode_steps is None else self.decode_steps, self.decode_s)

    @property
    def kept_share(self) -> float | None:
        """Kept of full tokens, 0 to 1; None for an empty cache."""
        return self.kept_tokens / self.full_tokens if self.full_tokens > 0 else None

    def line(self) -> str:
        """One line: prompt and rate | kept of full cache | reply and rate | peak memory | policy."""
        pieces = f" in {self.pieces:,} piece{'s' * (self.pieces != 1)}" if self.pieces else ""
        parts = [f"prompt {self.prompt_tokens:,} tok{pieces}{_per_second(self.prefill_rate)}"]
        if self.kept_share is not None:
            kept, full = _count(self.kept_tokens), f"{self.full_tokens:,}"
            size = f", {self.kv_bits} bits" if self.kv_bits is not None else ""
            size += f", {_sizes(self.kept_bytes, self.full_bytes)}" if self.full_bytes > 0 else ""
            parts.append(f"KV kept {kept} of {full} tok a layer ({_percent(self.kept_share)}){size}")
        parts.append(f"{self.new_tokens:,} tok{_per_second(self.decode_rate)}")
        if self.peak_memory:
            parts.append(f"peak {_size(self.peak_memory)}")
        if self.policy:
            parts.append(self.policy)
        return " | ".join(parts)

    def layers_text(self) -> str:
        """One line a layer: its kept tokens and their share of the full row; heads that differ as lowest-highest."""
        rows = []
        for layer, lengths in enumerate(self.layer_lengths):
            if not lengths:
                continue
            low, high = min(lengths), max(lengths)
            mean = sum(lengths) / len(lengths)
            heads = "" if low == high else f"  (heads {low:,}-{high:,})"
            share = f"  {_percent(mean / self.full_tokens):>6}" if self.full_tokens > 0 else ""
            rows.append(f"layer {layer:>3}  {_count(mean):>9} tok{share}{heads}")
        return "\n".join(rows)

    def as_dict(self) -> dict[str, object]:
        """All fields and the three derived figures, JSON-safe: what cannot be a JSON number is None."""
        values: dict[str, object] = asdict(self)
        values["layer_lengths"] = [list(lengths) for lengths in self.layer_lengths]
        values["prefill_tokens_per_s"] = self.prefill_rate
        values["decode_tokens_per_s"] = self.decode_rate
        values["kept_share"] = self.kept_share
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }


def mean_length(layer_lengths: tuple[tuple[int, ...], ...]) -> float:
    """Mean row length of [L][K] lengths; 0 without rows."""
    rows = [length for layer in layer_lengths for length in layer]
    return sum(rows) / len(rows) if rows else 0.0


def peak_memory_bytes(device: object = "cpu") -> int:
    """Most bytes held so far: by torch on that device for CUDA, else by the whole process (resident set)."""
    if str(device).startswith("cuda"):
        import torch

        return int(torch.cuda.max_memory_allocated(torch.device(str(device))))
    try:  # Linux: getrusage would also count what the process that started this one held when it forked
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError, ValueError):
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def _rate(count: int, seconds: float) -> float | None:
    if count <= 0 or not seconds > 0:
        return None
    rate = count / seconds
    return rate if math.isfinite(rate) else None


def _per_second(rate: float | None) -> str:
    if rate is None:
        return ""
    return f" ({rate:,.0f} tok/s)" if rate >= 100 else f" ({rate:.1f} tok/s)"


def _count(tokens: float) -> str:
    return f"{tokens:,.0f}" if float(tokens).is_integer() or tokens >= 100 else f"{tokens:,.1f}"


def _percent(share: float) -> str:
    return "100%" if share == 1 else f"{100 * share:.1f}%"


_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def _size(nbytes: int) -> str:
    for unit, name in _UNITS:
        if nbytes >= unit:
            return f"{nbytes / unit:.1f} {name}" if name == "GiB" else f"{nbytes / unit:.0f} {name}"
    return f"{nbytes} B"


def _sizes(part: int, whole: int) -> str:
    """Both in the unit of the larger one, unless the smaller would come to next to nothing in it."""
    for unit, name in _UNITS:
        if whole >= unit:
            if 0 < part < unit / 2:
                return f"{_sizes(part, part).partition(' of ')[2]} of {whole / unit:.1f} {name}"
            return f"{part / unit:.1f} of {whole / unit:.1f} {name}"
    return f"{part} of {whole} B"
