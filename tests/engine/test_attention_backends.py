"""Which attention backend is chosen, what is refused and why, and that each computes the same."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import math
import sys
import types

import pytest
import torch
from cake_infer.engine.attention import Sdpa, SlidingMask, choose_attention, decode_attention
from cake_infer.engine.attention import choose as choosing
from cake_infer.engine.attention.choose import Setting
from cake_infer.engine.attention.rows import Rows
from cake_infer.errors import BackendError, OptionError
from torch import Tensor

HALF = frozenset({torch.bfloat16})
GPU = Setting(torch.device("cuda"), HALF, 128)
CPU = Setting(torch.device("cpu"), frozenset({torch.float32}), 64)


def dense(query: Tensor, keys: Tensor, values: Tensor, scale: float, seen: Tensor) -> Tensor:
    """One KV head in float64: queries `[n, D]`, bool seen `[n, columns]`."""
    logits = (query.double() @ keys.double().T * scale).masked_fill(~seen, -math.inf)
    return torch.softmax(logits, -1) @ values.double()


class FakeFlash(types.ModuleType):
    """What flash-attn documents: `[batch, length, heads, head_dim]`, causal aligned to the end, windows by index."""

    def __init__(self) -> None:
        super().__init__("flash_attn")
        self.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
        self.calls: list[str] = []

    def flash_attn_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
        return_attn_probs: bool,
    ) -> tuple[Tensor, Tensor, None]:
        assert return_attn_probs
        self.calls.append("func")
        assert q.dim() == k.dim() == v.dim() == 4
        assert all(t.stride(-1) == 1 for t in (q, k, v))
        assert causal
        out, lse = torch.empty_like(q), torch.empty(q.shape[0], q.shape[2], q.shape[1])
        q_len, kv_len, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
        column, row = torch.arange(kv_len)[None], torch.arange(q_len)[:, None] + kv_len - q_len
        seen = (column <= row) & ((column >= row - window_size[0]) | (window_size[0] < 0))
        for batch in range(q.shape[0]):
            for head in range(q.shape[2]):
                kv = head // group
                logits = q[batch, :, head].double() @ k[batch, :, kv].double().T * softmax_scale
                lse[batch, head] = logits.masked_fill(~seen, -math.inf).logsumexp(-1)
                out[batch, :, head] = dense(q[batch, :, head], k[batch, :, kv], v[batch, :, kv], softmax_scale, seen)
        return out, lse, None

    def flash_attn_with_kvcache(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        cache_seqlens: int,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
    ) -> Tensor:
        k, v = k_cache[:, :cache_seqlens], v_cache[:, :cache_seqlens]
        options = {"softmax_scale": softmax_scale, "causal": causal, "window_size": window_size}
        out, _, _ = self.flash_attn_func(q, k, v, **options, return_attn_probs=True)
        self.calls[-1] = "with_kvcache"
        return out


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """A GPU of compute capability 9.0, and no package but those that a test names here."""
    names: set[str] = set()
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in names else None)
    return names


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch, installed: set[str]) -> FakeFlash:
    """The fake package in the place of the real one, and the backend's module loaded over it."""
    fake = FakeFlash()
    installed.add("flash_attn")
    monkeypatch.setitem(sys.modules, "flash_attn", fake)
    monkeypatch.delitem(sys.modules, "cake_infer.engine.attention.flash", raising=False)
    return fake


@pytest.mark.usefixtures("installed")
def test_without_further_packages_sdpa_runs_anywhere():
    assert choose_attention("auto", GPU).name == "sdpa"
    assert choose_attention("auto", CPU).name == "sdpa"
    assert choose_attention("sdpa", Setting(torch.device("cuda"), HALF, 512, hold=True, sliding=True)).name == "sdpa"


def test_auto_takes_flash_attn_where_it_can_run_and_sdpa_where_it_cannot(flash):
    assert choose_attention("auto", GPU).name == "flash_attn"
    assert choose_attention("auto", Setting(GPU.device, HALF, 128, hold=True)).name == "sdpa"
    assert choose_attention("auto", Setting(GPU.device, frozenset({torch.float32}), 128)).name == "sdpa"


def test_auto_prefers_triton(flash, installed, monkeypatch):
    pytest.importorskip("triton", reason="triton is not installed")
    installed.add("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # kernels that are imported now stay as they are
    assert choose_attention("auto", Setting(GPU.device, HALF, 128, hold=True, sliding=True)).name == "triton"


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        (CPU, "it needs a CUDA device, this is cpu"),
        (Setting(GPU.device, frozenset({torch.float32}), 128), "not in float32"),
        (Setting(GPU.device, frozenset({torch.float16, torch.bfloat16}), 128), "alike, not in bfloat16, float16"),
        (Setting(GPU.device, HALF, 257), "at most 256 elements, this model's have 257"),
        (Setting(GPU.device, HALF, 100), "a multiple of 8 wide, this model's have 100"),
        (Setting(GPU.device, HALF, 128, hold=True), "hold needs the attention weights"),
        (Setting(GPU.device, HALF, 128, sliding=True), "counts kept rows, not positions"),
    ],
)
def test_flash_attn_is_refused_with_the_reason(flash, setting, reason):
    with pytest.raises(BackendError, match=reason) as error:
        choose_attention("flash_attn", setting)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("attention flash_attn cannot run here: ")


def test_flash_attn_may_slide_where_nothing_is_evicted(flash):
    assert (
        choose_attention("flash_attn", Setting(GPU.device, HALF, 128, sliding=True, evicts=False)).name == "flash_attn"
    )


@pytest.mark.parametrize("name", ["flash_attn", "triton"])
def test_a_package_that_is_not_there_or_an_old_gpu_is_refused(monkeypatch, installed, name):
    with pytest.raises(BackendError, match=f"the package {name.replace('_', '-')} is not installed"):
        choose_attention(name, GPU)
    installed.add(name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    with pytest.raises(BackendError, match=r"compute capability 8\.0"):
        choose_attention(name, GPU)


def test_triton_runs_on_a_cpu_only_in_its_interpreter(monkeypatch, installed):
    installed.add("triton")
    assert choosing.refusal("triton", CPU) == "it needs a CUDA device, this is cpu"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choosing.refusal("triton", CPU) is None
    assert choose_attention("auto", CPU).name == "sdpa", "only when it is asked for"


def test_an_unknown_backend_is_refused_with_the_names_there_are():
    with pytest.raises(OptionError, match="'magic': choose one of auto, sdpa, flash_attn, triton"):
        choose_attention("magic", CPU)


def backends(flash: FakeFlash) -> list[object]:
    return [Sdpa(), choosing.make("flash_attn")]


@pytest.mark.parametrize("past", [0, 1, 37])
@pytest.mark.parametrize("sliding", [None, 7])
def test_prefill_is_causal_and_aligned_to_the_end_of_the_keys(flash, past, sliding):
    generator = torch.Generator().manual_seed(past)
    q_len, kv_heads, group, dim = 9, 2, 3, 16
    n = past + q_len
    queries = torch.randn(kv_heads * group, q_len, dim, generator=generator)
    store = torch.randn(2, kv_heads, n + 5, dim, generator=generator)  # views with a stride of their own
    keys, values = store[0, :, :n], store[1, :, :n]
    position = torch.arange(n)
    seen = position[None] <= position[past:, None]
    mask = None
    if sliding is not None:
        seen &= position[None] > position[past:, None] - sliding
        mask = SlidingMask(sliding, position[past:], position[None])
    logits = queries.double() @ keys.repeat_interleave(group, 0).double().transpose(1, 2) * 0.2
    totals = logits.masked_fill(~seen, -math.inf).logsumexp(-1)
    expected = torch.stack([dense(queries[h], keys[h // group], values[h // group], 0.2, seen) for h in range(6)])
    for backend in backends(flash):
        lse = torch.zeros(6, q_len)
        out = backend.prefill(queries, keys, values, scale=0.2, past=past, sliding=mask, lse=lse)
        if sliding is None:
            torch.testing.assert_close(lse.double(), totals, rtol=0, atol=1e-5)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)
    assert flash.calls == ["func"]


@pytest.mark.parametrize("sliding", [None, 7])
def test_decode_over_a_view(flash, sliding):
    generator = torch.Generator().manual_seed(1)
    queries = torch.randn(6, 16, generator=generator)
    keys, values = torch.randn(2, 2, 40, 16, generator=generator)[:, :, :33]
    position = torch.arange(33)
    seen = position[None] > 32 - (sliding or 99)
    mask = None if sliding is None else SlidingMask(sliding, torch.tensor([32]), position.expand(2, 33))
    expected = torch.cat([dense(queries[h : h + 1], keys[h // 3], values[h // 3], 0.2, seen) for h in range(6)])
    for backend in backends(flash):
        out, weights = backend.decode(queries, keys, values, scale=0.2, sliding=mask)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)
        assert (weights is None) == (backend.name == "flash_attn")
    assert flash.calls == ["with_kvcache"]


def test_ragged_rows_equal_float64_row_by_row(flash):
    generator = torch.Generator().manual_seed(2)
    lengths = torch.tensor([[5, 0], [-1, 12]], dtype=torch.int32)
    offset = torch.tensor([[20, 0], [30, 2]], dtype=torch.int32)
    keys, values = torch.full((2, 40, 16), math.nan)
    for row in range(4):
        span = slice(int(offset.view(-1)[row]), int(offset.view(-1)[row]) + int(lengths.view(-1)[row]) + 1)
        for table in (keys, values):
            table[span] = torch.randn(max(0, span.stop - span.start), 16, generator=generator)
    rows = Rows(keys, values, torch.arange(40, dtype=torch.int32), offset, lengths, torch.tensor([50, 60]), 13)
    queries = torch.randn(2, 6, 16, generator=generator)
    for backend in backends(flash):
        out, _ = backend.attend_rows(queries, rows, scale=0.2)
        for sequence in range(2):
            for head in range(6):
                first, length = int(offset[sequence, head // 3]), int(lengths[sequence, head // 3])
                span = slice(first, first + length + 1)
                seen = torch.ones(1, max(0, length + 1), dtype=torch.bool)
                expected = torch.zeros(16, dtype=torch.float64)
                if length >= 0:
                    expected = dense(queries[sequence, head][None], keys[span], values[span], 0.2, seen)[0]
                torch.testing.assert_close(out[sequence, head].double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("past", "q_len"), [(70, 80), (70, 20), (128, 5), (1, 1), (63, 1), (130, 62), (0, 9)])
def test_a_chunk_behind_kept_rows_of_any_length_in_every_precision(dtype, past, q_len):
    """Widths of blocks are rounded where that saves torch a kernel: what lies behind them must not count."""
    generator = torch.Generator().manual_seed(past + q_len)
    queries = torch.randn(6, q_len, 16, generator=generator).to(dtype)
    keys, values = (torch.randn(2, past + q_len, 16, generator=generator).to(dtype) for _ in range(2))
    lse = torch.empty(6, q_len)
    out = Sdpa().prefill(queries, keys, values, scale=0.25, past=past, sliding=None, lse=lse)
    wide = [table.double().repeat_interleave(3, 0) for table in (keys, values)]
    logits = queries.double() @ wide[0].transpose(1, 2) * 0.25
    hidden = torch.arange(past + q_len)[None] > past + torch.arange(q_len)[:, None]
    logits.masked_fill_(hidden, -torch.inf)
    near = {"rtol": 0, "atol": 1e-5 if dtype == torch.float32 else 0.03}
    torch.testing.assert_close(out.double(), torch.softmax(logits, -1) @ wide[1], **near)
    torch.testing.assert_close(lse.double(), torch.logsumexp(logits, -1), **near)


def test_in_half_precision_the_widths_of_key_blocks_are_few(monkeypatch):
    """torch keeps a kernel for each of them, for good."""
    widths, few = set(), torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def watch(queries, keys, *arguments, **options):
        if queries.shape[2] != keys.shape[2]:  # the causal block has the chunk's width
            widths.add(keys.shape[2] % 512)
        return few(queries, keys, *arguments, **options)

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", watch)
    for past in range(1, 600, 7):
        for q_len in (64, 3):
            queries = torch.randn(2, q_len, 16).bfloat16()
            keys = torch.randn(2, past + q_len, 16).bfloat16()
            Sdpa().prefill(queries, keys, keys, scale=0.25, past=past)
    assert len(widths) <= 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_token_in_half_precision_is_worked_in_fp32(dtype):
    """In half precision torch compiles a product for every length of a row and keeps it, a megabyte each."""
    queries, keys, values = (
        torch.randn(6, 16).to(dtype),
        torch.randn(2, 77, 16).to(dtype),
        torch.randn(2, 77, 16).to(dtype),
    )
    hidden = torch.zeros(2, 77, dtype=torch.bool)
    hidden[1, 30:] = True
    out, weights = decode_attention(queries, keys, values, scale=0.4, hidden=hidden)
    logits = queries.double().view(2, 3, 16) @ keys.double().transpose(1, 2) * 0.4
    expected = logits.masked_fill(hidden[:, None], -torch.inf).softmax(-1)
    torch.testing.assert_close(weights.double(), expected, rtol=0, atol=1e-6)
    assert out.dtype == dtype
    # rounded once, at the end: at most the last bit differs from the exact result's
    exact = (expected @ values.double()).reshape(6, 16).to(dtype)
    torch.testing.assert_close(out, exact, rtol=torch.finfo(dtype).eps, atol=1e-6)
