"""A row as ids: the two protocols, the middle that is cut out, and the answer."""

from __future__ import annotations

import pytest
from cake_infer import Engine
from cake_infer.engine.evaluation.encoding import encode_row
from cake_infer.engine.evaluation.rows import Row
from cake_infer.errors import PromptError

ROW = Row("r", "task", "The story of a fox. " * 10, "\nWho was it?", ("A fox",))
OPTIONS = {"limit": 4000, "answer_tokens": 64, "raw": False}


@pytest.fixture
def engine(model_folder):
    return Engine.load(model_folder(), policy="full", step="eager")


def test_both_protocols_are_the_same_ids_and_the_question_is_the_suffix(engine):
    inside = encode_row(engine, ROW, "inside", **OPTIONS)
    after = encode_row(engine, ROW, "after", **OPTIONS)
    assert inside.prefix == after.prefix + after.suffix
    assert inside.suffix == ()
    tokenizer = engine.text_tokenizer()
    assert tokenizer.decode(after.prefix).endswith("fox. ")
    assert tokenizer.decode(after.suffix) == "\nWho was it?\nassistant\n"
    assert list(inside.prefix) == engine.encode(messages=[{"role": "user", "content": ROW.text}])
    assert tokenizer.decode(inside.answer) == "A fox"


def test_without_a_template_the_text_goes_on_with_a_space(engine):
    plain = encode_row(engine, ROW, "after", **OPTIONS | {"raw": True})
    tokenizer = engine.text_tokenizer()
    assert list(plain.prefix + plain.suffix) == tokenizer.encode(ROW.text)
    assert tokenizer.decode(plain.answer) == " A fox"
    assert (
        encode_row(engine, ROW, "inside", **OPTIONS | {"answer_tokens": 2}).answer
        == plain.answer[:0] + (encode_row(engine, ROW, "inside", **OPTIONS).answer[:2])
    )


def test_a_long_prompt_loses_its_middle_and_keeps_its_question(engine):
    words = " ".join(f"word{i}" for i in range(300))
    row = Row("r", "task", words, "\nWho was it?", ())
    for protocol in ("inside", "after"):
        found = encode_row(engine, row, protocol, **OPTIONS | {"limit": 500})
        text = engine.text_tokenizer().decode(found.prefix + found.suffix)
        assert 450 < len(found.prefix + found.suffix) <= 500
        assert found.cut > 500
        assert "word0 word1 " in text
        assert "word299\nWho was it?" in text
        assert "word150" not in text
    assert engine.text_tokenizer().decode(found.suffix).startswith("\nWho was it?")
    with pytest.raises(PromptError, match="cannot lose"):
        encode_row(engine, row, "inside", **OPTIONS | {"limit": 5})


def test_a_row_without_a_question_of_its_own_cannot_be_asked_after(engine):
    for question in (None, ""):
        with pytest.raises(PromptError, match="use --question inside"):
            encode_row(engine, Row("r", "t", "text", question), "after", **OPTIONS)


def test_control_tokens_in_an_answer_are_text(engine):
    row = Row("r", "t", "text", None, ("</s>",))
    assert engine.text_tokenizer().token_id("</s>") not in encode_row(engine, row, "inside", **OPTIONS).answer
