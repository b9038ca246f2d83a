"""Loading weights: safetensors in, a `Decoder` out, every tensor used and every parameter written exactly once."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import OptionError, WeightsError
from .config import ModelConfig, read_config
from .decoder import Decoder, Layer
from .headers import TensorHeader, tensor_headers
from .parameters import EMBEDDING, FINAL_NORM, HEAD, layer_parameters, parameter_shapes
from .quantisation import Matrix

__all__ = ["TensorHeader", "load_decoder", "random_decoder", "tensor_headers", "weight_bytes"]

_log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# Frequencies that old checkpoints carry along; they are computed from the config.
_IGNORED = re.compile(r"(?:model\.layers\.\d+\.self_attn\.|model\.)rotary_emb\.inv_freq")
_RANDOM_PERIOD = 1_048_573  # a prime, so that no two rows of a matrix begin at the same value


def load_decoder(
    folder: str | Path,
    config: ModelConfig,
    *,
    device: torch.device | str = "cpu",
    dtype: str | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Decoder:
    """Load the weights of a model folder.

    On a CPU without `dtype` every tensor is a view of the file, mapped and not copied (read on first use, shared
    between processes, private to writes), in the dtype it is stored in, and is computed with in fp32. `dtype`
    ("float32", "bfloat16", "float16") or another device converts tensor by tensor: the peak is the model and one
    tensor. On another device matrices take the dtype that most of them have; norms keep theirs.
    `on_progress(done, total)` is called in bytes as stored.

    Raises `WeightsError`, naming file and tensor, if a file is broken, a parameter is missing, has another shape than
    the config says or is not stored as fp32, bf16 or fp16, or if a tensor is left that nothing uses (except rotary
    frequencies and a copy of a tied head). Nothing is loaded before all of that is checked.
    """
    device = torch.device(device)
    wanted = _dtype(dtype)
    headers = tensor_headers(folder)
    config, parameters = _match(config, headers, folder)
    if wanted is None and device.type != "cpu":
        wanted = _majority([header for name, header in parameters.items() if not _is_norm(name)])
    keep_norms = dtype is None
    loader = Loader(device, parameters.values())
    tensors: dict[str, Tensor] = {}
    total, done = sum(header.nbytes for header in parameters.values()), 0
    for name, header in sorted(parameters.items(), key=lambda item: (str(item[1].file), item[1].offset)):
        stored = _STORED[header.dtype]
        target = stored if wanted is None or (keep_norms and _is_norm(name)) else wanted
        assert name not in tensors
        tensors[name] = loader.load(header, target)
        done += header.nbytes
        if on_progress is not None:
            on_progress(done, total)
    return assemble(config, tensors, device)


def random_decoder(
    config: ModelConfig, *, device: torch.device | str = "cpu", dtype: str | None = None, seed: int = 0
) -> Decoder:
    """A model with the shapes of `config` and random weights of a plausible scale, for timing; the same on every
    device. `dtype` defaults to the config's own, else fp32."""
    device = torch.device(device)
    chosen = _dtype(dtype if dtype is not None else config.dtype) or torch.float32
    # Normal deviates cost 10 ns each, a minute for 7B parameters; one block of them, repeated, costs a copy.
    generator = torch.Generator().manual_seed(seed)
    block = torch.randn(_RANDOM_PERIOD, generator=generator).to(device)
    tensors: dict[str, Tensor] = {}
    start = 0
    for name, shape in parameter_shapes(config).items():
        tensor = torch.empty(shape, dtype=chosen, device=device)
        if _is_norm(name):
            tensor.fill_(1.0 - config.norm_offset)
        else:
            std = 1.0 if name == EMBEDDING else 0.02 if len(shape) == 1 else shape[1] ** -0.5
            scaled, flat, filled = (block * std).to(chosen), tensor.view(-1), 0
            while filled < flat.numel():
                count = min(flat.numel() - filled, _RANDOM_PERIOD - start)
                flat[filled : filled + count] = scaled[start : start + count]
                filled, start = filled + count, (start + count) % _RANDOM_PERIOD
        tensors[name] = tensor
    return assemble(config, tensors, device)


def weight_bytes(folder_or_config: str | Path | ModelConfig, dtype: str | None = None) -> int:
    """Bytes that `load_decoder` will hold: as stored (of a config: in its own dtype, else fp32) or in `dtype`. From
    headers alone."""
    wanted = _dtype(dtype)
    if isinstance(folder_or_config, ModelConfig):
        item = (wanted or _dtype(folder_or_config.dtype) or torch.float32).itemsize
        return sum(item * _numel(shape) for shape in parameter_shapes(folder_or_config).values())
    _, parameters = _match(read_config(folder_or_config), tensor_headers(folder_or_config), folder_or_config)
    if wanted is None:
        return sum(header.nbytes for header in parameters.values())
    return sum(header.numel * wanted.itemsize for header in parameters.values())


def _dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    if name not in DTYPES:
        raise OptionError(f"dtype {name!r} is not supported; use one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _numel(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def _is_norm(name: str) -> bool:
    return name.endswith("norm.weight")


def _majority(headers: list[TensorHeader]) -> torch.dtype:
    sizes: dict[str, int] = {}
    for header in headers:
        sizes[header.dtype] = sizes.get(header.dtype, 0) + header.nbytes
    return _STORED[max(sizes, key=lambda dtype: sizes[dtype])]


def _match(
    config: ModelConfig, headers: dict[str, TensorHeader], folder: str | Path
) -> tuple[ModelConfig, dict[str, TensorHeader]]:
    """The header of every parameter, and the config with what only the files can tell. Raises `WeightsError`."""
    if config.output_bias and not any(name.endswith("self_attn.o_proj.bias") for name in headers):
        config = replace(config, output_bias=False)  # Qwen weights saved as llama: attention_bias means q, k and v
    shapes = parameter_shapes(config)
    found = dict(headers)
    if config.tie_word_embeddings:
        if EMBEDDING not in found and HEAD in found:
            found[EMBEDDING] = found.pop(HEAD)
        elif HEAD in found and EMBEDDING in found:
            _check_tied(found[EMBEDDING], found.pop(HEAD))
    missing = [name for name in shapes if name not in found]
    if missing:
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        hint = "; is tie_word_embeddings true in config.json?" if missing == [HEAD] else ""
        raise WeightsError(f"{folder} lacks {missing[0]}{others}, which config.json calls for{hint}")
    unused = [name for name in found if name not in shapes and not _IGNORED.fullmatch(name)]
    if unused:
        others = f" and {len(unused) - 1} more tensors" if len(unused) > 1 else ""
        hint = " (does config.json lack attention_bias or mlp_bias?)" if unused[0].endswith(".bias") else ""
        raise WeightsError(f"{found[unused[0]].file} holds {unused[0]}{others} that the model does not use{hint}")
    for name, shape in shapes.items():
        header = found[name]
        if header.shape != shape:
            raise WeightsError(
                f"{header.file}: {name} has shape {list(header.shape)}; config.json calls for {list(shape)}"
            )
        if header.dtype not in _STORED:
            raise WeightsError(
                f"{header.file}: {name} is stored as {header.dtype}; only {', '.join(_STORED)} can be read "
                "(quantised checkpoints are not supported)"
            )
    return config, {name: found[name] for name in shapes}


def _check_tied(embedding: TensorHeader, head: TensorHeader) -> None:
    """A head beside a tied embedding must be its copy."""
    same = embedding.shape == head.shape and embedding.dtype == head.dtype and head.dtype in _STORED
    if same:
        loader = Loader(torch.device("cpu"), (embedding, head))
        first, second = (loader.load(header, _STORED[head.dtype]) for header in (embedding, head))
        same = torch.equal(first, second)
    if not same:
        raise WeightsError(
            f"{head.file}: {HEAD} is not a copy of {EMBEDDING}, though config.json says tie_word_embeddings; "
            "set that to false to use it"
        )


class Loader:
    """Turns headers into tensors on one device; each file is mapped once, and what is converted is read through one
    scratch buffer, so that freed pieces leave no holes in the heap."""

    def __init__(self, device: torch.device, headers: Iterable[TensorHeader]) -> None:
        self.device = device
        self._mapped: dict[Path, Tensor] = {}  # bytes of whole files
        self._largest = max(header.nbytes for header in headers)
        self._scratch: Tensor | None = None

    def load(self, header: TensorHeader, dtype: torch.dtype) -> Tensor:
        stored = _STORED[header.dtype]
        if dtype == stored and self.device.type == "cpu" and header.offset % stored.itemsize == 0:
            return self.map(header, stored)
        # Read, not mapped: pages of a mapping would stay resident beside the converted copy.
        if self._scratch is None:
            self._scratch = torch.empty(self._largest, dtype=torch.uint8)
        data = self._scratch[: header.nbytes]
        with header.file.open("rb") as file:
            file.seek(header.offset)
            count = file.readinto(data.numpy())  # type: ignore[arg-type]
        if count != header.nbytes:
            raise WeightsError(f"{header.file} changed while it was read; load the model again")
        tensor = data.view(stored).view(header.shape)
        if self.device.type == "cpu":
            return tensor.to(dtype, copy=True)
        return tensor.to(self.device).to(dtype)

    def map(self, header: TensorHeader, dtype: torch.dtype) -> Tensor:
        """The tensor as it lies in the file, private to writes."""
        if header.file not in self._mapped:
            size = header.file.stat().st_size
            self._mapped[header.file] = torch.from_file(str(header.file), shared=False, size=size, dtype=torch.uint8)
        data = self._mapped[header.file][header.offset : header.offset + header.nbytes]
        return data.view(dtype).view(header.shape)


def assemble(
    config: ModelConfig,
    parameters: Mapping[str, Matrix],
    device: torch.device,
    compute_dtype: torch.dtype | None = None,
) -> Decoder:
    """A decoder of named parameters, each used once.

    `compute_dtype`: by default fp32 on a CPU, elsewhere that of the matrices; of quantised ones that of the norms if it
    is a narrow one, else bf16.
    """
    tensors: dict[str, Any] = dict(parameters)
    layers = [
        Layer(**{parameter.field: tensors.pop(parameter.full_name(index)) for parameter in layer_parameters(config)})
        for index in range(config.num_layers)
    ]
    embedding, norm = tensors.pop(EMBEDDING), tensors.pop(FINAL_NORM)
    head = embedding if config.tie_word_embeddings else tensors.pop(HEAD)
    assert not tensors, f"parameters without a place: {list(tensors)}"
    if compute_dtype is None:
        stored = layers[0].q_proj.dtype
        narrow = norm.dtype if norm.dtype.itemsize == 2 else torch.bfloat16
        compute_dtype = torch.float32 if device.type == "cpu" else stored if stored.is_floating_point else narrow
    return Decoder(config, layers, embedding, norm, head, compute_dtype)
