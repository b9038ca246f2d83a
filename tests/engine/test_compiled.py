"""The compiled decode step and plain torch are the same function, for every family, format and shape of rows."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cake_infer import Engine
from cake_infer.cache.config import CacheConfig
from cake_infer.engine import decode
from cake_infer.engine.compiled import CompiledStep
from cake_infer.engine.generation import GenerationConfig, resolve_generation
from cake_infer.engine.runner import Runner
from cake_infer.engine.sequence import Sequence
from cake_infer.engine.team import Team
from cake_infer.errors import BackendError
from cake_infer.models.config import read_config
from cake_infer.models.packed import as_quantised
from cake_infer.models.weights import load_decoder

pytest.importorskip("numba", reason="the compiled step needs the extra cpu")

WINDOW, PROMPT, STEPS = 8, 90, 40
FAMILIES = {
    "llama": {},
    "llama with every bias": {"attention_bias": True, "mlp_bias": True},
    "llama, untied, odd sizes": {"hidden_size": 36, "intermediate_size": 50, "vocab_size": 317, "head_dim": 10},
    "llama, heads of whole vectors": {"head_dim": 32, "num_attention_heads": 6, "hidden_size": 64},
    "mistral, sliding, whole vectors": {
        "model_type": "mistral",
        "sliding_window": 24,
        "head_dim": 32,
        "num_attention_heads": 6,
        "hidden_size": 64,
    },
    "llama without groups": {"num_key_value_heads": 4},
    "llama with groups of 5": {"num_attention_heads": 5, "num_key_value_heads": 1},
    "llama, long context": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    "mistral": {"model_type": "mistral"},
    "mistral, sliding": {"model_type": "mistral", "sliding_window": 24},
    "qwen2": {"model_type": "qwen2"},
    "qwen2, half sliding": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 16,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3"},
    "gemma": {"model_type": "gemma"},
    "gelu": {"model_type": "gemma", "hidden_act": "gelu", "hidden_activation": "gelu"},
}


def runner_of(decoder, budget=24, kv_dtype=torch.float32, step="auto", **options):
    cache, context = CacheConfig(budget=budget, window=WINDOW, **options), decoder.config.max_position_embeddings
    return Runner(decoder, cache, context=context, chunk=64, kv_dtype=kv_dtype, step=step)


@torch.inference_mode()
def decoded(decoder, ids, new, *, compiled, kv_dtype=torch.float32, threads=2, cut=None, prepared=None, **options):
    """Logits of each step, the positions in every row afterwards (as they lie), and the ring of queries."""
    runner = runner_of(decoder, kv_dtype=kv_dtype, **options)
    sequence = Sequence()
    runner.feed(sequence, ids, runner.prepare(sequence, len(ids), len(new) + 1))
    arena = runner.tenancy.arena
    if cut is not None:
        cut(arena)
    bits = options.get("kv_bits")
    step = CompiledStep(decoder, kv_dtype, threads, kv_bits=bits) if compiled else partial(decode.step, decoder)
    logits = torch.stack([step(arena, sequence, token, window=WINDOW).clone() for token in new])
    rows = [arena.row(layer, head) for layer, head in np.ndindex(*arena.length.shape)]
    return logits, [row[2].tolist() for row in rows], [row[0].float() for row in rows], sequence.ring.copy()


@pytest.fixture
def tiny(tmp_path, write_checkpoint):
    def make(**overrides):
        folder = write_checkpoint(tmp_path / "model", **overrides)
        return load_decoder(folder, read_config(folder))

    return make


@pytest.mark.parametrize("decode_policy", ["grow", "hold"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_agrees_with_torch(tiny, random_ids, family, decode_policy):
    decoder = tiny(**FAMILIES[family])
    ids, new = random_ids(PROMPT), random_ids(STEPS, seed=1)
    slow = decoded(decoder, ids, new, compiled=False, decode_policy=decode_policy)
    fast = decoded(decoder, ids, new, compiled=True, decode_policy=decode_policy)
    scale = max(1.0, float(slow[0].abs().max()) / 10)
    torch.testing.assert_close(fast[0], slow[0], rtol=0, atol=1e-4 * scale)
    assert fast[1] == slow[1], "another slot was written or given up"
    torch.testing.assert_close(fast[3], slow[3], rtol=0, atol=1e-4)


def test_rows_of_unequal_lengths_agree_with_torch(tiny, random_ids):
    decoder = tiny(num_attention_heads=6, num_key_value_heads=3, hidden_size=48)

    def cut(arena):
        generator = np.random.default_rng(0)
        for layer, head in np.ndindex(*arena.length.shape):
            arena.length[layer, head] -= generator.integers(0, arena.length[layer, head] - WINDOW + 1)
        assert len(np.unique(arena.length)) > 3

    ids, new = random_ids(PROMPT), random_ids(STEPS, seed=1)
    slow = decoded(decoder, ids, new, compiled=False, cut=cut)
    fast = decoded(decoder, ids, new, compiled=True, cut=cut)
    torch.testing.assert_close(fast[0], slow[0], rtol=0, atol=1e-4)
    assert fast[1] == slow[1]


@pytest.mark.parametrize("prompt", [1, 63, 64, 65, 1023, 1100])
def test_rows_at_the_borders_of_pieces_agree_with_torch(tiny, random_ids, prompt):
    decoder = tiny()
    ids, new = random_ids(prompt), random_ids(4, seed=1)
    slow = decoded(decoder, ids, new, compiled=False, budget=4096)
    fast = decoded(decoder, ids, new, compiled=True, budget=4096)
    torch.testing.assert_close(fast[0], slow[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("weights", ["bfloat16", "int8", "int4"])
def test_narrow_weights_and_rows_agree_with_torch(tiny, random_ids, weights):
    decoder = tiny(dtype=torch.bfloat16, head_dim=32, num_attention_heads=6, hidden_size=64)
    if weights != "bfloat16":
        decoder = as_quantised(decoder, weights)
    ids, new = random_ids(PROMPT), random_ids(STEPS, seed=1)
    slow = decoded(decoder, ids, new, compiled=False, kv_dtype=torch.bfloat16, policy="cake")
    fast = decoded(decoder, ids, new, compiled=True, kv_dtype=torch.bfloat16, policy="cake")
    # a rounding of a stored key may fall to the other side; each is 2^-9 of a number
    for kept_fast, kept_slow in zip(fast[2], slow[2], strict=True):
        torch.testing.assert_close(kept_fast, kept_slow, rtol=2**-7, atol=1e-4)
    torch.testing.assert_close(fast[0][0], slow[0][0], rtol=0, atol=1e-3)
    torch.testing.assert_close(fast[0], slow[0], rtol=0, atol=5e-2)
    assert fast[1] == slow[1]


@pytest.mark.parametrize(
    ("bits", "options"),
    [
        (8, {"head_dim": 32, "num_attention_heads": 6, "hidden_size": 64}),
        (4, {"model_type": "mistral", "sliding_window": 48, "head_dim": 64}),
        (2, {"head_dim": 16}),
    ],
)
def test_packed_rows_agree_with_torch(tiny, random_ids, bits, options):
    """Rows of several pieces, and enough steps that newcomers are packed too; one thread and two give the same bits."""
    decoder = tiny(**options)
    ids, new = random_ids(500), random_ids(STEPS, seed=1)
    packed = {"policy": "snapkv", "kv_bits": bits, "budget": 300}
    slow = decoded(decoder, ids, new, compiled=False, **packed)
    fast = decoded(decoder, ids, new, compiled=True, **packed)
    scale = max(1.0, float(slow[0].abs().max()) / 10)
    # a newcomer's key that is rounded before it is packed may fall to the next level, of which there are few
    torch.testing.assert_close(fast[0][:20], slow[0][:20], rtol=0, atol=1e-4 * scale)
    torch.testing.assert_close(fast[0], slow[0], rtol=0, atol=2e-2 * scale)
    assert fast[1] == slow[1]
    alone = decoded(decoder, ids, new, compiled=True, threads=1, **packed)
    assert torch.equal(alone[0], fast[0])


def test_what_has_no_form_for_packed_rows_and_what_threads_are_too_many_is_said(tiny, caplog):
    decoder = tiny(head_dim=10, hidden_size=36)
    with pytest.raises(BackendError, match="packed rows of heads of 10 numbers"):
        CompiledStep(decoder, torch.float32, 1, kv_bits=4)
    with caplog.at_level("WARNING"):
        step = CompiledStep(decoder, torch.float32, (os.cpu_count() or 1) + 3)
    cores = len(os.sched_getaffinity(0))
    assert step.threads == cores
    assert f"decoding uses {cores} threads, one for each core: {(os.cpu_count() or 1) + 3} would wait" in caplog.text


def test_no_team_is_larger_than_the_cores_that_this_process_may_use(tiny, caplog, monkeypatch):
    from cake_infer.engine.short import make_short_pieces
    from cake_infer.engine.window import make_window_pass

    decoder = tiny()
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {5}, raising=False)
    with caplog.at_level("WARNING"):
        step = CompiledStep(decoder, torch.float32, 2)
    assert (step.threads, step._team.size) == (1, 1)
    assert "decoding uses 1 threads, one for each core: 2 would wait" in caplog.text
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(3)), raising=False)
    assert CompiledStep(decoder, torch.float32, 8)._team.size == 3
    assert make_window_pass(8)._team.size == 3
    short = make_short_pieces(decoder, 8, torch.float32)
    assert short is None or short._team.size == 3


def test_a_hold_rule_is_refused_before_a_weight_is_read(tmp_path, write_checkpoint):
    folder = write_checkpoint(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(BackendError, match=r"step compiled holds by attention, .*: leave the option step out"):
        Engine.load(folder, decode_policy="hold", hold_by="tova", step="compiled", device="cpu")


@pytest.mark.parametrize("decode_policy", ["grow", "hold"])
def test_the_number_of_threads_changes_no_bit(tiny, random_ids, decode_policy):
    decoder = tiny(num_attention_heads=6, num_key_value_heads=3, hidden_size=48, vocab_size=317)
    ids, new = random_ids(700), random_ids(12, seed=1)
    one = decoded(decoder, ids, new, compiled=True, threads=1, budget=400, decode_policy=decode_policy)
    two = decoded(decoder, ids, new, compiled=True, threads=2, budget=400, decode_policy=decode_policy)
    assert torch.equal(one[0], two[0])
    assert one[1] == two[1]


def test_an_unwritten_slot_is_never_read(tiny, random_ids, poison):
    decoder = tiny()
    ids, new = random_ids(PROMPT), random_ids(STEPS, seed=1)
    clean = decoded(decoder, ids, new, compiled=True)
    assert torch.equal(decoded(decoder, ids, new, compiled=True, cut=poison)[0], clean[0])


def test_a_format_without_a_kernel_says_so(tiny):
    with pytest.raises(BackendError, match="float16"):
        CompiledStep(tiny(dtype=torch.float16), torch.float32, 1)
    with pytest.raises(BackendError, match="float16"):
        CompiledStep(tiny(), torch.float16, 1)


def test_a_team_runs_every_member_once_and_can_be_interrupted_on_the_way_in():
    seen = []
    team = Team(3)
    team.run(lambda number, counter, text: seen.append((number, text)), "a")
    assert sorted(seen) == [(0, "a"), (1, "a"), (2, "a")]
    left = threading.Event()

    def breaks(number, counter):
        if number == 0:
            raise KeyboardInterrupt
        while not counter[1]:  # the others wait for the first until the call is given up
            pass
        left.set()

    with pytest.raises(KeyboardInterrupt):
        team.run(breaks)
    assert left.is_set()
    team.run(lambda number, counter: seen.append(number))
    assert sorted(seen[3:]) == [0, 1, 2]


def test_the_plain_step_stands_in_where_numba_is_missing(tiny, monkeypatch, caplog):
    from cake_infer.engine import stepper

    def missing(*_, **__):
        raise BackendError("numba is not installed (pip install 'cake-infer[cpu]')")

    monkeypatch.setattr("cake_infer.engine.compiled.CompiledStep", missing)
    decoder = tiny()
    with pytest.raises(BackendError, match="numba"):
        stepper.make_step(decoder, torch.float32, "compiled", 1)
    with caplog.at_level("WARNING"):
        step = stepper.make_step(decoder, torch.float32, "auto", 1)
    assert isinstance(step, stepper.EagerStep)
    assert "plain torch" in caplog.text
    assert "cake-infer[cpu]" in caplog.text


class SlowCompiler:
    """In the place of the compiled module: `compile` waits to be released."""

    def __init__(self):
        self.release, self.signatures = threading.Event(), []
        self.decode_step = SimpleNamespace(compile=self.compile)

    def compile(self, signature):
        self.signatures.append(signature)
        self.release.wait(20)


def prepared(decoder, random_ids):
    """A compiled step with a slow compiler, and what its `prepare` takes."""
    runner, sequence = runner_of(decoder), Sequence()
    with torch.inference_mode():
        runner.feed(sequence, random_ids(20), runner.prepare(sequence, 20, 4))
    step = CompiledStep(decoder, torch.float32, 1)
    step._step = SlowCompiler()
    return step, (runner.tenancy.arena, sequence)


def test_a_compilation_can_be_left_at_once_and_is_the_same_one_afterwards(
    tiny, random_ids, caplog, monkeypatch, tmp_path
):
    monkeypatch.setattr("cake_infer.engine.kernels.cache_folder", lambda: tmp_path)
    step, arguments = prepared(tiny(), random_ids)

    def leave():
        raise KeyboardInterrupt

    with caplog.at_level("INFO"), pytest.raises(KeyboardInterrupt):
        step.prepare(*arguments, window=WINDOW, on_wait=leave)
    waits = []

    def release():
        waits.append(1)
        step._step.release.set()

    with caplog.at_level("INFO"):
        step.prepare(*arguments, window=WINDOW, on_wait=release)
    assert waits
    assert len(step._step.signatures) == 1, "the second reply compiled again"
    assert caplog.text.count("compiling the") == 1


@pytest.mark.parametrize("kept", [True, False])
def test_the_notice_names_formats_in_words_and_promises_what_holds(
    tiny, random_ids, caplog, monkeypatch, tmp_path, kept
):
    monkeypatch.setenv("CAKE_INFER_HOME", str(tmp_path / "home"))
    folder = tmp_path / "home" / "kernels" / "x" if kept else tmp_path / "elsewhere"
    monkeypatch.setattr("cake_infer.engine.kernels.cache_folder", lambda: folder)
    step, arguments = prepared(tiny(dtype=torch.bfloat16), random_ids)
    step._step.release.set()
    with caplog.at_level("INFO"):
        step.prepare(*arguments, window=WINDOW)
    assert "for bfloat16 weights, float32 keys and values" in caplog.text
    assert ("once for this machine" in caplog.text) == kept
    assert "uint" not in caplog.text


def test_ctrl_c_in_a_compilation_ends_the_command(tmp_path, write_checkpoint):
    config = write_checkpoint(tmp_path / "model") / "config.json"
    command = [sys.executable, "-m", "cake_infer", "--random-weights", str(config), "--prompt-tokens", "20"]
    environment = {**os.environ, "CAKE_INFER_HOME": str(tmp_path / "home")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        while b"compiling" not in (line := process.stderr.readline()):
            assert line, "the command ended before it compiled"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, b"", b"")
    assert not list((tmp_path / "home").rglob("*.done")), "it was waited for, 10 s and more"


@pytest.mark.parametrize("at_hand", [True, False])
def test_the_first_token_waits_for_a_compilation_but_not_for_a_kernel_that_is_kept(
    tiny, random_ids, monkeypatch, at_hand
):
    runner, events = runner_of(tiny(), step="eager"), []
    monkeypatch.setattr(type(runner.step), "at_hand", at_hand)
    monkeypatch.setattr(type(runner.step), "prepare", lambda *_, **__: events.append("prepared"))
    generation = resolve_generation(GenerationConfig(max_new_tokens=3, temperature=0.0), {})
    for token in runner.generate(Sequence(), random_ids(20), generation):
        events.append(token.id)
    assert len(events) == 4
    assert events.index("prepared") == int(at_hand)


def test_whether_a_kernel_is_kept_is_known_without_numba():
    code = (
        "import sys; from cake_infer.engine.kernels import kernels_cached; kernels_cached('x');"
        "sys.exit('numba' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
