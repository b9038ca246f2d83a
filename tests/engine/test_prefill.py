"""Reading a text: the same logits for every chunk size, no tensor of the size of the text squared, every limit kept."""

from __future__ import annotations

import logging

import pytest
import torch
from cake_infer.cache.layout import ArenaSize
from cake_infer.cache.policies.composed import ComposedPolicy
from cake_infer.engine import decode as steps
from cake_infer.engine import prefill
from cake_infer.engine.generation import GenerationConfig, resolve_generation
from cake_infer.engine.sequence import Sequence
from cake_infer.errors import PromptError
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CLOSE = {"rtol": 0, "atol": 1e-4}


def feed(runner, sequence, ids, new_tokens=1):
    limit = runner.prepare(sequence, len(ids), new_tokens)
    return runner.feed(sequence, ids, limit)


@torch.inference_mode()
def decode(runner, sequence, ids):
    arena, window = runner.tenancy.arena, runner.cache.window
    return torch.stack([steps.step(runner.decoder, arena, sequence, token, window=window) for token in ids])


@torch.inference_mode()
def all_logits(runner, ids):
    """Logits at every position, without a cache."""
    sequence = Sequence(rotary=runner.rotary(len(ids)))
    runner.tenancy.activate(sequence)
    runner.tenancy.make(ArenaSize(0, len(ids) * runner.layout.num_kv_heads, 0))
    hidden = prefill.read_all(runner.decoder, runner.tenancy.arena, sequence, torch.tensor(ids), chunk=runner.chunk)
    return runner.decoder.logits(hidden)


def generate(runner, ids, new_tokens, sequence=None, **options):
    generation = resolve_generation(GenerationConfig(max_new_tokens=new_tokens, **options), {})
    return list(runner.generate(sequence or Sequence(), ids, generation))


def hidden_after(kept, prompt, total):
    """Masks in which queries from `prompt` on see, of the prompt, only what was kept."""
    masks = {}
    for row, positions in kept.items():
        mask = torch.ones(total, total, dtype=torch.bool)
        mask[prompt:, :prompt] = False
        mask[prompt:, positions] = True
        masks[row] = mask
    return masks


# -- chunks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [150, 64, 7, 1])
@pytest.mark.parametrize("options", [{}, {"model_type": "mistral", "sliding_window": 20}], ids=["full", "sliding"])
def test_every_position_has_the_logits_of_a_dense_model_whatever_the_chunk(
    tmp_path, write_checkpoint, dense, make_runner, random_ids, chunk, options
):
    folder = write_checkpoint(tmp_path / "model", **options)
    runner, ids = make_runner(folder, policy="full", chunk=chunk), random_ids(150)
    reference = dense(folder).logits(ids)
    logits = all_logits(runner, ids)
    torch.testing.assert_close(logits.double(), reference, **CLOSE)
    expected = torch.log_softmax(reference, -1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(runner.score(ids)).double(), expected, **CLOSE)

    changed = all_logits(runner, ids[:100] + random_ids(50, seed=9))
    torch.testing.assert_close(changed[:100], logits[:100], rtol=0, atol=1e-6)
    assert (changed[100:] - logits[100:]).abs().max() > 0.1


# -- how large a tensor may be ----------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The most elements any tensor has that is made inside: in all, and while a policy scores a layer."""

    def __init__(self):
        super().__init__()
        self.elements = self.scoring = 0
        self.inside = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.dtype != torch.uint8:  # the arena itself is bytes
                memory = tensor.untyped_storage().nbytes() // tensor.element_size()  # an expanded view is no memory
                elements = min(tensor.numel(), memory)
                self.elements = max(self.elements, elements)
                if self.inside:
                    self.scoring = max(self.scoring, elements)
        return out


@pytest.mark.parametrize("case", ["one-shot", "sliding", "continued", "continued sliding", "score"])
def test_no_tensor_is_as_large_as_the_text_squared_or_the_text_times_the_vocabulary(
    tmp_path, write_checkpoint, make_runner, random_ids, monkeypatch, case
):
    vocab, heads, window, chunk = 3000, 4, 32, 256
    options = {"model_type": "mistral", "sliding_window": 100} if "sliding" in case else {}
    folder = write_checkpoint(tmp_path / "model", vocab_size=vocab, num_hidden_layers=2, **options)
    found, watching, score = {}, [Largest()], ComposedPolicy.score

    def watched(policy, view):
        watching[-1].inside = True
        try:
            return score(policy, view)
        finally:
            watching[-1].inside = False

    monkeypatch.setattr(ComposedPolicy, "score", watched)
    for length in (1024, 2048):
        policy = "cake" if case == "continued sliding" else "auto"  # it scores tile by tile: the mask is what is left
        runner = make_runner(folder, policy=policy, budget=64, window=window, chunk=chunk)
        sequence, ids = Sequence(), random_ids(length)
        if "continued" in case:
            feed(runner, sequence, random_ids(300, seed=1))
        with Largest() as largest:
            found[length] = largest
            watching.append(largest)
            runner.score(ids) if case == "score" else feed(runner, sequence, ids)
        assert largest.elements < min(heads * length * length, length * vocab) / 4
        if case != "score":
            assert 0 < largest.scoring <= heads * window * (length + 64)
            assert runner.tenancy.arena.kept_slots == 64 * 2 * 2
    assert found[2048].elements <= 2 * found[1024].elements
    if case == "continued sliding":
        assert found[2048].elements == found[1024].elements, "a mask has a column for every token of the text"


# -- sliding windows --------------------------------------------------------------------------------------------------

SLIDING = {
    "mistral": {"model_type": "mistral", "sliding_window": 8, "num_hidden_layers": 4},
    "qwen2, later layers": {
        "model_type": "qwen2",
        "num_hidden_layers": 4,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 2,
    },
    "qwen2, layer types": {
        "model_type": "qwen2",
        "num_hidden_layers": 4,
        "use_sliding_window": True,
        "sliding_window": 8,
        "layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 2,
    },
}


@pytest.mark.parametrize("case", SLIDING)
@pytest.mark.parametrize(("prompt", "new"), [(5, 10), (20, 5)])
@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("evict", [False, True], ids=["all kept", "evicting"])
def test_a_sliding_window_equals_a_banded_mask_at_every_step(
    tmp_path, write_checkpoint, dense, make_runner, random_ids, kept_positions, case, prompt, new, chunk, evict
):
    folder = write_checkpoint(tmp_path / "model", **SLIDING[case])
    options = {"policy": "cake", "budget": 10, "window": 3} if evict else {"policy": "full"}
    runner, model = make_runner(folder, chunk=chunk, **options), dense(folder)
    assert [model.sliding(layer) for layer in range(4)] == ([8] * 4 if case == "mistral" else [None, None, 8, 8])
    ids, reply, sequence = random_ids(prompt), random_ids(new, seed=1), Sequence()
    first = feed(runner, sequence, ids, new + 1)
    kept = kept_positions(runner)
    model.logits(ids)
    if evict and prompt > 10:
        columns = {row: list(range(prompt)) for row in kept}
        model.assert_chosen(kept, model.cake(columns, prompt, budget=10, window=3))
        assert all(len(kept[row]) <= 8 for row in kept if model.sliding(row[0])), "a row the window hides was kept"
        assert {len(positions) for positions in kept.values()} != {20}
    else:
        assert all(sorted(positions) == list(range(prompt)) for positions in kept.values())
    logits = torch.cat([first[None], decode(runner, sequence, reply)])
    reference = model.logits(ids + reply, hidden_after(kept, prompt, prompt + new))[prompt - 1 :]
    torch.testing.assert_close(logits.double(), reference, **CLOSE)


# -- where a text ends ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"policy": "full"}, {"budget": 16, "window": 8}], ids=["all kept", "evicting"])
def test_a_reply_ends_at_the_models_context_by_true_position(
    tmp_path, write_checkpoint, dense, make_runner, random_ids, kept_positions, options
):
    folder = write_checkpoint(tmp_path / "model", max_position_embeddings=64)
    runner, ids = make_runner(folder, **options), random_ids(60)
    tokens = generate(runner, ids, 10)
    assert [token.finish_reason for token in tokens] == [None, None, None, "length"]
    sequence, forced = Sequence(), random_ids(4, seed=1)
    feed(runner, sequence, ids, 10)
    kept = kept_positions(runner)
    logits = decode(runner, sequence, forced)  # positions 60 .. 63
    reference = dense(folder).logits(ids + forced, hidden_after(kept, 60, 64))[60:]
    torch.testing.assert_close(logits.double(), reference, **CLOSE)
    assert len(generate(runner, random_ids(63), 10)) == 1
    with pytest.raises(PromptError, match="the prompt has 64 tokens, but the model's context is 64"):
        generate(runner, random_ids(64), 10)
    with pytest.raises(PromptError, match="the text has 65 tokens, but the model's context is 64"):
        runner.score(random_ids(65))


@pytest.mark.parametrize("new", [16, 17])
def test_a_reply_as_long_as_was_asked_for_uses_the_last_slot_and_no_more(
    tmp_path, write_checkpoint, dense, make_runner, random_ids, force, new
):
    folder = write_checkpoint(tmp_path / "model")
    runner, ids, reply = make_runner(folder, policy="full"), random_ids(48), random_ids(new, seed=1)
    logits = force(reply)
    tokens = generate(runner, ids, new)
    assert [token.id for token in tokens] == reply
    assert tokens[-1].finish_reason == "length"
    reference = dense(folder).logits(ids + reply)[47:-1]
    torch.testing.assert_close(torch.stack(logits).double(), reference, **CLOSE)


def test_a_reply_may_be_longer_than_the_budget(
    tmp_path, write_checkpoint, dense, make_runner, random_ids, kept_positions, force
):
    folder = write_checkpoint(tmp_path / "model")
    runner, ids, reply = make_runner(folder, budget=16, window=8), random_ids(48), random_ids(64, seed=1)
    logits, sequence = force(reply), Sequence()
    assert [token.id for token in generate(runner, ids, 64, sequence)] == reply
    kept = {row: [p for p in positions if p < 48] for row, positions in kept_positions(runner).items()}
    assert sum(map(len, kept.values())) == 16 * len(kept)
    assert (runner.tenancy.arena.length.mean(axis=1) >= 8 + 63).all()  # the last token is chosen and not fed
    reference = dense(folder).logits(ids + reply, hidden_after(kept, 48, 112))[47:-1]
    torch.testing.assert_close(torch.stack(logits).double(), reference, **CLOSE)


# -- against transformers ---------------------------------------------------------------------------------------------


@pytest.fixture
def transformers_model(caplog):
    from transformers import AutoModelForCausalLM

    caplog.set_level(logging.ERROR, logger="transformers")

    def load(folder):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        return model.eval()

    return load


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0, 1.05, 1.2, 1.5],
    "long_factor": [1.0, 1.5, 3.0, 6.0],
}
ROPES = {
    "dynamic": {
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    },
    "longrope": {"max_position_embeddings": 256, "rope_parameters": LONGROPE},
}


@pytest.mark.parametrize("new", [9, 14, 15, 30])  # 59, 64 (the border), 65 and 80 tokens in all
@pytest.mark.parametrize("rope", ROPES)
def test_frequencies_that_depend_on_the_length_are_those_of_the_whole_text(
    tmp_path, write_checkpoint, make_runner, random_ids, transformers_model, force, rope, new
):
    folder = write_checkpoint(tmp_path / "model", rope_theta=..., **ROPES[rope])
    runner, ids, reply = make_runner(folder, budget=100), random_ids(50), random_ids(new, seed=1)
    assert runner.context >= 80
    logits = force(reply)
    assert [token.id for token in generate(runner, ids, new)] == reply
    with torch.no_grad():
        reference = transformers_model(folder)(torch.tensor([ids + reply]), use_cache=False).logits[0, 49:-1]
    torch.testing.assert_close(torch.stack(logits), reference, **CLOSE)


FAMILIES = {
    "llama": {},
    "mistral": {"model_type": "mistral", "sliding_window": 16},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "gemma": {"model_type": "gemma", "tie_word_embeddings": False},  # tied, a random one says one word only
}


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_ids_equal_transformers_while_the_budget_covers_the_text(
    tmp_path, write_checkpoint, make_runner, random_ids, transformers_model, family
):
    folder = write_checkpoint(tmp_path / "model", **FAMILIES[family])
    runner, ids = make_runner(folder, budget=60, window=32, chunk=7), random_ids(40)
    model = transformers_model(folder)
    model.generation_config.eos_token_id = None
    for penalty in (1.0, 1.5):  # a random model likes to repeat itself
        ours = [token.id for token in generate(runner, ids, 20, repetition_penalty=penalty)]
        options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "repetition_penalty": penalty}
        with torch.no_grad():
            theirs = model.generate(torch.tensor([ids]), **options)[0, 40:]
        assert ours == theirs.tolist()
    assert len(set(ours)) > 10
