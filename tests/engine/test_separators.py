"""Where clauses end: the tokens that end with punctuation or a line break, found for the policy that asks for them."""

from __future__ import annotations

import pytest
from cake_infer import Engine
from cake_infer.errors import OptionError
from cake_infer.models.separators import separator_ids
from cake_infer.models.tokenizer import Tokenizer


def test_separators_are_the_tokens_whose_text_ends_a_clause(model_folder):
    tokenizer = Tokenizer.load(model_folder())
    found = separator_ids(tokenizer)
    for index in range(tokenizer.vocab_size):
        text = tokenizer.token_bytes(index).decode("utf-8", "replace").rstrip(" \t\r")
        assert (index in found) == (text[-1:] in tuple(".,;:!?\n")), (index, text)
    assert {tokenizer.encode(mark, add_bos=False)[-1] for mark in ".,;:!?\n"} <= found
    assert tokenizer.encode("a", add_bos=False)[-1] not in found


def test_an_engine_finds_them_for_the_policy_that_asks(model_folder, monkeypatch):
    calls = []
    monkeypatch.setattr(
        "cake_infer.engine.loading.separator_ids", lambda tokenizer: calls.append(tokenizer) or separator_ids(tokenizer)
    )
    text = "One, two. Three; four: five!\nSix? " * 4
    folder = model_folder()
    for policy in ("snapkv", "sablock"):
        with Engine.load(folder, policy=policy, budget=24, window=8) as engine:
            for _ in range(2):
                engine.generate(text, max_new_tokens=2)
            assert len(calls) == (policy == "sablock"), "once, and only where it is asked for"


def test_without_a_tokenizer_the_policy_says_what_it_lacks(tmp_path, write_checkpoint, make_runner, random_ids):
    runner = make_runner(write_checkpoint(tmp_path / "model"), policy="sablock", budget=24, window=8)
    with pytest.raises(OptionError, match="came without a tokenizer"):
        _ = runner.separators
