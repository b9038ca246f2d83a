"""Turn a GGUF file into a model folder: config.json, tokenizer files and safetensors."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ..errors import WeightsError
from .gguf_config import convert_config
from .gguf_file import GgufFile
from .gguf_tokenizer import GgufTokenizer
from .gguf_weights import DTYPES, check_dtype, expected_shapes, write_weights
from .progress import OnProgress
from .staging import check_disk_space, check_new_folder, staged_folder


def import_gguf(
    path: str | Path, out: str | Path, *, dtype: str = "bfloat16", on_progress: OnProgress | None = None
) -> Path:
    """Import a Llama, Mistral, Qwen2, Qwen3 or Gemma GGUF into the new folder `out` and return it.

    Weights are dequantised and stored as `dtype` ("bfloat16", "float16" or "float32"). `out` appears when it is
    complete; an error or an interrupt leaves nothing. Raises CakeError for an `out` that holds something,
    WeightsError for a broken file, UnsupportedModel or TokenizerError for what the engine does not have.
    """
    check_dtype(dtype)
    target = Path(os.path.expanduser(out))
    check_new_folder(target)
    file = GgufFile(Path(os.path.expanduser(path)))
    documents = model_documents(file, dtype)
    width = DTYPES[dtype][1].itemsize
    shapes = expected_shapes(documents["config.json"]).values()
    check_disk_space(target.parent, sum(_product(shape) for shape in shapes) * width, f"importing {file.path.name}")
    with staged_folder(target) as staging:
        write_model(file, documents, staging, dtype, on_progress)
    return target


def model_documents(file: GgufFile, dtype: str) -> dict[str, dict[str, Any]]:
    """The JSON files of the model folder by name, without touching the weights."""
    config = convert_config(file, dtype)
    tokenizer = GgufTokenizer(file)
    if len(tokenizer.tokens) > config["vocab_size"]:
        raise WeightsError(
            f"{file.path}: {len(tokenizer.tokens)} tokens, but tensor token_embd.weight has {config['vocab_size']} rows"
        )
    ends = tokenizer.end_ids
    ids: dict[str, Any] = {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": tokenizer.padding_id,
    }
    return {
        "config.json": config | ids,
        "generation_config.json": {name: value for name, value in ids.items() if value is not None},
        "tokenizer.json": tokenizer.tokenizer_json(),
        "tokenizer_config.json": tokenizer.tokenizer_config(config["max_position_embeddings"]),
    }


def write_model(
    file: GgufFile, documents: dict[str, dict[str, Any]], folder: Path, dtype: str, on_progress: OnProgress | None
) -> None:
    """Write documents and weights into an existing folder."""
    for name, document in documents.items():
        text = json.dumps(document, ensure_ascii=False, indent=None if name == "tokenizer.json" else 2)
        (folder / name).write_text(text + "\n", encoding="utf-8")
    write_weights(file, folder / "model.safetensors", documents["config.json"], dtype, on_progress)


def _product(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
