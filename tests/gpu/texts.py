"""Whole texts by the engine itself: loaded to the device, evicted from, alone and in a list, and as on the CPU."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from models_on_disk import llama2c_folder, random_folder
from setting import ROOT, Check, free, graph_in_dry_run

DOCUMENT = ROOT / "examples" / "harbour.md"
CACHES: dict[str, dict[str, Any]] = {
    "the default": {},
    "hold": {"policy": "cake", "decode_policy": "hold"},
    "packed": {"kv_bits": 4},
    "everything kept": {"policy": "full"},
}


def text(check: Check) -> None:
    """Greedy texts in fp32 of the model that is given, or of a random one: graph, eager step, list and CPU agree."""
    with tempfile.TemporaryDirectory(prefix="cake-infer-model-") as made:
        folder = _folder(check.model, Path(made) / "model")
        check.tell("model", Path(check.model).name if check.model else "random")
        for cache, options in CACHES.items():
            if check.scale.dry and cache != "hold":
                continue
            with check.attempt(cache):
                _compare(check, folder, cache, options)
            free()
        if check.model is not None and not check.scale.dry:
            with check.attempt("as published"):
                _as_published(check, folder, Path(check.model))


def _folder(model: str | None, made: Path) -> Path:
    if model is None:
        return random_folder(made)
    folder = Path(model)
    return folder if (folder / "config.json").is_file() else llama2c_folder(folder, made)


def _engine(check: Check, folder: Path, step: str, **options: Any) -> Any:
    from cake_infer import Engine

    dry = check.scale.dry
    if options.get("policy") != "full":
        options = {"budget": 8 if dry else 64, "window": 4 if dry else 32, **options}
    engine = Engine.load(
        folder,
        device=str(check.device),
        dtype="float32",
        step="eager" if dry else step,
        attention="triton",
        **options,
    )
    if dry and step == "graph":
        graph_in_dry_run(engine.runner)
    return engine


def _compare(check: Check, folder: Path, cache: str, options: dict[str, Any]) -> None:
    dry = check.scale.dry
    more: dict[str, Any] = {"max_new_tokens": 2 if dry else 32, "temperature": 0.0}
    with _engine(check, folder, "eager", **options) as engine:
        most = min(engine.context - more["max_new_tokens"] - 1, 14 if dry else 3000)
        ids = engine.encode(DOCUMENT.read_text(encoding="utf-8"))[:most]
        wanted = engine.generate(ids=ids, **more)
    with _engine(check, folder, "graph", **options) as engine:
        found = engine.generate(ids=ids, **more)
        check.same(f"{cache}: graph's text is the eager step's", found.text == wanted.text)
        prompts = [ids[:count] for count in ((3, len(ids)) if dry else (3, 9, 40, len(ids)))]
        alone = [engine.generate(ids=prompt, **more).ids for prompt in prompts]
        together = [result.ids for result in engine.generate([list(prompt) for prompt in prompts], **more)]
        check.same(f"{cache}: a list gives what each prompt gives alone", together == alone)
    check.tell(f"{cache}: text", repr(found.text[:60]))
    if cache == "everything kept":
        from cake_infer import Engine

        with Engine.load(folder, device="cpu", dtype="float32", kv_dtype="float32", step="eager", **options) as engine:
            there = engine.generate(ids=ids, **more)
        check.same(f"{cache}: the text is the CPU's", found.text == there.text)


def _as_published(check: Check, folder: Path, model: Path) -> None:
    """Texts that the model's publisher wrote down, where they lie beside it: greedy, from the first token on."""
    for path in model.glob("expected_greedy*.txt"):
        with _engine(check, folder, "graph", policy="full") as engine:
            result = engine.generate(ids=[1], max_new_tokens=120, temperature=0.0)
        wanted = path.read_text(encoding="utf-8")
        check.same("the text is the published one", wanted.startswith(result.text.lstrip()) and len(result.ids) == 120)
