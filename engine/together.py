"""A list of prompts, decoded together as far as memory goes, each with the reply that it would get alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ..cache.budget import Budget
from ..cache.layout import ArenaSize, arena_bytes
from ..errors import ArenaFull, CakeError, OptionError
from ..ranges import Range
from .available import available_memory
from .batch import Batch
from .document import Document, open_document
from .encoding import listed_ids
from .generation import GenerationConfig
from .memory import together_within
from .memory_limit import free_for_arena
from .pieces import piece_size
from .reply import OnProgress, Written, tell_if_raised, wait_reporter
from .results import Piece, Progress, Result, collect
from .runner import Runner
from .sequence import Sequence
from .timing import Timing

if TYPE_CHECKING:
    from .engine import Engine, Prompt

MOST_TOGETHER = 16
BATCH = Range(1, 65_536)
Found = TypeVar("Found")


def generate_list(
    engine: Engine,
    prompts: list[Prompt],
    *,
    batch: int = MOST_TOGETHER,
    config: GenerationConfig | list[GenerationConfig] | None = None,
    on_progress: OnProgress | None = None,
    stream_prefill: object = None,
    cache: Document | None = None,
    **options: Any,
) -> list[Result]:
    """The replies to a list of prompts, or of questions to a document, checked first, see `Engine.generate`."""
    if piece_size(stream_prefill) is not None:
        raise OptionError("the prompts of a list are read whole: leave the option stream_prefill out, or give one")
    BATCH.check("the option batch", batch)
    configs = config if isinstance(config, list) else [config] * len(prompts)
    if len(configs) != len(prompts):
        raise OptionError(f"there are {len(prompts)} prompts and {len(configs)} configs: give one, or one for each")
    generations = [engine._generation(one, dict(options)) for one in configs]
    ids = [listed_ids(engine, prompt, number + 1, len(prompts), cache) for number, prompt in enumerate(prompts)]
    if not prompts:
        return []
    return generate_together(engine, ids, generations, most=batch, on_progress=on_progress, document=cache)


def generate_together(
    engine: Engine,
    prompts: list[list[int]],
    generations: list[GenerationConfig],
    *,
    most: int = MOST_TOGETHER,
    on_progress: OnProgress | None = None,
    document: Document | None = None,
) -> list[Result]:
    """The replies to prompts of ids, in their order; `generations`, one for each, are resolved.

    At most `most` are decoded together, and no more than memory (or `kv_memory`) has room for; the others wait until
    one is over. document: behind which each prompt is read. Raises what a prompt alone would raise, with its number,
    before the first one is read.
    """
    runner, numbers = engine.runner, range(len(prompts))
    start = _begun(engine, document, warn=True)
    sizes = [_numbered(i, prompts, partial(_size, runner, start, prompts[i], generations[i])) for i in numbers]
    if engine.cache.policy != "full" and document is None:
        for prompt in prompts:
            tell_if_raised(Budget.parse(engine.cache.budget), len(prompt), engine.cache.window)
    limit = _free_for_arena(engine, max(map(len, prompts)), max(arena_bytes(runner.layout, size) for size in sizes))
    # the longest first: what is staged for it is then beside the fewest rows, and no long reply is left to the end
    order = sorted(numbers, key=lambda i: -len(prompts[i]))
    tell = _progress_of(engine, prompts, on_progress)
    written: dict[int, Written] = {}
    pieces: dict[int, list[Piece]] = {i: [] for i in numbers}
    running: dict[int, int] = {}  # a sequence's id(), and the number of its prompt
    with Batch(runner, most=min(most, len(prompts)), limit=limit, on_wait=wait_reporter(on_progress)) as batch:
        for i in numbers:
            _numbered(i, prompts, partial(batch.arena.check, sizes[i]))
        first = [sizes[i] for i in order[: batch.most]]
        batch.arena.reserve(first[: together_within(runner.layout, first, batch.limit)[0]])
        waiting = deque(order)
        while waiting or len(batch):
            while waiting:
                i, sequence, timing = waiting[0], _begun(engine, document), Timing()
                try:
                    batch.join(
                        sequence,
                        prompts[i],
                        generations[i],
                        stop_ids=engine.stop_ids,
                        on_chunk=tell(i),
                        timing=timing,
                    )
                except ArenaFull:
                    break
                written[i] = Written(engine, sequence, prompts[i], generations[i], timing)
                running[id(sequence)] = i
                waiting.popleft()
            for outcome in [*batch.read(), *batch.step()]:
                i = running[id(outcome.sequence)]
                if outcome.error is not None:
                    raise _with_number(outcome.error, i, prompts)
                piece = written[i].push(outcome.token) if outcome.token is not None else None
                if piece is not None:
                    pieces[i].append(piece)
                if written[i].finished or outcome.finished:
                    batch.leave(outcome.sequence)
                    pieces[i].append(written[i].end())
    return [collect(iter(pieces[i]), prompts[i]) for i in numbers]


def _begun(engine: Engine, document: Document | None, *, warn: bool = False) -> Sequence:
    return Sequence() if document is None else open_document(engine, document, warn=warn)


def _size(runner: Runner, sequence: Sequence, ids: list[int], generation: GenerationConfig) -> ArenaSize:
    return runner.fit(sequence, len(ids), generation.max_new_tokens or 0, limit=runner.tenancy.allowed).size


def _free_for_arena(engine: Engine, longest: int, least: int) -> int | None:
    """Bytes that the arena may take beside what reading the longest prompt takes; `least` at any rate."""
    free = free_for_arena(engine, longest, available_memory(str(engine.device)))
    # the engine's own arena is freed before the batch takes its own
    return None if free is None else max(free + engine.runner.tenancy.arena.nbytes, least)


def _progress_of(
    engine: Engine, prompts: list[list[int]], on_progress: OnProgress | None
) -> Callable[[int], Callable[[int, int, int], None] | None]:
    """For each prompt what tells `on_progress` how far all of them have been read."""
    layers = engine.config.num_layers
    done = [0] * len(prompts)
    total = layers * sum(map(len, prompts))

    def of(i: int) -> Callable[[int, int, int], None] | None:
        if on_progress is None:
            return None

        def report(layer: int, read: int, tokens: int) -> None:
            done[i] = layer * tokens + read
            on_progress(Progress("prefill", sum(done), total, layer, layers))

        return report

    return of


def _numbered(i: int, prompts: list[list[int]], call: Callable[[], Found]) -> Found:
    """What `call` gives; an error says which of several prompts it is about."""
    try:
        return call()
    except CakeError as error:
        raise _with_number(error, i, prompts) from None


def _with_number(error: CakeError, i: int, prompts: list[list[int]]) -> CakeError:
    return type(error)(f"prompt {i + 1} of {len(prompts)}: {error}") if len(prompts) > 1 else error
