from __future__ import annotations

import pytest
from tokenizers import Tokenizer as Reference


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
