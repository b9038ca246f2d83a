"""The tokenizer inside a GGUF gives the ids of the one it was made from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cake_infer.errors import TokenizerError
from cake_infer.models.config import read_config
from cake_infer.models.gguf_import import import_gguf
from tokenizers import Tokenizer

Write = Callable[..., Path]


def _nothing_left(tmp_path: Path) -> bool:
    return {path.name for path in tmp_path.iterdir()} <= {"source", "m.gguf"}


def test_the_ids_of_the_metadata_reach_every_file(tmp_path: Path, gguf_source: Write, write_gguf: Write) -> None:
    metadata = {
        "tokenizer.ggml.eos_token_id": 4,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{{ messages }}",
    }
    out = import_gguf(write_gguf(tmp_path / "m.gguf", gguf_source(), metadata=metadata), tmp_path / "out")
    config, generation, tokenizer = (
        json.loads((out / f"{name}.json").read_text()) for name in ("config", "generation_config", "tokenizer_config")
    )
    # the file's own end first, then </s>, a control token that ends a reply wherever there is one
    assert config["eos_token_id"] == generation["eos_token_id"] == [4, 2]
    assert config["bos_token_id"] == generation["bos_token_id"] == 1
    assert config["pad_token_id"] == 0
    assert tokenizer["add_bos_token"] is True
    assert (tokenizer["bos_token"], tokenizer["eos_token"]) == ("<s>", "<|im_end|>")
    assert tokenizer["chat_template"] == "{{ messages }}"
    assert Tokenizer.from_file(str(out / "tokenizer.json")).encode("a").ids[0] == 1
    assert read_config(out).eos_token_ids == (4, 2)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model = 'bert'"),
        ({"tokenizer.ggml.pre": "quux"}, "tokenizer.ggml.pre = 'quux'"),
        ({"tokenizer.ggml.pre": ...}, "tokenizer.ggml.pre is missing"),
        ({"tokenizer.ggml.merges": ...}, "tokenizer.ggml.merges is missing"),
        ({"tokenizer.ggml.merges": ["a zzz"]}, "merge 'a zzz'"),
        ({"tokenizer.ggml.tokens": ...}, "tokenizer.ggml.tokens is missing"),
        ({"tokenizer.ggml.tokens": ["a", "b", "a"], "tokenizer.ggml.token_type": ...}, "'a' appears twice"),
        ({"tokenizer.ggml.eos_token_id": 300}, "tokenizer.ggml.eos_token_id = 300"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "2 token types"),
    ],
)
def test_a_tokenizer_that_cannot_be_rebuilt_is_refused_by_name(
    tmp_path: Path, gguf_source: Write, write_gguf: Write, metadata: dict[str, Any], expected: str
) -> None:
    path = write_gguf(tmp_path / "m.gguf", gguf_source(), metadata=metadata)
    with pytest.raises(TokenizerError) as caught:
        import_gguf(path, tmp_path / "out")
    assert expected in str(caught.value)
    assert _nothing_left(tmp_path)


TEXTS = [
    "the end of it all, and then some",
    "  leading, trailing  and   inner spaces ",
    "tabs\tand\nlines\r\n\n\nand more",
    "digits 1234567890 and 3.14",
    "naïve façade, größer, Привет, 日本語テキスト, 한국어",
    "emoji 👩‍👩‍👧‍👦 and 🇳🇴 flags",
    "cafe\u0301 combining, \u200b zero width, \ufeff mark",
    "it's I'LL we've {code: [1, 2]} <|im_start|>user\nhi<|im_end|></s>",
    "",
]


def test_a_byte_level_tokenizer_gives_the_same_ids_and_text(
    tmp_path: Path, gguf_source: Write, write_gguf: Write
) -> None:
    folder = gguf_source()
    out = import_gguf(write_gguf(tmp_path / "m.gguf", folder), tmp_path / "out")
    before, after = (Tokenizer.from_file(str(place / "tokenizer.json")) for place in (folder, out))
    assert before.get_vocab() == after.get_vocab()
    for text in TEXTS:
        ids = before.encode(text).ids
        assert after.encode(text).ids == ids
        for skip in (True, False):
            assert after.decode(ids, skip_special_tokens=skip) == before.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt-2", ["It", "'s", "Ġ12345", "!!", "ĊĊ", "Ġcafe", "Ìģ"]),
        ("smollm", ["It", "'s", "Ġ", "1", "2", "3", "4", "5", "!!", "ĊĊ", "Ġcafe", "Ìģ"]),
        ("llama-bpe", ["It", "'s", "Ġ", "123", "45", "!!ĊĊ", "Ġcafe", "Ìģ"]),
        ("qwen2", ["It", "'s", "Ġ", "1", "2", "3", "4", "5", "!!ĊĊ", "ĠcafÃ©"]),
        ("tekken", ["It", "'s", "Ġ", "1", "2", "3", "4", "5", "!!ĊĊ", "ĠcafeÌģ"]),
    ],
)
def test_text_is_split_as_the_named_pre_tokenizer_does(
    tmp_path: Path, gguf_source: Write, write_gguf: Write, name: str, expected: list[str]
) -> None:
    path = write_gguf(tmp_path / "m.gguf", gguf_source(), metadata={"tokenizer.ggml.pre": name})
    tokenizer = Tokenizer.from_file(str(import_gguf(path, tmp_path / "out") / "tokenizer.json"))
    text = "It's 12345!!\n\n cafe\u0301"
    if tokenizer.normalizer is not None:
        text = tokenizer.normalizer.normalize_str(text)
    assert tokenizer.pre_tokenizer is not None
    assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)] == expected


@pytest.mark.parametrize(("name", "adds"), [("llama-bpe", True), ("tekken", True), ("qwen2", False), ("smollm", False)])
def test_bos_is_added_as_the_file_says_or_else_as_the_pre_tokenizer_goes(
    tmp_path: Path, gguf_source: Write, write_gguf: Write, name: str, adds: bool
) -> None:
    folder = gguf_source()
    for number, (stated, expected) in enumerate([(..., adds), (True, True), (False, False)]):
        metadata = {
            "tokenizer.ggml.pre": name,
            "tokenizer.ggml.add_bos_token": stated,
            "tokenizer.ggml.add_eos_token": stated is True,
        }
        out = import_gguf(write_gguf(tmp_path / "m.gguf", folder, metadata=metadata), tmp_path / f"out{number}")
        ids = Tokenizer.from_file(str(out / "tokenizer.json")).encode("a").ids
        assert (ids[0] == 1) is expected
        assert (ids[-1] == 2) is (stated is True)
        assert json.loads((out / "tokenizer_config.json").read_text())["add_bos_token"] is expected


def test_user_defined_tokens_are_taken_whole_and_kept_in_text_while_filler_rows_are_none(
    tmp_path: Path, gguf_source: Write, write_gguf: Write
) -> None:
    folder = gguf_source()
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = [*sorted(vocab, key=vocab.__getitem__)[:297], "<tool>", "[PAD298]", "[PAD299]"]
    types = [3] * 5 + [1] * 292 + [4, 5, 5]
    metadata = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types, "tokenizer.ggml.merges": ["Ġ t"]}
    out = import_gguf(write_gguf(tmp_path / "m.gguf", folder, metadata=metadata), tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    ids = tokenizer.encode("<s><tool>[PAD298]").ids
    assert ids[:2] == [1, 297]
    assert 298 not in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<tool>[PAD298]"
    assert tokenizer.get_vocab_size() == 298


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A small SentencePiece BPE model with byte fallback, normalising nothing, as Llama's does."""
    import sentencepiece

    folder = tmp_path_factory.mktemp("spm")
    words = "the of and to in is it was that for on as with his her they at be this from have or by one had not but"
    lines = [f"{a} {b}{c}" for a in words.split() for b in words.split() for c in (".", ",", " 12", "")]
    (folder / "text").write_text("\n".join(lines) + "\n" + "naïve größer  {x}\n" * 20, encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"),
        model_prefix=str(folder / "m"),
        model_type="bpe",
        vocab_size=390,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        user_defined_symbols=["<turn>"],
        num_threads=1,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "m.model"))


@pytest.mark.parametrize("prefix", [True, False])
def test_a_sentencepiece_tokenizer_gives_the_ids_of_sentencepiece(
    tmp_path: Path, gguf_source: Write, write_gguf: Write, sentencepiece_model: Any, prefix: bool
) -> None:
    reference = sentencepiece_model
    size = reference.vocab_size()
    kinds = [(reference.is_unknown, 2), (reference.is_control, 3), (reference.is_byte, 6)]
    types = [next((code for test, code in kinds if test(index)), 1) for index in range(size)]
    types[reference.piece_to_id("<turn>")] = 4
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [reference.id_to_piece(index) for index in range(size)],
        "tokenizer.ggml.scores": [float(reference.get_score(index)) for index in range(size)],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": ...,
        "tokenizer.ggml.add_space_prefix": prefix,
    }
    path = write_gguf(tmp_path / "m.gguf", gguf_source(vocab_size=size), metadata=metadata)
    tokenizer = Tokenizer.from_file(str(import_gguf(path, tmp_path / "out") / "tokenizer.json"))
    for text in TEXTS[:-2]:
        # without the prefix, a piece that starts a word stands after some other token
        expected = reference.encode(text) if prefix else reference.encode("<turn>" + text)[2:]
        ids = tokenizer.encode(text).ids
        assert ids == [reference.bos_id(), *expected]
        assert tokenizer.decode(ids) == text
    turn = reference.piece_to_id("<turn>")
    assert tokenizer.encode("the<turn>the").ids.count(turn) == 1
    assert tokenizer.decode([turn]) == "<turn>"


def test_a_sentencepiece_tokenizer_needs_its_scores(tmp_path: Path, gguf_source: Write, write_gguf: Write) -> None:
    for scores in (..., [0.0, 1.0]):
        metadata = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": scores}
        path = write_gguf(tmp_path / "m.gguf", gguf_source(), metadata=metadata)
        with pytest.raises(TokenizerError, match=r"tokenizer\.ggml\.scores"):
            import_gguf(path, tmp_path / "out")
