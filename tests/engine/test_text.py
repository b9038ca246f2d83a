"""Replies as a stream of certain text, and input that is text or is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from cake_infer.engine.text import TextReader, TextStream, check_text, decode_input
from cake_infer.errors import OptionError, PromptError
from cake_infer.models.tokenizer import Tokenizer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers

BOS, EOS, IM_START, IM_END = range(1, 5)
KINDS = ("byte", "spm")
NAUGHTY = (
    "Hello the world!",
    " a\n\n  b\t",
    "\U0001f44d\U0001f3fd e\u0301 a\u0323\u0302 \u0e17\u0e35\u0e48",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1eb\U0001f1ee",
    "猫は可愛い。我爱北京天安门",
    "\u202e\u05e9\u05dc\u05d5\u05dd\u202c Z\u0336\u0321a\u0337",
    "\x00\x7f\ufeff\ufffd\uffff\U0010ffff",
    '{"x": "▁ and <0x0A> and </s>"}',
)


@pytest.fixture(scope="module")
def tokenizers(write_byte_tokenizer, write_spm_tokenizer, tmp_path_factory) -> dict[str, Tokenizer]:
    folders: dict[str, Path] = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    write_byte_tokenizer(folders["byte"])
    write_spm_tokenizer(folders["spm"])
    return {kind: Tokenizer.load(folder) for kind, folder in folders.items()}


def ids_of(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    ids = [tokenizer.token_id(token) for token in tokens]
    assert None not in ids
    return [index for index in ids if index is not None]


def stream_all(tokenizer: Tokenizer, ids: list[int], prompt: list[int] = [], stop: tuple[str, ...] = ()) -> list[str]:  # noqa: B006
    stream = TextStream(tokenizer, prompt, stop)
    pieces = [stream.push(index) for index in ids]
    pieces.append(stream.finish())
    assert stream.text == "".join(pieces)
    return pieces


# The joined stream is the text


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=200)
@given(prompt=st.lists(st.integers(0, 319), max_size=6), ids=st.lists(st.integers(-2, 330), max_size=12))
@example(prompt=[], ids=[])
def test_the_joined_stream_is_the_text_of_everything_minus_the_prompt(tokenizers, kind, prompt, ids):
    tokenizer = tokenizers[kind]
    joined = "".join(stream_all(tokenizer, ids, prompt))
    before, after = tokenizer.decode(prompt), tokenizer.decode(prompt + ids)
    if after.startswith(before):
        assert joined == after[len(before) :]
    else:  # the prompt ended inside a character, which the reply completes
        assert before.endswith("\ufffd")
        assert after.endswith(joined)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", NAUGHTY)
def test_any_text_comes_through_whole_and_without_broken_characters(tokenizers, kind, text):
    tokenizer = tokenizers[kind]
    expected = text.replace("▁", " ") if kind == "spm" else text
    ids = tokenizer.encode(text, allow_special=False)
    assert "".join(stream_all(tokenizer, ids)) == expected
    for cut in range(len(ids)):
        pieces = stream_all(tokenizer, ids[cut:], ids[:cut])
        start = tokenizer.decode(ids[:cut])
        if expected.startswith(start):
            assert start + "".join(pieces) == expected
            assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


def test_a_character_comes_with_its_last_byte_and_not_before(tokenizers):
    byte, spm = tokenizers["byte"], tokenizers["spm"]
    emoji = spm.encode("😀", add_bos=False)[-4:]
    assert stream_all(spm, emoji, [BOS, 292]) == ["", "", "", "😀", ""]
    assert stream_all(byte, byte.encode("é😀x", add_bos=False)) == ["", "é", "", "", "", "😀", "x", ""]
    newline = ids_of(spm, "<0x0A>")
    assert stream_all(spm, newline * 3, [292]) == ["\n", "\n", "\n", ""]


def test_leading_spaces_of_sentencepiece(tokenizers):
    tokenizer = tokenizers["spm"]
    ids = ids_of(tokenizer, "▁Hello", "▁world", "!", "<0x0A>", "▁x", '{"')
    assert stream_all(tokenizer, ids) == ["Hello", " world", "!", "\n", " x", '{"', ""]
    assert stream_all(tokenizer, ids, [BOS]) == ["Hello", " world", "!", "\n", " x", '{"', ""]
    prompt = [BOS, *ids_of(tokenizer, "▁the")]
    assert stream_all(tokenizer, ids, prompt) == [" Hello", " world", "!", "\n", " x", '{"', ""]
    assert stream_all(tokenizer, ids[5:], prompt)[0] == '{"'
    assert stream_all(tokenizer, ids[5:])[0] == '{"'


def test_special_tokens_and_ids_beyond_the_vocabulary_are_silent(tokenizers):
    for tokenizer in tokenizers.values():
        h = tokenizer.encode("H", add_bos=False)
        assert "".join(stream_all(tokenizer, [BOS, IM_START, *h, 310, 10**12, -5, IM_END, EOS])) == "H"


def test_an_unfinished_character_is_flushed_as_replacement(tokenizers):
    byte, spm = tokenizers["byte"], tokenizers["spm"]
    cat = byte.encode("猫", add_bos=False)
    assert stream_all(byte, cat[:2]) == ["", "", "\ufffd"]
    assert stream_all(spm, ids_of(spm, "<0xE7>", "<0x8C>")) == ["", "", "\ufffd\ufffd"]
    assert stream_all(byte, [*cat[:2], *byte.encode("a", add_bos=False)]) == ["", "", "\ufffda", ""]


def test_a_character_begun_in_the_prompt_is_completed(tokenizers):
    tokenizer = tokenizers["byte"]
    cat = tokenizer.encode("猫", add_bos=False)
    assert stream_all(tokenizer, cat[2:], cat[:2]) == ["猫", ""]
    a = tokenizer.encode("a", add_bos=False)
    assert stream_all(tokenizer, a, cat[:2]) == ["a", ""]  # the prompt's own text shows the broken character


# Stop strings


def brute_force(text: str, stop: tuple[str, ...]) -> str:
    """Text before the stop string that is complete first, letter by letter."""
    for end in range(len(text) + 1):
        starts = [end - len(s) for s in stop if text[:end].endswith(s)]
        if starts:
            return text[: min(starts)]
    return text


stops = st.lists(st.text("ab猫\n ", min_size=1, max_size=4), max_size=3).map(tuple)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=200)
@given(text=st.text("ab猫\n ", max_size=12), stop=stops, final=st.booleans())
def test_text_ends_before_the_first_stop_string_wherever_tokens_begin(tokenizers, kind, text, stop, final):
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(text, add_bos=False)
    stream = TextStream(tokenizer, (), stop)
    expected = brute_force(text, stop)
    got = ""
    for index in ids:
        got += stream.push(index)
        assert expected.startswith(got)
    assert got + stream.finish() == expected
    assert stream.stopped == any(s in text for s in stop)
    assert stream.push(ids[0] if ids else 5) == "" or not stream.stopped


@settings(deadline=None)
@given(data=st.data(), stop=stops)
def test_a_stop_string_is_seen_alike_however_the_text_is_cut_into_tokens(tokenizers, data, stop):
    tokenizer = tokenizers["spm"]
    pieces = data.draw(
        st.lists(st.sampled_from(["a", "▁a", "▁", "h", "▁th", "▁the", "<0x0A>", "e", "{", '{"', '"']), max_size=8)
    )
    stop = (*stop, *data.draw(st.lists(st.sampled_from(["the", '{"', "a\n", " th", 'e"', "\n"]), max_size=2)))
    text = "".join(pieces).replace("▁", " ").replace("<0x0A>", "\n")
    stream = TextStream(tokenizer, tokenizer.encode("x"), stop)
    got = "".join([stream.push(index) for index in ids_of(tokenizer, *pieces)]) + stream.finish()
    assert got == brute_force(text, stop)


def test_of_stop_strings_in_one_token_the_first_to_be_complete_counts(tokenizers):
    tokenizer = tokenizers["spm"]
    stream = TextStream(tokenizer, [292], ("the", "h"))
    assert stream.push(ids_of(tokenizer, "▁the")[0]) == " t"
    stream = TextStream(tokenizer, [292], ("e", "the"))
    assert stream.push(ids_of(tokenizer, "▁the")[0]) == " "


def test_the_name_of_an_ordinary_token_is_not_a_stop_string(tokenizers):
    for kind, space in (("byte", "Ġ"), ("spm", "▁")):
        ids = tokenizers[kind].encode("a b", add_bos=False)
        assert "".join(stream_all(tokenizers[kind], ids, [], (space,))) == "a b"


def test_what_may_begin_a_stop_string_is_held_back_until_it_is_known(tokenizers):
    tokenizer = tokenizers["byte"]
    ids = tokenizer.encode("abEND-ENOUGH-END!", add_bos=False)
    stream = TextStream(tokenizer, (), ("END!", "NOTHING"))
    pieces = [stream.push(index) for index in ids]
    assert pieces == ["a", "b", "", "", "", "END-", "", "", "E", "NOU", "G", "H", "-", "", "", "", ""]
    assert stream.stopped
    assert stream.finish() == ""
    assert stream.text == "abEND-ENOUGH-"
    held = TextStream(tokenizer, (), ("END!",))
    assert [held.push(index) for index in tokenizer.encode("xEN", add_bos=False)] == ["x", "", ""]
    assert held.finish() == "EN"
    assert not held.stopped


def test_a_stop_string_in_the_flushed_rest_counts(tokenizers):
    tokenizer = tokenizers["byte"]
    stream = TextStream(tokenizer, (), ("\ufffd",))
    assert [stream.push(index) for index in tokenizer.encode("a猫", add_bos=False)[:2]] == ["a", ""]
    assert stream.finish() == ""
    assert stream.stopped


def test_a_stop_string_may_name_a_special_token(tokenizers):
    for tokenizer in tokenizers.values():
        a = tokenizer.encode("a", add_bos=False)
        stream = TextStream(tokenizer, (), ("<|im_end|>",))
        assert "".join(stream.push(index) for index in [*a, EOS, *a, IM_END, *a]).replace(" ", "") == "aa"
        assert stream.stopped
        spelled = TextStream(tokenizer, (), ("<|im_end|>",))
        for index in tokenizer.encode("a<|im_end|>", add_bos=False, allow_special=False):
            spelled.push(index)
        assert (spelled.text, spelled.stopped) == ("a", True)


def test_an_empty_stop_string_is_refused(tokenizers):
    with pytest.raises(OptionError, match="empty"):
        TextStream(tokenizers["byte"], (), ("a", ""))


def test_each_token_is_decoded_once(tokenizers, monkeypatch):
    """Not the whole reply again for every token: the ids that are looked at are as many as were pushed."""
    for tokenizer in tokenizers.values():
        ids = tokenizer.encode("the 猫 " * 50, add_bos=False)
        looked_at = 0

        def count(index: int, real: Callable[[int], bytes] = tokenizer.token_bytes) -> bytes:
            nonlocal looked_at
            looked_at += 1
            return real(index)

        monkeypatch.setattr(tokenizer, "token_bytes", count)
        monkeypatch.setattr(tokenizer, "decode", None)
        text = "".join(stream_all(tokenizer, ids, ids, ("never this",)))
        assert text.count("猫") == 50
        assert len(ids) <= looked_at <= len(ids) + 8


def test_a_decoder_that_looks_at_neighbours_streams_too(tmp_path):
    library = Library(models.WordLevel({"<unk>": 0, "one": 1, "two": 2}, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert stream_all(tokenizer, [2, 1] * 10, [1]) == [" two", " one"] * 10 + [""]


# Input


def test_input_is_utf8_text_without_its_mark_and_with_plain_line_ends():
    assert decode_input("a\r\nb\rc\n\r\n猫".encode(), "x") == "a\nb\rc\n\n猫"
    assert decode_input(b"\xef\xbb\xbfabc", "x") == "abc"
    assert decode_input("a\ufeffb \x1b[31m\x7f\t".encode(), "x") == "a\ufeffb \x1b[31m\x7f\t"
    assert decode_input(b"", "x") == ""


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"abc\xff\xfe def", r"doc\.txt: is not UTF-8 text \(0xff at byte 3\)"),
        (b"\xef\xbb\xbfab\xc3(", r"0xc3 at byte 5"),
        ("é".encode("latin-1"), r"0xe9 at byte 0"),
        (b"ok \xed\xa0\x80", r"0xed at byte 3"),
        ("Hello".encode("utf-16"), r"is UTF-16"),
        ("Hello".encode("utf-16-be"), r"looks like UTF-16"),
        ("Привет, мир".encode("utf-16-le"), r"NUL \(at byte"),
        ("Hello, this is text\n".encode("utf-16-le"), r"looks like UTF-16"),
        ("Hello".encode("utf-32"), r"is UTF-32"),
        (b"\x7fELF\x02\x01\x01\x00\x00\x00", r"binary file.*NUL \(at byte 7\)"),
        (b"text and then\x00more", r"binary file.*NUL \(at byte 13\)"),
        (b"abc\x00def\x00", r"binary file.*NUL \(at byte 3\)"),
        (b"a\x00b", r"binary file.*NUL \(at byte 1\)"),
        ("Größe\0Maß".encode(), r"binary file.*NUL \(at byte 7\)"),
    ],
)
def test_input_that_is_not_utf8_text_is_refused_with_name_and_offset(data, message):
    with pytest.raises(PromptError, match=message) as error:
        decode_input(data, "doc.txt")
    assert str(error.value).startswith("doc.txt: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", [None, 3, b"bytes", ["text"]])
def test_what_is_no_text_is_refused_with_its_name(value):
    with pytest.raises(PromptError, match="the message must be a text"):
        check_text(value, "the message")


def test_lone_surrogates_are_refused_with_name_and_offset():
    assert check_text("fine 猫 \U0001f600", "prompt") == "fine 猫 \U0001f600"
    with pytest.raises(PromptError, match=r"^prompt: .*U\+D800 at byte 3\)$"):
        check_text("é!\ud800bad", "prompt")
    with pytest.raises(PromptError, match=r"0xff at byte 2\)$"):
        check_text(b"ok\xff".decode("utf-8", "surrogateescape"), "input line")


def read_bit_by_bit(data, step):
    reader = TextReader("doc.txt")
    read = [reader.push(data[at : at + step]) for at in range(0, len(data), step)]
    return "".join(read) + reader.finish()


@pytest.mark.parametrize("step", [1, 2, 3, 7])
def test_a_file_whose_bytes_come_bit_by_bit_has_the_text_of_the_whole(step):
    for text in ("\ufeffa\r\nb\rc\r\r\n\U0001f469 \u732b\n", "\r\n", "\ufeff", "", "\u732b", "a\ufeff\r"):
        assert read_bit_by_bit(text.encode(), step) == decode_input(text.encode(), "doc.txt")
    for data in (b"abc\xff" * 3, b"ab\x00cd" + b"x" * 9, "\u732b".encode()[:2], b"abcde\xe7\x8c", b"ab\xe7x" * 4):
        with pytest.raises(PromptError) as whole:
            decode_input(data, "doc.txt")
        with pytest.raises(PromptError) as parts:
            read_bit_by_bit(data, step)
        assert str(parts.value) == str(whole.value), data
