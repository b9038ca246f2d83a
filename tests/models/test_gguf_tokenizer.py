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
