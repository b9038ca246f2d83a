"""int8 and int4 weights, packed once from a model's checkpoint into the user's cache folder and mapped from there."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..errors import CakeError, WeightsError
from .config import ModelConfig
from .decoder import Decoder
from .embedded import cache_home
from .headers import file_headers, tensor_headers
from .parameters import EMBEDDING, FINAL_NORM, HEAD, layer_parameters, parameter_shapes
from .quantisation import GROUP, Int4Matrix, Int8Matrix, Matrix, quantise
from .staging import check_disk_space, remove_leftovers, staged_folder
from .weights import Loader, assemble, load_decoder

log = logging.getLogger(__name__)

FORMAT = 2
FILE = "weights.safetensors"
FACTORS = ".factors"

OnProgress = Callable[[int, int], None]


def load_quantised(
    folder: str | Path,
    config: ModelConfig,
    quant: str,
    *,
    device: torch.device | str = "cpu",
    on_progress: OnProgress | None = None,
) -> Decoder:
    """A model of the folder with matrices as "int8" or "int4", embedding and head included; the rest as it is stored.

    The packed file is made on first use and mapped afterwards; to another device than a CPU it is copied.
    Where nothing can be written, the matrices are packed in memory, with a warning. Raises WeightsError as
    `load_decoder` does.
    """
    target = packed_folder(folder, quant)
    remove_leftovers(target.parent)
    if not (target / FILE).is_file():
        decoder = load_decoder(folder, config, on_progress=on_progress)
        tensors = _quantised(decoder, quant)
        try:
            _write(target, tensors)
        except CakeError as error:
            log.warning("%s weights are packed anew at each start: %s", quant, error)
            return _assembled(decoder.config, quant, tensors, torch.device(device))
        del decoder, tensors
    headers = file_headers(target / FILE)
    loader = Loader(torch.device("cpu"), headers.values())
    types = {"I8": torch.int8, "U8": torch.uint8, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    config = _with_biases(config, headers.keys())
    wanted = set(_names(config))
    if wanted != set(headers):
        raise WeightsError(f"{target / FILE} does not fit the model's config.json: remove it, and it is made anew")
    mapped = {name: loader.map(header, types[header.dtype]) for name, header in headers.items()}
    return _assembled(config, quant, mapped, torch.device(device))


def as_quantised(decoder: Decoder, quant: str) -> Decoder:
    """The same model with quantised matrices, in memory."""
    return _assembled(decoder.config, quant, _quantised(decoder, quant), decoder.device, decoder.compute_dtype)


def quantised_bytes(config: ModelConfig, quant: str) -> int:
    """Bytes of a model with quantised matrices, from its shapes alone (norms and biases counted as fp32)."""
    total = 0
    for shape in parameter_shapes(config).values():
        if len(shape) == 1:
            total += 4 * shape[0]
        elif quant == "int8":
            total += shape[0] * (shape[1] + 4)
        else:
            total += shape[0] * (shape[1] // 2 + shape[1] // GROUP * 4)
    return total


def packed_folder(folder: str | Path, quant: str) -> Path:
    """Where a checkpoint's packed weights are, named after what its files hold: another checkpoint has another one."""
    digest = hashlib.sha256(str(FORMAT).encode())
    for name, header in sorted(tensor_headers(folder).items()):
        status = header.file.stat()
        digest.update(f"{name} {header} {status.st_size} {status.st_mtime_ns}".encode())
    return cache_home() / "packed" / f"{Path(folder).resolve().name}-{quant}-{digest.hexdigest()[:16]}"


def _quantised(decoder: Decoder, quant: str) -> dict[str, Tensor]:
    """Every parameter under its checkpoint name; a matrix quantised, with its factors beside it."""
    found: dict[str, Matrix] = {EMBEDDING: decoder.embed_tokens, FINAL_NORM: decoder.norm}
    if not decoder.config.tie_word_embeddings:
        found[HEAD] = decoder.lm_head
    for index, layer in enumerate(decoder.layers):
        fields = dict(layer.named_tensors())
        found |= {p.full_name(index): fields[p.field] for p in layer_parameters(decoder.config)}
    tensors: dict[str, Tensor] = {}
    for name, tensor in found.items():
        assert isinstance(tensor, Tensor)
        if tensor.dim() == 2:
            packed = quantise(tensor, quant)
            tensors[name], tensors[name + FACTORS] = packed.data, packed.factors
        else:
            tensors[name] = tensor.contiguous()
    return tensors


def _names(config: ModelConfig) -> list[str]:
    names = []
    for name, shape in parameter_shapes(config).items():
        names += [name, name + FACTORS] if len(shape) == 2 else [name]
    return names


def _assembled(
    config: ModelConfig,
    quant: str,
    tensors: dict[str, Tensor],
    device: torch.device,
    compute_dtype: torch.dtype | None = None,
) -> Decoder:
    kind = Int8Matrix if quant == "int8" else Int4Matrix
    matrices: dict[str, Matrix] = {}
    for name, shape in parameter_shapes(config).items():
        tensor = tensors[name].to(device)
        matrices[name] = kind(tensor, tensors[name + FACTORS].to(device)) if len(shape) == 2 else tensor
    return assemble(config, matrices, device, compute_dtype)


def _with_biases(config: ModelConfig, names: Iterable[str]) -> ModelConfig:
    """A checkpoint may lack the output bias that its config announces (see `weights.load_decoder`)."""
    if config.output_bias and not any(name.endswith("self_attn.o_proj.bias") for name in names):
        return replace(config, output_bias=False)
    return config


def _write(target: Path, tensors: dict[str, Tensor]) -> None:
    check_disk_space(target, sum(tensor.nbytes for tensor in tensors.values()), "packing the weights")
    try:
        with staged_folder(target, keep_existing=True) as staging:
            save_file(tensors, staging / FILE, metadata={"format": "pt", "version": str(FORMAT)})
    except OSError as error:
        raise CakeError(f"{target} cannot be written ({error.strerror or error})") from error
    log.info("weights packed into %s", os.fspath(target))
