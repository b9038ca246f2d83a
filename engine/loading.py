"""Loading an engine: device, context, tokenizer, the model's own defaults, then the weights."""

from __future__ import annotations

import importlib.util
import json
import logging
import time
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..cache.config import CacheConfig
from ..cache.policies import make_policy
from ..errors import BackendError, OptionError
from ..models.chat_template import ChatTemplate
from ..models.config import ModelConfig, context_limit, read_config
from ..models.decoder import Decoder
from ..models.hub import resolve_model
from ..models.packed import as_quantised, load_quantised
from ..models.separators import separator_ids
from ..models.tokenizer import Tokenizer
from ..models.weights import load_decoder, random_decoder
from ..ranges import Range, shown
from .attention import choose_attention
from .attention.choose import Setting
from .memory_limit import check_download
from .options import EngineOptions
from .results import Progress
from .runner import Runner
from .stepper import check_step
from .tuning import policy_model, read_tuning

if TYPE_CHECKING:
    from .engine import Engine

log = logging.getLogger(__name__)

SEED = Range(0, 2**63 - 1)  # of a generator of torch


def choose_device(name: str | None) -> torch.device:
    """The device asked for (a name that `EngineOptions` lets pass), or a GPU if there is one."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BackendError("there is no CUDA device here (or torch was built without it): set the option device to cpu")
    return device


def check_quant(quant: str | None, device: torch.device) -> None:
    """Raise BackendError for a quantisation that the device has no products for."""
    if quant is None or device.type == "cpu":
        return
    if quant != "int8":
        raise BackendError(
            f"{quant} weights run on a CPU only: set the option quant to int8, or the option device to cpu"
        )
    if importlib.util.find_spec("triton") is None:
        raise BackendError("int8 weights need the package triton on a GPU: install it, or leave the option quant out")


def load_tokenizer(path: Path, config: ModelConfig, *, optional: bool) -> Tokenizer | None:
    names = ("tokenizer.json", "tokenizer.model", "vocab.json")
    if optional and not any((path / name).exists() for name in names):
        return None
    tokenizer = Tokenizer.load(path)
    tokenizer.check_vocabulary(config.vocab_size)
    return tokenizer


def generation_defaults(path: Path) -> dict[str, object]:
    file = path / "generation_config.json"
    if not file.exists():
        return {}
    try:
        loaded = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise OptionError(f"{file} cannot be read: {error}; repair or remove it") from None
    return loaded if isinstance(loaded, dict) else {}


def cache_config(cache: CacheConfig | None, options: dict[str, Any]) -> CacheConfig:
    known = {field.name for field in fields(CacheConfig)}
    unknown = sorted(set(options) - known)
    if unknown:
        raise OptionError(f"unknown option {unknown[0]!r}: the cache's options are {', '.join(sorted(known))}")
    if cache is not None and not isinstance(cache, CacheConfig):
        raise OptionError(
            f"cache is a CacheConfig, not {shown(cache)}: or give its fields as keywords, as in budget=512"
        )
    given = {name: value for name, value in options.items() if value is not None}
    return replace(cache, **given) if cache is not None else CacheConfig(**given)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def stage_reporter(on_progress: Callable[[Progress], None] | None) -> Callable[[str, int, int], None] | None:
    """`on_progress` for a stage's name and figures, called once for each whole percent; None for None."""
    if on_progress is None:
        return None
    callback = on_progress
    last: tuple[str, int] | None = None

    def report(stage: str, done: int, total: int) -> None:
        nonlocal last
        step = (stage, 100 * done // total if total > 0 else done)
        if step != last:  # a model has hundreds of small tensors, and nobody wants the same percentage for each
            last = step
            callback(Progress("load" if stage == "load" else "download", done, total))

    return report


def load_engine(
    kind: type[Engine],
    model: str | Path,
    *,
    revision: str | None,
    cache: CacheConfig,
    options: EngineOptions,
    random_weights: bool,
    weights_seed: int,
    on_progress: Callable[[Progress], None] | None,
    before_weights: Callable[[Engine], None] | None,
) -> Engine:
    """What `Engine.load` says."""
    started = time.perf_counter()
    SEED.check("weights_seed", weights_seed)
    target = choose_device(options.device)
    check_quant(options.quant, target)
    check_step(options.step, target, cache)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    report = stage_reporter(on_progress)
    path = (
        Path(model)
        if random_weights
        else resolve_model(
            str(model),
            revision=revision,
            on_progress=report,
            before_download=partial(
                check_download, cache=cache, dtype=options.dtype, chunk=options.chunk, device=target
            ),
        )
    )
    config = read_config(path, options.rope_scaling)
    # what cannot be is refused before a weight is read: a backend, the files of a policy
    choose_attention(options.attention, Setting.of(config, cache, target))
    make_policy(cache, policy_model(config), 0)
    if path.is_file():  # another name than config.json says nothing of the files beside it
        path = path.parent if path.name == "config.json" else Path()
    tuned = read_tuning(path) if options.tuning == "auto" and not random_weights else ()
    engine = kind(
        path,
        config,
        tokenizer := load_tokenizer(path, config, optional=random_weights),
        ChatTemplate.load(path, tokenizer) if tokenizer is not None else None,
        cache=cache,
        context=context_limit(options.context, config),
        chunk=options.chunk,
        device=target,
        dtype=options.dtype,
        quant=options.quant,
        defaults=generation_defaults(path),
        random_weights=random_weights,
        weights_seed=weights_seed,
        step=options.step,
    )
    if before_weights is not None:
        before_weights(engine)
    decoder = _weights(engine, None if report is None else partial(report, "load"))
    engine._runner = Runner(
        decoder,
        cache,
        context=engine.context,
        chunk=options.chunk,
        valid_ids=None if tokenizer is None else min(tokenizer.vocab_size, config.vocab_size),
        unused_ids=() if tokenizer is None else tokenizer.unused_ids,
        step=options.step,
        threads=options.threads or torch.get_num_threads(),
        attention=options.attention,
        tuned=tuned,
        separators=None if tokenizer is None else partial(separator_ids, tokenizer),
        one_prompt=engine.one_prompt,
    )
    if options.step == "compiled":
        _ = engine._runner.step  # what it cannot run is refused now, not after a long prompt has been read
    name = path.name or Path(model).stem  # random weights may have a file of a name of its own
    names = [options.quant or dtype_name(decoder.dtype)]
    names += [dtype_name(dtype) for dtype in (engine._runner.layout.kv_dtype, decoder.compute_dtype)]
    names += [str(target), engine._runner.attention.name]
    if cache.kv_bits is not None:
        names[1] = f"{cache.kv_bits}-bit and {names[1]}"
    log.info("%s: %s weights, %s keys and values, computed in %s on %s, attention %s", name, *names)
    engine.load_s = time.perf_counter() - started
    return engine


def _weights(engine: Engine, on_progress: Callable[[int, int], None] | None) -> Decoder:
    path, config = engine.model_path, engine.config
    if engine.random_weights:
        decoder = random_decoder(config, device=engine.device, dtype=engine.dtype, seed=engine.weights_seed)
        return as_quantised(decoder, engine.quant) if engine.quant else decoder
    if engine.quant:
        return load_quantised(path, config, engine.quant, device=engine.device, on_progress=on_progress)
    return load_decoder(path, config, device=engine.device, dtype=engine.dtype, on_progress=on_progress)
