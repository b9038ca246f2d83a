"""A text that comes in parts has the ids of the whole text, wherever it is torn."""

from __future__ import annotations

import random

import pytest
import sentencepiece
from cake_infer.models import stream_encoder
from cake_infer.models.stream_encoder import AHEAD, LEAST, MOST, StreamEncoder
from cake_infer.models.tokenizer import Tokenizer
from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library

PROSE = (
    "He was not what they had for him: this one, that one, or \u201call\u201d of it. It's the one; but not you\u2019d"
    " have had from 1,024 of 3.14159 words!\n\n  \tIndented   and spaced \r\nHello world -- the end...\n"
)
TEXTS = {
    "prose": PROSE * 200,
    "code": "def the_one(of, to):\n    return {x: [y for y in of] for x in to}  # and\n\n\n" * 300,
    "japanese": "\u543e\u8f29\u306f\u732b\u3067\u3042\u308b\u3002\u540d\u524d\u306f\u307e\u3060\u7121\u3044\u3002"
    * 900,
    "accents": "e\u0301le\u0300ve a\u0323\u0302 the \U0001f469\u200d\U0001f469\u200d\U0001f467 of it\ufe0f " * 500,
    "spaces": (" " * 6000 + "the\n") * 4,
    "control": "<|im_start|>the </s> of it <s> and <|im_end|>\n in that" * 300,
    "one word": "the" * 9000,
    "short": "to be",
    "nothing": "",
}


@pytest.fixture(scope="module")
def tokenizers(write_byte_tokenizer, write_spm_tokenizer, tmp_path_factory) -> dict[str, Tokenizer]:
    """Byte-level BPE, with GPT-2's and with Llama 3's words, and SentencePiece's BPE as a tokenizer.json and itself."""
    folder = tmp_path_factory.mktemp("tokenizers")
    write_byte_tokenizer(folder / "byte", 320)
    write_spm_tokenizer(folder / "spm")
    write_byte_tokenizer(folder / "words", 320, bos=False)
    library = Library.from_file(str(folder / "words" / "tokenizer.json"))
    words = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    )
    split = pre_tokenizers.Split(Regex(words), behavior="isolated", invert=False)
    library.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    library.normalizer = normalizers.NFC()
    library.save(str(folder / "words" / "tokenizer.json"))
    (folder / "sentencepiece").mkdir()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(PROSE.splitlines() * 20),
        model_prefix=str(folder / "sentencepiece" / "tokenizer"),
        vocab_size=330,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return {path.name: Tokenizer.load(path) for path in sorted(folder.iterdir())}


def in_parts(tokenizer, text, seed, literals=()):
    """The ids of a text torn at random, and the longest text that was ever held."""
    generator, encoder, ids, longest, at = random.Random(seed), StreamEncoder(tokenizer), [], 0, 0
    while at < len(text):
        end = at + generator.choice([1, 7, 900, 5000, 20000])
        spans = [(max(a, at) - at, min(b, end) - at) for a, b in literals if a < end and b > at]
        ids += encoder.push(text[at:end], spans)
        longest = max(longest, len(encoder._text))
        at = end
    return ids + encoder.finish(), longest


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("kind", ["byte", "spm", "words", "sentencepiece"])
def test_ids_are_those_of_the_whole_text(tokenizers, kind, name):
    text = TEXTS[name]
    expected = tokenizers[kind].encode(text)
    for seed in range(3):
        assert in_parts(tokenizers[kind], text, seed)[0] == expected


@pytest.mark.parametrize("kind", ["byte", "spm", "words"])
def test_control_tokens_in_a_literal_stay_text(tokenizers, kind):
    tokenizer, text = tokenizers[kind], TEXTS["control"]
    spans = [(0, 400), (700, 9000), (len(text) - 60, len(text))]
    expected = tokenizer.with_one_bos(tokenizer.encode_with_literals(text, spans))
    assert in_parts(tokenizer, text, 1, spans)[0] == expected
    assert expected != tokenizer.encode(text)


@pytest.mark.parametrize("kind", ["byte", "spm", "words"])
def test_only_a_part_of_the_text_is_held(tokenizers, kind):
    for name in ("prose", "japanese", "code"):
        ids, longest = in_parts(tokenizers[kind], TEXTS[name] * 3, 2)
        assert longest < LEAST + 3 * 20000, name
        assert len(ids) > 9000
    encoder = StreamEncoder(tokenizers[kind])
    for word in PROSE * 100:
        encoder.push(word)
        assert len(encoder._text) <= LEAST + AHEAD


def test_a_text_that_cannot_be_cut_without_a_trace_is_cut_in_the_end(tokenizers, monkeypatch):
    monkeypatch.setattr(StreamEncoder, "_leaves_no_trace", lambda self, cut: False)
    encoder = StreamEncoder(tokenizers["byte"])
    assert encoder.push("a" * (MOST - 1)) == []
    ids = encoder.push("a") + encoder.finish()
    assert tokenizers["byte"].decode(ids) == "a" * MOST


def test_a_cut_that_changes_tokens_is_not_made(tokenizers, monkeypatch):
    """With no place that is known to be good, only the trial of a cut keeps a word whole."""
    monkeypatch.setattr(stream_encoder, "_PLACES", ())
    text = "the of to in is it was for that on he you with his are as at be this have from or one had " * 200
    assert in_parts(tokenizers["byte"], text, 3)[0] == tokenizers["byte"].encode(text)
