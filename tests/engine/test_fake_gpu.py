"""What runs on a GPU, on one that is not there: no tensor of the host among those of the device, no wait in decoding,
no array of tokens by tokens, and nothing in a captured step that a capture forbids."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from pathlib import Path

import pytest
import torch
from cake_infer.cache.config import CacheConfig
from cake_infer.cache.indicators import critical
from cake_infer.cache.policies import POLICIES
from cake_infer.engine.batch import Batch
from cake_infer.engine.generation import GenerationConfig, resolve_generation
from cake_infer.engine.runner import Runner
from cake_infer.engine.sequence import Sequence
from cake_infer.engine.stepper import GraphStep
from cake_infer.models.config import ModelConfig
from cake_infer.models.packed import as_quantised
from cake_infer.models.weights import random_decoder

FILE = Path(__file__).parent / "fake_gpu.py"
TINY = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = {
    "llama": {},
    "mistral, sliding": {"model_type": "mistral", "sliding_window": 16},
    "qwen3": {"model_type": "qwen3", "use_sliding_window": False, "attention_bias": False},
    "gemma": {"model_type": "gemma", "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
}
CACHES = {
    "grow": {"policy": "cake"},
    "hold": {"policy": "cake", "decode_policy": "hold"},
    "full": {"policy": "full"},
    "packed": {"policy": "cake", "kv_bits": 4},
}
OPTIONS = {
    "greedy": {},
    "filtered": {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
}


def _loaded():
    spec = importlib.util.spec_from_file_location("fake_gpu", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


fake = _loaded()


@pytest.fixture
def watch(monkeypatch):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        with fake.fake_gpu(monkeypatch) as found:
            yield found


def make_runner(keys=None, *, dtype="bfloat16", quant=None, context=1000, chunk=32, **cache):
    config = ModelConfig.from_dict({**TINY, **(keys or {})}, where="test")
    decoder = random_decoder(config, device=fake.GPU, dtype=dtype)
    decoder = as_quantised(decoder, quant) if quant else decoder
    options = cache if cache.get("policy") == "full" else {"budget": 24, "window": 8, **cache}
    return Runner(decoder, CacheConfig(**options), context=context, chunk=chunk, separators=lambda: frozenset({5}))


def plan(new_tokens, **options):
    return resolve_generation(GenerationConfig(seed=7, max_new_tokens=new_tokens, **options), {})


def read(runner, sequence, count, new_tokens, **options):
    """A turn of so many tokens; stops behind the first token of the reply."""
    prompt = [4 + i % 50 for i in range(count)]
    stream = runner.generate(sequence, prompt, plan(new_tokens, **options), conversation=True)
    next(stream)
    return stream


def decode(watch, stream):
    """The other tokens, whose number it returns: none of them may wait for the device."""
    watch.waits.clear()
    watch.calls.clear()
    watch.waiting = False
    try:
        return sum(1 for _ in stream)
    finally:
        watch.waiting = True


@pytest.mark.parametrize(
    ("family", "cache"),
    [*(("llama", cache) for cache in CACHES), *((family, "grow") for family in FAMILIES if family != "llama")],
)
def test_a_conversation_stays_on_the_device_and_decoding_waits_for_nothing(watch, family, cache):
    runner = make_runner(FAMILIES[family], **CACHES[cache])
    assert isinstance(runner.step, GraphStep)
    assert runner.attention.name == "triton"
    sequence = Sequence()
    for count in (40, 12):  # a further turn, behind rows that are held
        stream = read(runner, sequence, count, 36)
        assert decode(watch, stream) == 35
        assert watch.calls["graph"] == 35
        saved = runner.checkpoint(sequence)
    runner.restore(sequence, saved)
    assert runner.ahead.captures <= 2


@pytest.mark.parametrize(("dtype", "options"), [*zip(["float32", "float16", "bfloat16"], OPTIONS, strict=True)])
def test_every_choice_of_tokens_can_be_captured(watch, dtype, options):
    runner = make_runner(dtype=dtype, **CACHES["hold"])
    assert decode(watch, read(runner, Sequence(), 40, 9, **OPTIONS[options])) == 8
    assert watch.calls["graph"] == 8


def test_int8_products_can_be_captured(watch):
    runner = make_runner(quant="int8", **CACHES["grow"])
    assert decode(watch, read(runner, Sequence(), 40, 9)) == 8
    assert runner.decoder.int8_products
    assert watch.calls["graph"] == 8


@pytest.mark.parametrize("cache", ["hold", "packed"])
def test_a_batch_waits_for_the_device_only_while_somebody_is_read(watch, cache):
    runner = make_runner(**CACHES[cache])
    with Batch(runner) as batch:
        for i in range(2):
            batch.join(Sequence(), [4 + j % 50 for j in range(20 + 10 * i)], plan(6 + 36 * i, temperature=0.5 * i))
        batch.read()
        steps = 0
        while len(batch):
            watch.waiting = any(member.picker is None for member in batch._members)
            batch.step()
            watch.waiting = True
            steps += 1
            if steps == 3:
                batch.join(Sequence(), list(range(4, 34)), plan(5))
    assert steps > 36


@pytest.mark.parametrize("turns", [0, 1])
def test_reading_with_cake_waits_once_for_each_layer(watch, turns):
    waits = []
    for layers in (2, 4):
        runner = make_runner({"num_hidden_layers": layers}, **CACHES["grow"])
        ids = [4 + i % 50 for i in range(70)]
        sequence = Sequence()
        for _ in range(turns):
            for _ in read(runner, sequence, 40, 3):
                pass
        limit = runner.prepare(sequence, len(ids), 5)
        watch.waits.clear()
        runner.feed(sequence, ids, limit)
        waits.append(watch.waits["a number is read"])
        assert watch.waits.total() - watch.waits["a number is read"] <= 2, "ids and frequencies of a prompt"
    assert waits[1] - waits[0] == 2, "dispersion, shift and whether the scores are numbers, in one copy"


def test_a_long_prompt_makes_no_array_of_tokens_by_tokens(watch):
    keys = {"num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 64, "max_position_embeddings": 1 << 20}
    for family in ({}, {"model_type": "mistral", "sliding_window": 256}):
        peaks = []
        for count in (1024, 4096):
            runner = make_runner({**keys, **family}, context=1 << 18, chunk=256, policy="cake", budget=128, window=32)
            sequence = Sequence()
            limit = runner.prepare(sequence, count, 5)
            watch.peak = base = watch.alive
            runner.feed(sequence, [5] * count, limit)
            peaks.append(watch.peak - base)
            del runner, sequence
        assert peaks[1] < 4.5 * peaks[0], "in proportion to the tokens"
        assert peaks[1] < 4096 * 4096, "bytes for each token, however many there are"


# gate is made of a file, and the shapes of nexus hang on numbers that are not there
@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy not in ("full", "gate", "nexus")])
def test_every_policy_reads_a_conversation_on_the_device(watch, policy, monkeypatch):
    # ranks, which are numbers that are not there, come to the host there
    monkeypatch.setattr(critical, "two_stage_places", lambda first, second, share: list(range(len(first))))
    runner, sequence = make_runner(policy=policy), Sequence()
    for count in (40, 6):
        for _ in read(runner, sequence, count, 3):
            pass
    assert sequence.total == 40 + 6 + 2 * 2


def test_what_is_watched_is_seen(watch):
    table, host = torch.zeros(4, 8, device=fake.GPU), torch.ones(8)
    with pytest.raises(RuntimeError):  # torch's own class of it has had several names
        table + host
    watch.waiting = False
    for wrong in (
        lambda: table.sum().item(),
        lambda: table[table > 0],
        lambda: table.nonzero(),
        lambda: host.to(fake.GPU),
        lambda: host.to(fake.GPU, non_blocking=True),
        lambda: torch.tensor([1, 2], device=fake.GPU),
        lambda: table[0].__setitem__(1, 3.0),
    ):
        with pytest.raises(fake.Refused):
            wrong()
    host.pin_memory().to(fake.GPU, non_blocking=True)
    table[0, 1].fill_(3.0)
    watch.waiting = watch.capturing = True
    with pytest.raises(fake.Refused):
        host.pin_memory().to(fake.GPU, non_blocking=True)
    watch.capturing = False
    before = watch.alive
    large = torch.zeros(1 << 20, dtype=torch.uint8, device=fake.GPU)
    assert watch.alive - before == 1 << 20
    del large
    assert watch.alive == before
