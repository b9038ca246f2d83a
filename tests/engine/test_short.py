"""Short pieces in matrix tiles give what the formulas give, and a text reads the same with and without them."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import replace

import pytest
import torch
from cake_infer import Engine
from cake_infer.cache.config import CacheConfig
from cake_infer.cache.staged import Staged
from cake_infer.engine import short as short_module
from cake_infer.engine.batch import Batch
from cake_infer.engine.generation import GenerationConfig, resolve_generation
from cake_infer.engine.kernels.processor import has_tiles
from cake_infer.engine.runner import Runner
from cake_infer.engine.sequence import Sequence
from cake_infer.engine.short import ShortPieces, make_short_pieces, most_tokens
from cake_infer.errors import BackendError
from cake_infer.models.config import read_config
from cake_infer.models.packed import as_quantised
from cake_infer.models.rope import Rotary
from cake_infer.models.weights import load_decoder

pytest.importorskip("numba", reason="compiled code needs the extra cpu")
pytestmark = pytest.mark.skipif(not has_tiles(), reason="this CPU has no matrix tiles, or Linux keeps them back")

WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
FAMILIES = {
    "llama with every bias": {"attention_bias": True, "mlp_bias": True},
    "rows that fill no block": {"head_dim": 20, "num_attention_heads": 16, "vocab_size": 317},
    "sliding": {"model_type": "mistral", "sliding_window": 20},
    "wider than a cache line": {"hidden_size": 192, "intermediate_size": 320},
    "heads one by one": {"num_key_value_heads": 4},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "gemma": {"model_type": "gemma"},
    "gelu": {"model_type": "gemma", "hidden_act": "gelu", "hidden_activation": "gelu"},
}


@pytest.fixture
def make_decoder(tmp_path, write_checkpoint):
    def make(quant="int8", **options):
        folder = write_checkpoint(
            tmp_path / f"model{len(list(tmp_path.iterdir()))}", dtype=torch.bfloat16, **WIDE | options
        )
        decoder = load_decoder(folder, read_config(folder))
        return as_quantised(decoder, quant) if quant else decoder

    return make


@pytest.fixture
def make_short(make_decoder):
    def make(decoder, threads=1, staging=torch.float32):
        short = make_short_pieces(decoder, threads, staging)
        assert short is not None
        short.prepare()
        return short

    return make


def hidden_states(count, width, seed=0):
    """Numbers of very different sizes."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(count, width, generator=random) * torch.randn(count, width, generator=random).mul(2).exp()


def angles(decoder, count):
    return Rotary(decoder.config.rope, 4096).cos_sin(torch.arange(7, 7 + count))


class Formula:
    """A layer in float64."""

    def __init__(self, decoder, index):
        self.config, self.sliding = decoder.config, decoder.config.sliding_windows[index]
        for name, tensor in decoder.widened(index).named_tensors():
            setattr(self, name, tensor.double())

    def of(self, name, x):
        product = x @ getattr(self, f"{name}_proj").T
        return product + getattr(self, f"{name}_bias", 0.0)

    def norm(self, x, weight):
        size = x.square().mean(-1, keepdim=True).add(self.config.rms_norm_eps).sqrt()
        return x / size * (weight + self.config.norm_offset)

    def projected(self, hidden, cos, sin):
        """Rotated queries, keys, and values."""
        x = self.norm(hidden.double(), self.input_layernorm)
        found = []
        for name in "qkv":
            heads = self.of(name, x).unflatten(-1, (-1, self.config.head_dim)).transpose(0, 1)
            if name != "v":
                if self.config.qk_norm:
                    heads = self.norm(heads, getattr(self, f"{name}_norm"))
                first, second = heads.chunk(2, -1)
                heads = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
            found.append(heads)
        return found

    def attended(self, queries, keys, values, positions, at):
        """Attention `[heads, n, head_dim]` and log-sum-exp of a token of each of `at` over all that is not later."""
        outputs, sums = [], []
        for head, query in enumerate(queries):
            own = head // (len(queries) // len(keys))
            where, when = positions[own][None], at[:, None]
            hidden = (where > when) | (where <= when - (self.sliding or 10**9))
            logits = (query @ keys[own].T * self.config.head_dim**-0.5).masked_fill(hidden, -math.inf)
            outputs.append(logits.softmax(-1) @ values[own])
            sums.append(logits.logsumexp(-1))
        return torch.stack(outputs), torch.stack(sums)

    def rest(self, attended, hidden):
        hidden = hidden.double() + self.of("o", attended.transpose(0, 1).flatten(1))
        x = self.norm(hidden, self.post_attention_layernorm)
        gate = self.of("gate", x)
        if self.config.hidden_act == "silu":
            gate = gate * gate.sigmoid()
        elif self.config.hidden_act == "gelu":
            gate = gate * (1 + torch.erf(gate / math.sqrt(2))) / 2
        else:
            gate = gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) / 2
        return hidden + self.of("down", gate * self.of("up", x))


class Rows:
    """A staged layer: random rows of `held` tokens with gaps in front of `new` ones, which are not numbers yet."""

    def __init__(self, config, held, new, dtype=torch.float32):
        random = torch.Generator().manual_seed(sum(held))
        self.held, self.total, longest = held, 2 * max(held) + 3, max(held) + new
        shape = (config.num_kv_heads, longest)
        keys, values = (torch.full((*shape, config.head_dim), math.nan) for _ in range(2))
        positions = torch.full(shape, 10**9, dtype=torch.int32)
        for head, count in enumerate(held):
            for store in (keys, values):
                store[head, :count] = torch.randn(count, config.head_dim, generator=random)
            positions[head, :count] = torch.randperm(self.total, generator=random)[:count]
            positions[head, count : count + new] = torch.arange(self.total, self.total + new)
        self.staged = Staged(keys.to(dtype), values.to(dtype), positions, torch.zeros(shape), held, new)

    def new(self, store):
        return torch.stack([store[head, held : held + self.staged.tokens] for head, held in enumerate(self.held)])

    def whole(self, store, new):
        return [torch.cat([row[:held].double(), more]) for row, held, more in zip(store, self.held, new, strict=True)]


def close(found, wanted, tolerance=3e-6):
    error = (found.double() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    return bool((error < tolerance).all())


HELD = {"nothing": (0, 0), "rows": (70, 70), "unequal rows": (300, 41), "long rows": (1100, 1100)}


@pytest.mark.parametrize("held", HELD.values(), ids=HELD)
@pytest.mark.parametrize("options", FAMILIES.values(), ids=FAMILIES)
def test_it_is_the_formula(make_decoder, make_short, options, held):
    decoder = make_decoder(**options)
    short, config = make_short(decoder), decoder.config
    held = held * (config.num_kv_heads // 2)
    for index, count, last in ((0, 1, False), (1, 5, True), (2, 16, False), (1, 39, False), (2, 33, True)):
        formula, rows = Formula(decoder, index), Rows(config, held, count)
        hidden, at = hidden_states(count, config.hidden_size), torch.arange(rows.total, rows.total + count)
        cos, sin = Rotary(config.rope, 4096).cos_sin(at)
        queries, new_keys, new_values = formula.projected(hidden, cos, sin)
        staged = rows.staged
        keys, values = rows.whole(staged.keys, new_keys), rows.whole(staged.values, new_values)
        positions = rows.whole(staged.position, at.double().repeat(config.num_kv_heads, 1))
        attended, sums = formula.attended(queries, keys, values, positions, at)
        wanted = formula.rest(attended, hidden)
        before, span = hidden.clone(), slice(-1, None) if last else slice(None)
        found, lse = short.layer(index, hidden, cos, sin, staged, rows.total, last=last)
        assert close(found, queries)
        assert close(rows.new(staged.keys), new_keys)
        assert close(rows.new(staged.values), new_values)
        assert close(lse[:, span, None].exp(), sums[:, span, None].exp(), 2e-5)
        assert close(hidden[span], wanted[span])
        assert torch.equal(hidden[:-1], before[:-1]) or not last
        if last:
            continue
        other, again = Rows(config, held, count).staged, before.clone()  # with an attention from elsewhere
        assert torch.equal(short.before_attention(index, again, cos, sin, other, rows.total), found)
        for store in ("keys", "values"):
            assert torch.equal(getattr(other, store).nan_to_num(7), getattr(staged, store).nan_to_num(7))
        short.after_attention(index, attended.float(), again, other)
        assert close(again, wanted)


def test_the_head_is_that_of_the_decoder(make_decoder, make_short):
    for options in ({}, {"model_type": "gemma"}, {"vocab_size": 333}):
        decoder = make_decoder(**options)
        for count in (1, 17):
            hidden = hidden_states(count, decoder.config.hidden_size)
            assert close(make_short(decoder).logits(hidden), decoder.logits(hidden).double())


def test_in_bf16_keys_and_values_are_rounded_once_and_nothing_else(make_decoder, make_short):
    decoder = make_decoder(attention_bias=True, model_type="qwen3")
    config = decoder.config
    exact, rounded = make_short(decoder), make_short(decoder, staging=torch.bfloat16)
    hidden, (cos, sin) = hidden_states(20, config.hidden_size), angles(decoder, 20)
    wide, narrow = (Rows(config, (9, 9), 20, dtype) for dtype in (torch.float32, torch.bfloat16))
    one, other = hidden.clone(), hidden.clone()
    queries, _ = exact.layer(0, one, cos, sin, wide.staged, 7)
    assert torch.equal(rounded.layer(0, other, cos, sin, narrow.staged, 7)[0], queries)
    for store in ("keys", "values"):
        found, wanted = (rows.new(getattr(rows.staged, store)) for rows in (narrow, wide))
        assert torch.equal(found, wanted.bfloat16())
    assert close(other, one.double(), 0.02)
    assert not torch.equal(one, other)


def test_neither_threads_nor_other_tokens_change_a_bit(make_decoder, make_short):
    decoder = make_decoder(attention_bias=True, vocab_size=317)
    config = decoder.config
    hidden, (cos, sin) = hidden_states(37, config.hidden_size), angles(decoder, 37)
    wanted = None
    for threads in (1, 2, 3):
        short = make_short(decoder, threads)
        short._team, short._threads = short_module.Team(threads), threads  # as with that many cores
        rows, after = Rows(config, (90, 33), 37), hidden.clone()
        queries, lse = short.layer(1, after, cos, sin, rows.staged, rows.total)
        found = [queries, lse, rows.staged.keys, rows.staged.values, after, short.logits(after)]
        wanted = wanted or found
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one.nan_to_num(7), other.nan_to_num(7))
        for start, end in ((0, 1), (1, 17), (17, 37)):  # in parts, behind what is there already
            held = tuple(count + start for count in (90, 33))
            staged = replace(rows.staged, held=held, tokens=end - start)
            part = hidden[start:end].clone()
            queries, lse = short.layer(1, part, cos[start:end], sin[start:end], staged, rows.total + start)
            logits = short.logits(part)
            for one, other, dim in zip(
                (queries, lse, part, logits), (*wanted[:2], *wanted[4:]), (1, 1, 0, 0), strict=True
            ):
                assert torch.equal(one, other.narrow(dim, start, end - start))


# -- in a runner ------------------------------------------------------------------------------------------------------


def runner_of(decoder, *, step="auto", chunk=64, **options):
    cache = CacheConfig(**{"budget": 48, "window": 8, **options})
    runner = Runner(decoder, cache, context=512, chunk=chunk, kv_dtype=torch.float32, step=step)
    if step != "eager":
        assert isinstance(runner.short, ShortPieces)
        runner.short.prepare()
    return runner


def fed(runner, sequence, ids):
    """The next token's logits, and where the rows' tokens stand."""
    with runner.access.alone():
        logits = runner.feed(sequence, ids, runner.prepare(sequence, len(ids), 3, conversation=True))
    arena = runner.tenancy.arena
    rows = [arena.row(layer, head)[2].tolist() for layer in range(3) for head in range(arena.length.shape[1])]
    return logits, [sorted(row) for row in rows]


@pytest.fixture
def counted(monkeypatch):
    """How many layers of which lengths are worked in tiles."""
    seen = []
    layer = ShortPieces._layer

    def counting(self, index, hidden, *arguments, **options):
        if ShortPieces.ready.fget(self) and short_module.AFTER not in arguments[4:]:
            seen.append(len(hidden))
        return layer(self, index, hidden, *arguments, **options)

    monkeypatch.setattr(ShortPieces, "_layer", counting)
    return seen


@pytest.mark.parametrize(
    "options",
    [{}, {"model_type": "mistral", "sliding_window": 20}, {"model_type": "qwen3"}, {"model_type": "gemma"}],
    ids=["llama", "sliding", "qwen3", "gemma"],
)
@pytest.mark.parametrize("products", [30_000, 0], ids=["", "torch attends"])
@pytest.mark.parametrize(
    "method",
    [{}, {"policy": "snapkv", "heads": "adaptive"}, {"policy": "h2o"}, {"policy": "full", "budget": 1024}],
    ids=["cake", "unequal heads", "all queries", "full"],
)
def test_turns_read_the_same_with_and_without_it(
    make_decoder, random_ids, counted, options, method, products, monkeypatch
):
    monkeypatch.setattr(short_module, "MOST_PRODUCTS", products)
    decoder = make_decoder(**options)
    fast, slow = runner_of(decoder, **method), runner_of(decoder, step="eager", **method)
    one, other = Sequence(), Sequence()
    for turn, count in enumerate((50, 1, 23)):
        ids = random_ids(count, seed=turn)
        logits, rows = fed(fast, one, ids)
        wanted, wanted_rows = fed(slow, other, ids)
        torch.testing.assert_close(logits, wanted, rtol=0, atol=2e-4)
        assert rows == wanted_rows
    assert counted == [50] * 3 + [1] * 3 + [23] * 3


@pytest.mark.parametrize("policy", ["lagkv", "lava", "squeeze"])
def test_what_asks_for_more_of_a_layer_gets_it(make_decoder, random_ids, policy):
    decoder = make_decoder()
    fast, slow = (runner_of(decoder, step=step, policy=policy) for step in ("auto", "eager"))
    ids = random_ids(60)
    logits, rows = fed(fast, Sequence(), ids)
    wanted, wanted_rows = fed(slow, Sequence(), ids)
    torch.testing.assert_close(logits, wanted, rtol=0, atol=2e-4)
    assert rows == wanted_rows


def test_longer_pieces_and_those_of_several_chunks_are_read_by_torch(make_decoder, random_ids, counted):
    decoder = make_decoder()
    runner = runner_of(decoder, chunk=1000)
    most = runner.short.most
    for count in (most, most + 1):
        fed(runner, Sequence(), random_ids(count))
    fed(runner_of(decoder, chunk=16), Sequence(), random_ids(17))
    assert counted == [most] * 3


def test_a_long_piece_is_read_without_the_work_space_of_short_ones(make_decoder, random_ids, monkeypatch):
    runner = runner_of(make_decoder(), chunk=1000)
    most = runner.short.most

    def held():
        spaces = (runner.short._space, runner.short._tokens_space, runner.short._attention_space)
        return sum(array.nbytes for space in spaces for array in space)

    short = fed(runner, Sequence(), random_ids(most))
    before, while_read = held(), []
    stage = type(runner.tenancy.arena).stage

    def watched(self, *arguments):
        while_read.append(held())
        return stage(self, *arguments)

    monkeypatch.setattr(type(runner.tenancy.arena), "stage", watched)
    fed(runner, Sequence(), random_ids(most + 1))
    assert set(while_read) == {0}, "the plan of a long prompt does not count it"
    assert held() < before / 4, "the logits of one token need little"
    again = fed(runner, Sequence(), random_ids(most))
    assert torch.equal(short[0], again[0])
    assert short[1] == again[1]


def test_a_batch_gives_what_each_gets_alone(make_decoder, random_ids, counted):
    runner = runner_of(make_decoder())
    config = resolve_generation(GenerationConfig(max_new_tokens=5, temperature=0.0), {})
    prompts = [random_ids(count, seed=count) for count in (20, 61, 9)]
    alone = [[token.id for token in runner.generate(Sequence(), ids, config)] for ids in prompts]
    with Batch(runner, most=3, readers=2) as batch:
        sequences = [Sequence() for _ in prompts]
        found = {id(sequence): [] for sequence in sequences}
        for sequence, ids in zip(sequences, prompts, strict=True):
            batch.join(sequence, ids, config)
        while len(batch):
            for outcome in batch.step():
                if outcome.token is not None:
                    found[id(outcome.sequence)].append(outcome.token.id)
    assert [found[id(sequence)] for sequence in sequences] == alone
    assert len(counted) == 2 * 3 * len(prompts)


# -- where there is none ----------------------------------------------------------------------------------------------


def test_a_first_prompt_does_not_wait_for_the_compiler(make_decoder, random_ids, counted, monkeypatch, caplog):
    cache = CacheConfig(budget=48, window=8)
    runner = Runner(make_decoder(), cache, context=512, chunk=64, kv_dtype=torch.float32)
    monkeypatch.setattr(short_module, "kernels_cached", lambda kind: False)
    prepared = []
    prepare = ShortPieces.prepare
    monkeypatch.setattr(ShortPieces, "prepare", lambda self, wait=None: (prepared.append(1), prepare(self, wait)))
    fed(runner, Sequence(), random_ids(20))
    assert not prepared
    assert not counted
    config = resolve_generation(GenerationConfig(max_new_tokens=3, temperature=0.0), {})
    with caplog.at_level(logging.INFO):
        list(runner.generate(Sequence(), random_ids(20), config))
    assert prepared
    fed(runner, Sequence(), random_ids(20))
    assert counted == [20] * 3


def test_torch_keeps_to_one_thread_beside_it_and_gets_the_others_back(make_decoder, random_ids, monkeypatch):
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        runner = runner_of(make_decoder())
        seen = []
        stage = type(runner.tenancy.arena).stage

        def watched(self, *arguments):
            seen.append(torch.get_num_threads())
            return stage(self, *arguments)

        monkeypatch.setattr(type(runner.tenancy.arena), "stage", watched)
        between = []
        with torch.inference_mode(), runner.access.alone():
            for count in (20, runner.short.most + 1):
                sequence = Sequence()
                limit = runner.prepare(sequence, count, 2)
                steps = runner.reading(runner.tenancy.arena, sequence, random_ids(count), limit)
                between += [torch.get_num_threads() for _ in steps]
        assert seen == [1] * 3 + [3] * 3
        assert set(between) == {3}
    finally:
        torch.set_num_threads(threads)


def test_one_prompt_alone_loads_nothing(make_decoder, random_ids, counted):
    cache = CacheConfig(budget=48, window=8)
    runner = Runner(make_decoder(), cache, context=512, chunk=64, one_prompt=True)
    fed(runner, Sequence(), random_ids(20))
    assert runner.short is None
    assert not counted


def test_where_numba_cannot_be_loaded_torch_reads(make_decoder, random_ids, counted, monkeypatch):
    def broken():
        raise BackendError("no numba")

    monkeypatch.setattr(short_module, "load_short", broken)
    runner = Runner(make_decoder(), CacheConfig(budget=48, window=8), context=512, chunk=64)
    runner.short.prepare()
    assert not runner.short.ready
    assert not runner.short.at_hand
    fed(runner, Sequence(), random_ids(20))
    assert not counted


def test_where_kernels_are_kept_the_first_prompt_uses_them(make_decoder, make_short, random_ids, counted):
    decoder = make_decoder()
    make_short(decoder)  # compiles them, if nobody has
    fed(Runner(decoder, CacheConfig(budget=48, window=8), context=512, chunk=64), Sequence(), random_ids(20))
    assert counted == [20] * 3


@pytest.mark.parametrize(
    "options",
    [
        {"hidden_size": 48},
        {"intermediate_size": 100},
        {"num_key_value_heads": 1, "head_dim": 8, "num_attention_heads": 8},
    ],
)
def test_matrices_that_tiles_do_not_fit_are_left_to_torch(make_decoder, random_ids, options):
    decoder = make_decoder(**options)
    assert most_tokens(decoder.config, torch.int8) == 0
    assert make_short_pieces(decoder, 1, torch.float32) is None
    runner = Runner(decoder, CacheConfig(budget=48, window=8), context=512, chunk=64)
    fed(runner, Sequence(), random_ids(20))


@pytest.mark.parametrize("quant", ["int4", "bf16", "fp32"])
def test_other_weights_are_left_to_torch(make_decoder, tmp_path, write_checkpoint, quant):
    if quant != "fp32":
        decoder = make_decoder("int4" if quant == "int4" else None)
    else:
        folder = write_checkpoint(tmp_path / "wide", **WIDE)
        decoder = load_decoder(folder, read_config(folder))
    assert make_short_pieces(decoder, 1, torch.float32) is None


def test_without_tiles_or_numba_torch_reads(make_decoder, monkeypatch):
    from cake_infer.engine.kernels import processor

    decoder = make_decoder()
    with monkeypatch.context() as patch:
        patch.setattr(processor, "has_tiles", lambda: False)
        assert make_short_pieces(decoder, 1, torch.float32) is None
    monkeypatch.setattr(short_module.importlib.util, "find_spec", lambda name: None)
    assert make_short_pieces(decoder, 1, torch.float32) is None


def test_a_wide_model_takes_fewer_tokens(make_decoder):
    config = make_decoder().config
    wide = replace(config, intermediate_size=14336)
    assert 0 < most_tokens(wide, torch.int8) < most_tokens(config, torch.int8)
    assert most_tokens(wide, torch.int8) % 16 == 0


def test_a_conversation_loads_it_ahead(tmp_path, make_decoder, make_short, model_folder):
    make_short(make_decoder())  # compiles it, if nobody has
    engine = Engine.load(model_folder(**WIDE), quant="int8", window=8, budget=48)
    assert not engine.runner.short.ready
    engine.chat()
    deadline = time.monotonic() + 60
    while not engine.runner.short.ready:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_engine_for_one_prompt_does_not_make_it(model_folder):
    def one(engine):
        engine.one_prompt = True

    assert Engine.load(model_folder(**WIDE), quant="int8", before_weights=one).runner.short is None
