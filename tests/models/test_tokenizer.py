"""Text to ids and back: byte-level and SentencePiece tokenizers, from every kind of file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import sentencepiece
from cake_infer.errors import PromptError, TokenizerError
from cake_infer.models.tokenizer import Tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Reference
from transformers import AutoTokenizer, PreTrainedTokenizerFast

UNKNOWN, BOS, EOS, IM_START, IM_END = range(5)
SPECIAL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
NAUGHTY = (
    "",
    " ",
    "  ",
    "\n\n\t ",
    "Hello the world!",
    " leading and trailing ",
    "e\u0301 a\u0323\u0302 \u0e33",
    "\u732b\u306f\u53ef\u611b\u3044 \U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1eb\U0001f1ee",
    "\u202eright to left\u202c \u05e9\u05dc\u05d5\u05dd",
    "\x00\x01\x7f\u0085\ufeff\ufffd\uffff",
    "a\u2581b \u2581",
    "<s> and </s> and <|im_end|>",
    "<0x0A> is six characters",
    'if (x < y) { return "</S>"; }',
    "Z\u0336\u0321a\u0337l\u0334g\u0335o",
)


@pytest.fixture(scope="module")
def folders(write_byte_tokenizer, write_spm_tokenizer, tmp_path_factory) -> dict[str, Path]:
    folders = {name: tmp_path_factory.mktemp(name) for name in ("byte", "spm", "byte_without_bos", "spm_without_bos")}
    write_byte_tokenizer(folders["byte"])
    write_spm_tokenizer(folders["spm"])
    write_byte_tokenizer(folders["byte_without_bos"], bos=False)
    write_spm_tokenizer(folders["spm_without_bos"], bos=False)
    return folders


@pytest.fixture(scope="module")
def loaded(folders) -> dict[str, Tokenizer]:
    return {name: Tokenizer.load(folder) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def references(folders) -> dict[str, Reference]:
    return {name: Reference.from_file(str(folder / "tokenizer.json")) for name, folder in folders.items()}


def change_json(path: Path, **changes: object) -> None:
    """Keys of a JSON file set anew; None takes a key out."""
    value = json.loads(path.read_text("utf-8"))
    value = {key: item for key, item in {**value, **changes}.items() if item is not None}
    path.write_text(json.dumps(value), encoding="utf-8")


texts = st.lists(
    st.one_of(st.sampled_from([*SPECIAL, " ", "  ", "\n", "\u2581", "the", "Hello"]), st.text(max_size=8)), max_size=8
).map("".join)


@pytest.mark.parametrize("size", [265, 300, 320])
@pytest.mark.parametrize("bos", [True, False])
def test_the_test_tokenizers_have_exactly_the_ids_asked_for(
    write_byte_tokenizer, write_spm_tokenizer, tmp_path, size, bos
):
    text = 'Hello the world! 猫 e\u0301 <|im_start|>{"x": 1}\n'
    for name, write in (("byte", write_byte_tokenizer), ("spm", write_spm_tokenizer)):
        write(tmp_path / name, size, bos=bos)
        tokenizer = Reference.from_file(str(tmp_path / name / "tokenizer.json"))
        assert sorted(tokenizer.get_vocab().values()) == list(range(size))
        ids = tokenizer.encode(text).ids
        assert (ids[0] == 1) == bos
        assert 3 in ids
        expected = text if name == "byte" else text.replace("<|im_start|>", "<|im_start|> ")
        assert tokenizer.decode(ids, skip_special_tokens=False).removeprefix("<s>").lstrip() == expected
        ours = Tokenizer.load(tmp_path / name)
        assert (ours.vocab_size, ours.valid_ids, ours.unused_ids) == (size, size, ())


# Encoding


@pytest.mark.parametrize("kind", ["byte", "spm"])
@settings(deadline=None)
@given(text=texts)
def test_ids_are_those_of_the_tokenizers_library(loaded, references, kind, text):
    assert loaded[kind].encode(text, add_bos=False) == references[kind].encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", ["byte", "spm"])
@settings(deadline=None)
@given(text=texts)
def test_encoding_part_by_part_gives_the_same_ids_as_the_library_does_in_one(loaded, kind, text):
    tokenizer = loaded[kind]
    assert tokenizer._encode_in_parts(text, (), False) == tokenizer.encode(text, add_bos=False)


@pytest.mark.parametrize("name", ["byte", "spm", "byte_without_bos", "spm_without_bos"])
@pytest.mark.parametrize("text", NAUGHTY)
def test_text_without_special_tokens_comes_back_whole(loaded, name, text):
    tokenizer = loaded[name]
    ids = tokenizer.encode(text, allow_special=False)
    expected = text.replace("\u2581", " ") if "spm" in name else text
    assert tokenizer.decode(ids) == expected
    assert set(ids[1:] if tokenizer.adds_bos else ids).isdisjoint(tokenizer.special_ids)


def test_a_prompt_has_one_bos_where_the_tokenizer_adds_one(loaded):
    for name in ("byte", "spm"):
        tokenizer = loaded[name]
        for text in ("", "Hello", "<s>Hello", "<s><s> Hello", " <s>Hello"):
            ids = tokenizer.encode(text)
            assert ids[0] == BOS, text
            assert ids[1:2] != [BOS], text
        assert tokenizer.encode("<s>Hello")[1:] == tokenizer.encode("<s>Hello", add_bos=False)[1:]
        assert tokenizer.encode("Hello")[1:] == tokenizer.encode("Hello", add_bos=False)


def test_a_prompt_has_no_bos_where_the_tokenizer_adds_none(loaded):
    for name in ("byte_without_bos", "spm_without_bos"):
        tokenizer = loaded[name]
        assert tokenizer.encode("") == []
        assert BOS not in tokenizer.encode("Hello")
        assert tokenizer.encode("<s>Hello").count(BOS) == 1
        assert tokenizer.bos_id == BOS


@pytest.mark.parametrize(("said", "processor", "adds"), [(True, False, True), (False, True, False), (None, True, True)])
def test_add_bos_token_decides_and_the_post_processor_where_it_is_silent(
    write_byte_tokenizer, tmp_path, said, processor, adds
):
    write_byte_tokenizer(tmp_path, bos=processor)
    change_json(tmp_path / "tokenizer_config.json", add_bos_token=said)
    assert (Tokenizer.load(tmp_path).encode("Hello")[0] == BOS) == adds


def test_without_tokenizer_config_the_post_processor_names_bos(write_spm_tokenizer, tmp_path):
    write_spm_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.bos_id, tokenizer.adds_bos) == (BOS, True)


def test_no_text_is_cut_or_padded_as_tokenizer_json_may_say(write_byte_tokenizer, tmp_path):
    write_byte_tokenizer(tmp_path)
    library = Reference.from_file(str(tmp_path / "tokenizer.json"))
    library.enable_truncation(4)
    library.enable_padding(length=8)
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.decode(tokenizer.encode("Hello the world")) == "Hello the world"
    assert len(tokenizer.encode("H")) == 2


def test_control_tokens_in_a_text_are_ids_or_plain_text_as_asked(loaded):
    for tokenizer in loaded.values():
        text = "one</s><|im_end|> two"
        assert {EOS, IM_END} <= {*tokenizer.encode(text)}
        plain = tokenizer.encode(text, add_bos=False, allow_special=False)
        assert {EOS, IM_END}.isdisjoint(plain)
        assert tokenizer.decode(plain) == text


def test_a_control_token_that_merges_could_make_is_still_plain_text(tmp_path):
    vocab = {token: index for index, token in enumerate(["<s>", "<", "s", ">", "s>", "a"])}
    library = Reference(models.BPE(vocab, [("s", ">"), ("<", "s>")]))
    library.add_special_tokens(["<s>"])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("a<s>a") == [5, 0, 5]
    assert tokenizer.encode("a<s>a", allow_special=False) == [5, 1, 4, 5]


def test_white_space_among_the_added_tokens_is_ordinary_text(tmp_path):
    library = Reference(models.BPE({token: index for index, token in enumerate("a <>eot\n")}, []))
    library.add_special_tokens(["<eot>"])
    library.add_tokens([AddedToken("\n\n", normalized=False)])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    newlines = tokenizer.token_id("\n\n")
    assert [token.content for token in tokenizer.control_tokens] == ["<eot>"]
    assert tokenizer.encode("a\n\na", allow_special=False) == [0, newlines, 0]
    assert tokenizer.encode("a\n\n<eot>", allow_special=False) == [0, newlines, 2, 4, 5, 6, 3]


def test_lone_surrogates_are_refused_with_their_place(loaded):
    for tokenizer in loaded.values():
        for allow_special in (True, False):
            with pytest.raises(PromptError, match=r"U\+D800 at byte 6"):
                tokenizer.encode("\u00e9</s>\ud800bad", allow_special=allow_special)


# SentencePiece's spaces


def test_spaces_are_encoded_as_sentencepiece_models_expect(loaded):
    tokenizer = loaded["spm"]
    names = [tokenizer.token(index) for index in tokenizer.encode("Hello world", add_bos=False)]
    assert names == ["▁Hello", "▁world"]
    names = [tokenizer.token(index) for index in tokenizer.encode("<|im_start|> a<|im_end|>the", add_bos=False)]
    assert names == ["<|im_start|>", "▁", "▁a", "<|im_end|>", "▁the"]


def test_text_that_goes_on_gets_no_prefix_space(loaded):
    tokenizer = loaded["spm"]

    def names(text: str, continues: bool) -> list[str]:
        return [tokenizer.token(index) for index in tokenizer.encode_with_literals(text, (), continues=continues)]

    assert names("the</s>the", continues=True) == ["t", "h", "e", "</s>", "▁the"]
    assert names(" the</s>the", continues=True) == ["▁the", "</s>", "▁the"]
    assert names("the</s>the", continues=False) == ["▁the", "</s>", "▁the"]


def test_a_prefix_for_the_first_text_only_is_respected(write_spm_tokenizer, tmp_path):
    """The tokenizer.json files of Mistral put a space before the text, and none after control tokens."""
    write_spm_tokenizer(tmp_path)
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    change_json(tmp_path / "tokenizer.json", normalizer=None, pre_tokenizer=metaspace)
    tokenizer = Tokenizer.load(tmp_path)
    reference = Reference.from_file(str(tmp_path / "tokenizer.json"))
    for text in ("the", " the", "  the", "<s>the", "the</s>the<s> the", "▁the", "</s></s>the"):
        expected = reference.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_bos=False) == expected
        assert tokenizer._encode_in_parts(text, (), False) == expected
    names = [tokenizer.token(index) for index in tokenizer.encode("the</s>the")]
    assert names == ["<s>", "▁the", "</s>", "t", "h", "e"]


# Decoding


def test_decoding_leaves_out_special_tokens_unless_asked(loaded):
    for tokenizer in loaded.values():
        ids = [BOS, *tokenizer.encode("Hello", add_bos=False), IM_END]
        assert tokenizer.decode(ids) == "Hello"
        assert tokenizer.decode(ids, skip_special=False).replace(" ", "") == "<s>Hello<|im_end|>"


def test_ids_the_tokenizer_does_not_have_decode_to_nothing(loaded):
    for tokenizer in loaded.values():
        hello = tokenizer.encode("Hello", add_bos=False)
        assert tokenizer.decode([310, 300, *hello, -1, 10**9, 2**40]) == "Hello"
        assert (tokenizer.token(300), tokenizer.token(-1)) == ("", "")


@pytest.mark.parametrize("kind", ["byte", "spm"])
@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 299), max_size=12))
def test_decoding_agrees_with_the_library_wherever_the_bytes_are_valid(loaded, references, kind, ids):
    text = loaded[kind].decode(ids)
    if kind == "byte" or "\ufffd" not in text:
        assert text == references[kind].decode(ids)
    else:  # the library replaces the whole run of byte pieces, which must not be longer in characters
        assert len(text) <= len(references[kind].decode(ids))


def test_valid_characters_beside_invalid_bytes_survive(loaded):
    tokenizer = loaded["spm"]
    ids = [
        tokenizer.token_id(piece) for piece in ("<0x0A>", "<0xE7>", "<0x8C>", "<0xAB>", "<0xFF>", "<0xE7>", "<0x8C>")
    ]
    assert tokenizer.decode(ids) == "\n\u732b\ufffd\ufffd\ufffd"


def test_a_decoder_that_looks_at_neighbours_is_left_to_the_library(tmp_path):
    library = Reference(models.WordLevel({"<unk>": 0, "one": 1, "two": 2}, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.decode([1, 2, 99, 1]) == "one two one"
    detokenizer = tokenizer.detokenizer([1])
    assert [detokenizer.push(index) for index in (2, 99, 1)] == [" two", "", " one"]


# Which ids there are


def test_more_tokens_than_embedding_rows_are_refused_with_the_id(loaded):
    tokenizer = loaded["byte"]
    tokenizer.check_vocabulary(300)
    tokenizer.check_vocabulary(320)
    with pytest.raises(TokenizerError, match=r"ids up to 299.*296 embedding rows, so id 296"):
        tokenizer.check_vocabulary(296)


def test_ids_without_a_token_are_known(tmp_path):
    library = Reference(models.BPE({"a": 0, "b": 1, "c": 5}, []))
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.valid_ids, tokenizer.unused_ids) == (6, 3, (2, 3, 4))


def test_all_end_tokens_are_known(write_byte_tokenizer, tmp_path):
    write_byte_tokenizer(tmp_path)
    assert Tokenizer.load(tmp_path).eos_ids == (EOS, IM_END)
    change_json(tmp_path / "tokenizer_config.json", eos_token="<|im_end|>")
    assert Tokenizer.load(tmp_path).eos_ids == (IM_END,)
    change_json(tmp_path / "tokenizer_config.json", eos_token=None)
    assert Tokenizer.load(tmp_path).eos_ids == (IM_END,)
    special = {"eos_token": {"content": "</s>"}}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(special), encoding="utf-8")
    assert Tokenizer.load(tmp_path).eos_ids == (EOS, IM_END)


def test_an_ordinary_token_that_looks_like_an_end_of_turn_is_none(write_byte_tokenizer, tmp_path):
    write_byte_tokenizer(tmp_path)
    added = json.loads((tmp_path / "tokenizer.json").read_text("utf-8"))["added_tokens"]
    added[IM_END]["special"] = False
    change_json(tmp_path / "tokenizer.json", added_tokens=added)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.eos_ids == (EOS,)
    assert tokenizer.decode([IM_END]) == "<|im_end|>"


def test_added_tokens_of_tokenizer_config_are_added(write_byte_tokenizer, tmp_path):
    write_byte_tokenizer(tmp_path)
    added = {"300": {"content": "<|eot_id|>", "special": True}, "301": {"content": "<tool>", "special": False}}
    change_json(tmp_path / "tokenizer_config.json", added_tokens_decoder=added)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("<|eot_id|><tool>", add_bos=False) == [300, 301]
    assert tokenizer.eos_ids == (EOS, IM_END, 300)
    assert tokenizer.decode([300, 301]) == "<tool>"


# tokenizer.model


def train(folder: Path, **options: object) -> bytes:
    """A SentencePiece BPE model with byte fallback, as Llama 2's was made."""
    sentences = [
        "Hello the world and the other words",
        "[INST] a question [/INST] an answer",
        "low lower lowest 123",
    ] * 3
    (folder / "corpus.txt").write_text("\n".join(sentences), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "corpus.txt"),
        model_prefix=str(folder / "trained"),
        model_type="bpe",
        vocab_size=340,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
        **options,
    )
    return (folder / "trained.model").read_bytes()


@pytest.fixture(scope="module")
def trained_model(tmp_path_factory) -> bytes:
    return train(tmp_path_factory.mktemp("trained"), user_defined_symbols=["<mask>"])


def as_tokenizer_json(model: bytes) -> Reference:
    """The tokenizer.json that such a model comes with: merges by score, a prefix before every text."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    pieces = [processor.id_to_piece(index) for index in range(processor.get_piece_size())]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = []
    for piece in pieces[4 + 256 :]:  # <unk> <s> </s> <mask>, then the bytes
        splits = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
        merges += [(vocab[piece], split) for split in splits if split[0] in vocab and split[1] in vocab]
    ordered = [split for _, split in sorted(merges)]
    library = Reference(models.BPE(vocab, ordered, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    library.add_tokens([AddedToken("<mask>", normalized=False)])
    return library


@pytest.fixture(scope="module")
def from_model(trained_model, tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("model")
    (folder / "tokenizer.model").write_bytes(trained_model)
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def model_reference(trained_model) -> Reference:
    return as_tokenizer_json(trained_model)


@settings(deadline=None)
@given(text=texts | st.sampled_from(["[INST] a [/INST]", "the lowest<mask>the", "<unk> a"]))
def test_tokenizer_model_gives_the_ids_of_tokenizer_json(from_model, model_reference, text):
    expected = model_reference.encode(text, add_special_tokens=False).ids
    assert from_model.encode(text, add_bos=False) == expected
    assert from_model.encode(text)[0] == BOS


@pytest.mark.parametrize("text", NAUGHTY)
def test_tokenizer_model_takes_any_text_back_and_forth(from_model, text):
    ids = from_model.encode(text, allow_special=False)
    assert ids[0] == BOS
    assert from_model.special_ids.isdisjoint(ids[1:])
    assert from_model.decode(ids) == text.replace("▁", " ")


def test_tokenizer_model_names_its_own_special_tokens(from_model):
    assert (from_model.bos_id, from_model.eos_ids, from_model.special_ids) == (BOS, (EOS,), {UNKNOWN, BOS, EOS})
    assert from_model.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert from_model.vocab_size == 340
    mask = from_model.token_id("<mask>")
    assert from_model.encode("<mask>", add_bos=False) == [mask]
    assert mask not in from_model.encode("a<mask>b", allow_special=False)
    assert from_model.decode(from_model.encode("a<mask>b", allow_special=False)) == "a<mask>b"


def test_tokenizer_model_takes_added_tokens_from_the_files_beside_it(trained_model, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(trained_model)
    (tmp_path / "added_tokens.json").write_text('{"<|im_start|>": 340, "<|im_end|>": 341}', encoding="utf-8")
    config = {
        "add_bos_token": False,
        "eos_token": {"content": "<|im_end|>"},
        "additional_special_tokens": ["<|im_start|>"],
        "added_tokens_decoder": {"342": {"content": "<|sep|>", "special": True, "rstrip": True}},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer = Tokenizer.load(tmp_path)
    the = tokenizer.encode("the")
    assert tokenizer.vocab_size == 343
    assert tokenizer.encode("<|im_start|>the<|im_end|>") == [340, *the, 341]
    assert tokenizer.encode("<|sep|>  the") == [342, *the]
    assert tokenizer.eos_ids == (341,)
    assert {340, 341, 342} <= tokenizer.special_ids
    assert tokenizer.decode([340, *the, 341]) == "the"


def test_tokenizer_model_of_mistral_puts_its_prefix_at_the_start_only(trained_model, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(trained_model)
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}', encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text('{"legacy": false}', encoding="utf-8")
    reference = as_tokenizer_json(trained_model)
    reference.normalizer = None
    reference.pre_tokenizer = pre_tokenizers.Metaspace("▁", "first", split=False)
    tokenizer = Tokenizer.load(tmp_path)
    for text in ("the", " the", "<s>the", "the</s> the</s>the", "▁the"):
        assert tokenizer.encode(text, add_bos=False) == reference.encode(text, add_special_tokens=False).ids


def test_tokenizer_model_with_control_pieces_for_turns_puts_its_prefix_at_the_start_only(tmp_path):
    model = train(tmp_path, control_symbols=["[INST]", "[/INST]"])
    (tmp_path / "tokenizer.model").write_bytes(model)
    tokenizer = Tokenizer.load(tmp_path)
    names = [tokenizer.token(index) for index in tokenizer.encode("[INST] the[/INST]the")]
    assert names == ["<s>", "[INST]", "▁the", "[/INST]", "the"]
    (tmp_path / "tokenizer_config.json").write_text('{"legacy": true}', encoding="utf-8")
    tokenizer = Tokenizer.load(tmp_path)
    names = [tokenizer.token(index) for index in tokenizer.encode("[INST] the[/INST]the")]
    assert names == ["<s>", "[INST]", "▁", "▁the", "[/INST]", "▁the"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.model", b"IQ== 0\nIg== 1\n", "tiktoken.*tokenizer.json"),
        ("tokenizer.model", b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "git lfs pull"),
        ("tokenizer.model", b"\x0a\x0bnonsense", "not a SentencePiece model"),
        ("tokenizer.model", b"", "empty"),
        ("tokenizer.json", b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "git lfs pull"),
        ("tokenizer.json", b'{"model": {"type": "BP', "tokenizer.json: .*download it again"),
        ("tokenizer.json", b"\xff\xfe", "tokenizer.json: cannot be read"),
        ("tekken.json", b"{}", "tekken.json is of a kind that is not supported"),
        ("README.md", b"", "no tokenizer.json or tokenizer.model"),
    ],
)
def test_files_that_cannot_be_used_are_refused_by_name(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TokenizerError, match=message) as error:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", ["{", "[]", '{"added_tokens_decoder": {"x": {}}}'])
def test_a_broken_tokenizer_config_is_refused(write_byte_tokenizer, tmp_path, content):
    write_byte_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content, encoding="utf-8")
    with pytest.raises(TokenizerError):
        Tokenizer.load(tmp_path)


# vocab.json and merges.txt


def split_into_vocabulary_files(source: Path, folder: Path, tokenizer_class: str) -> None:
    model = json.loads((source / "tokenizer.json").read_text("utf-8"))["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]), encoding="utf-8")
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n", encoding="utf-8")
    shutil.copy(source / "tokenizer_config.json", folder)
    change_json(folder / "tokenizer_config.json", tokenizer_class=tokenizer_class)


def test_vocab_and_merges_of_qwen_are_read_as_transformers_does(folders, tmp_path):
    split_into_vocabulary_files(folders["byte_without_bos"], tmp_path, "Qwen2Tokenizer")
    ours, theirs = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in (*NAUGHTY, "the 1234 they'LL\r\n\r\n  be", "e\u0301<|im_end|> the"):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False), text


def test_vocab_and_merges_of_gpt2_are_read_as_the_whole_file(folders, references, tmp_path):
    split_into_vocabulary_files(folders["byte"], tmp_path, "GPT2TokenizerFast")
    change_json(tmp_path / "tokenizer_config.json", additional_special_tokens=["<|im_start|>", "<|im_end|>"])
    ours = Tokenizer.load(tmp_path)
    for text in NAUGHTY:
        assert ours.encode(text, add_bos=False) == references["byte"].encode(text, add_special_tokens=False).ids


def test_vocab_and_merges_of_an_unknown_class_are_refused(folders, tmp_path):
    split_into_vocabulary_files(folders["byte"], tmp_path, "BlenderTokenizer")
    with pytest.raises(TokenizerError, match=r"BlenderTokenizer.*tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_transformers_reads_the_test_tokenizers_alike(folders, loaded):
    for name in ("byte", "spm"):
        theirs = PreTrainedTokenizerFast.from_pretrained(folders[name])
        for text in ("Hello the world", "", "</s> the"):
            assert loaded[name].encode(text) == theirs.encode(text), (name, text)
