"""One reply as a stream of token ids: the piece is read, then a token is chosen, fed, and so on."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

import torch

from .generation import GenerationConfig
from .picker import Picker, Token
from .piece_reading import prepare_reply
from .pieces import Pieces
from .piecewise import OnTokens, read_pieces
from .seat import Seat
from .sequence import Sequence
from .stepper import OnWait
from .timing import Timing

if TYPE_CHECKING:
    from .runner import Runner

OnChunk = Callable[[int, int, int], None]


def stream_tokens(
    runner: Runner,
    sequence: Sequence,
    ids: list[int] | Pieces,
    generation: GenerationConfig,
    *,
    stop_ids: frozenset[int],
    on_chunk: OnChunk | None,
    on_tokens: OnTokens | None,
    on_wait: OnWait | None,
    timing: Timing,
    conversation: bool,
) -> Generator[Token, None, None]:
    """Feed `ids` to a sequence and yield the reply's tokens one by one; `generation` is resolved.

    Ids that come in pieces are read by `read_pieces`, and `on_tokens` is told of them, not `on_chunk`.

    The last token that is yielded has not been fed. The reply ends with a stop token ("stop"), with max_new_tokens,
    or where the model's context ends ("length"). The repetition penalty counts all of the sequence's ids as prompt.
    """
    tenancy, window, wanted = runner.tenancy, runner.cache.window, generation.max_new_tokens or 0
    if isinstance(ids, Pieces):
        logits, limit = read_pieces(
            runner, sequence, ids, wanted, timing=timing, conversation=conversation, on_tokens=on_tokens
        )
    with runner.access.alone():
        if isinstance(ids, Pieces):
            tenancy.activate(sequence)
            tenancy.reserve(sequence, sequence.budget, 0, limit)
            runner.make_room(tenancy.arena, sequence, limit)
        else:
            limit = runner.prepare(sequence, len(ids), wanted, conversation=conversation)
            started = time.perf_counter()
            with runner.access.whole(sequence):
                logits = runner.feed(sequence, ids, limit, on_chunk=on_chunk)
            timing.prompt_tokens, timing.prefill_s = len(ids), time.perf_counter() - started
        timing.total = sequence.total
        timing.lengths = tuple(tuple(int(n) for n in row) for row in tenancy.arena.held)
        picker = runner.picker(sequence, generation, limit, stop_ids)
        behind = limit > 1 and runner.step.at_hand  # prepared while the first token is read
        if limit > 1 and not behind:
            prepare_reply(runner, tenancy.arena, sequence, on_wait)
            if runner.ahead is not None:
                _prepare_ahead(runner, sequence, picker)
    for _ in range(limit):
        started = time.perf_counter()
        with runner.torch_threads.one():
            token = picker.pick(logits)
        timing.decode_s += time.perf_counter() - started
        if token.finish_reason == "stop":
            timing.finished_by = token.id
        yield token
        if token.finish_reason:
            return
        if runner.ahead is not None:
            yield from _stream_ahead(runner, Seat(sequence, picker, token.id), timing)
            return
        if behind:
            behind = False
            with runner.access.alone():
                tenancy.activate(sequence)
                prepare_reply(runner, tenancy.arena, sequence)
        started = time.perf_counter()
        with runner.access.alone():
            tenancy.activate(sequence)
            with runner.access.whole(sequence), torch.inference_mode():
                logits = runner.step(tenancy.arena, sequence, token.id, window=window)
        timing.decode_s += time.perf_counter() - started
        timing.decode_steps += 1


def _prepare_ahead(runner: Runner, sequence: Sequence, picker: Picker) -> None:
    """Capture the step before the reply begins; the token is not fed."""
    assert runner.ahead is not None
    seat = Seat(sequence, picker, 0, runner.tenancy.arena)
    runner.ahead.prepare(seat)
    runner.ahead.leave(seat)


def _stream_ahead(runner: Runner, seat: Seat, timing: Timing) -> Generator[Token, None, None]:
    """The reply's further tokens, each while the device is at work on the next one. See `Ahead`."""
    sequence, picker = seat.sequence, seat.picker
    with runner.access.landing(seat):
        while True:
            started = time.perf_counter()
            with runner.access.alone(seat):
                runner.tenancy.activate(sequence)
                seat.arena = runner.tenancy.arena
                with runner.access.whole(sequence):
                    (chosen,) = runner.fly(seat).advance([seat])
                token = picker.accept(chosen.token, chosen.logits)
            timing.decode_s += time.perf_counter() - started
            timing.decode_steps += 1
            if token.finish_reason == "stop":
                timing.finished_by = token.id
            yield token
            if token.finish_reason:
                return
