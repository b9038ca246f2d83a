"""Several sequences decoded together over one arena; each may join and leave between steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from ..cache.shared import SharedArena
from ..errors import ArenaFull, CakeError, OptionError
from .fitting import longest_prompts
from .generation import GenerationConfig
from .graph import Ahead
from .member import Member, Outcome, next_reader
from .picker import Token
from .piece_reading import prepare_reply
from .prefill import OnChunk, Reading
from .runner import Runner
from .seat import Seat
from .sequence import Sequence
from .stepper import OnWait
from .timing import Timing


@dataclass(eq=False)
class Batch:
    """A continuous batch of one runner. Close it, or use it as a context manager: that frees its arena.

    most: how many sequences at once. limit: bytes of the arena, None for as many as `kv_memory` allows or there are; it
    grows up to that, or with `fixed` is made once and never moved. on_wait: called while the step is compiled, see
    `stepper.OnWait`.

    A newcomer's prompt is read between the steps of the others, a chunk of tokens of all layers at a time (in parts: a
    chunk in one layer each, since a layer is read to its end before the next one begins), one newcomer after another.
    slice_s: for so many seconds at most (but one part at least) while others are decoded, and several short prompts in
    them. readers: with 2, a prompt of which less is left than of the one that is read is read in turn with it.
    What a sequence generates does not depend on who else is there: it has its own rows, budget, and random numbers.
    """

    runner: Runner
    most: int = 16
    limit: int | None = None
    fixed: bool = False
    on_wait: OnWait | None = None
    slice_s: float | None = None
    readers: int = 1
    arena: SharedArena = field(init=False)
    _read_last: Member | None = field(init=False, default=None)
    _brought: list[Outcome] = field(init=False, default_factory=list)
    _members: list[Member] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        runner = self.runner
        if runner.cache.recascade is not None:
            raise OptionError("the option recascade has no form for texts that are decoded together: leave it out")
        with runner.access.alone():
            runner.tenancy.vacate()
            limits = [limit for limit in (self.limit, runner.tenancy.allowed) if limit is not None]
            self.limit = min(limits, default=None)
            self.arena = SharedArena(runner.layout, runner.decoder.device, batch=self.most, limit=self.limit)
            if self.fixed:
                self.arena.take_all(longest_prompts(runner, self.most))
            runner.tenancy.batches.add(self.arena)

    def close(self) -> None:
        """Let everybody leave, and free the arena. Safe to call twice."""
        with self.runner.access.alone(self):
            for member in list(self._members):
                self._drop(member)
            self.runner.access.land()
            self.arena.clear()
            self.runner.tenancy.batches.discard(self.arena)

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        """How many sequences are in the batch, waiting ones included."""
        return len(self._members)

    @property
    def sequences(self) -> list[Sequence]:
        """Those that are in the batch."""
        return [member.sequence for member in self._members]

    # -- joining and leaving ------------------------------------------------------------------------------------------

    def join(
        self,
        sequence: Sequence,
        ids: list[int],
        generation: GenerationConfig,
        *,
        stop_ids: frozenset[int] = frozenset(),
        on_chunk: OnChunk | None = None,
        timing: Timing | None = None,
        keep: bool = False,
    ) -> None:
        """Let a sequence feed `ids` and write its reply in the steps to come; `generation` is resolved.

        A sequence that already holds something (an earlier turn) goes on from there. keep: its rows are set aside when
        it is finished, for a later turn; else they are gone, and so is the sequence. Nothing is changed where this
        raises: PromptError, BudgetError, MemoryLimit for what cannot be run here, ArenaFull for what has to wait until
        others have left; each states both figures.
        """
        runner = self.runner
        with runner.access.alone(self):
            if any(member.sequence is sequence for member in self._members):
                raise CakeError("this sequence is in the batch already")
            if sequence.total and runner.tenancy.lengths(sequence) is None:
                raise CakeError("this sequence has no rows to go on from: join(..., keep=True) sets them aside")
            fit = runner.fit(sequence, len(ids), generation.max_new_tokens or 0, limit=self.arena.limit)
            if len(self._members) >= self.most:
                raise ArenaFull(f"{self.most} sequences are in the batch, as many as may: join when one has left")
            self.arena.check(fit.size, [member.size for member in self._members if member.arena is None])
            if runner.tenancy.is_active(sequence):
                runner.tenancy.vacate()
            runner.accept(sequence, fit)
            unread = len(ids) * runner.decoder.config.num_layers
            about = (stop_ids, on_chunk, timing or Timing(), keep)
            member = Member(sequence, ids, generation, fit.new_tokens, fit.size, *about, unread=unread)
            self._members.append(member)

    def leave(self, sequence: Sequence, *, keep: bool = False) -> None:
        """Take a sequence out between two steps; its rows are free at once, or set aside with `keep`.

        One that is still being read cannot be kept. A sequence that is not in the batch (any more) is left alone.
        """
        with self.runner.access.alone(self):
            for member in self._members:
                if member.sequence is sequence:
                    self._drop(member, keep=keep and member.picker is not None)
                    return

    def _drop(self, member: Member, *, keep: bool = False) -> None:
        self._members.remove(member)
        if member.reading is not None:
            member.reading.close()
        if member.arena is None:
            return
        if member.seat is not None and self.runner.ahead is not None:
            self.runner.ahead.leave(member.seat, keep=keep)
        if keep:
            member.sequence.parked = member.arena.save()
        else:
            member.sequence.spoilt = True
        self.arena.release(member.arena)
        member.arena = None

    # -- running ------------------------------------------------------------------------------------------------------

    def step(self) -> list[Outcome]:
        """Feed one token to every sequence that has one, and read a chunk of the newcomer.

        Returns what that brought. A sequence that fails (its logits are not numbers, its prompt finds no memory) leaves
        with its error in the list, and the others go on. If the step itself fails, all that were in it are spoilt and
        leave, and the error is raised; what the others had been brought before comes with the next step.
        """
        with self.runner.access.alone(self):
            self._brought += self._decode()
            started = time.perf_counter()
            hurried = self.slice_s is not None and any(member.next is not None for member in self._members)
            end = started + (self.slice_s or 0.0)
            while read := self._read(self.runner.decoder.config.num_layers, end if hurried else math.inf):
                self._brought += read
                if self.slice_s is None or time.perf_counter() >= end:
                    break
            brought, self._brought = self._brought, []
            return brought

    def read(self) -> list[Outcome]:
        """Read all newcomers to their ends, while nobody is decoded; brings their first tokens."""
        outcomes: list[Outcome] = []
        with self.runner.access.alone(self):
            while any(member.picker is None for member in self._members):
                outcomes += self._read(None)
        return outcomes

    def _decode(self) -> list[Outcome]:
        members = [member for member in self._members if member.next is not None]
        if not members:
            return []
        started = time.perf_counter()
        for member in members:
            assert not member.sequence.spoilt, "a spoilt sequence was continued"
            member.sequence.spoilt = True
        ahead = self.runner.fly(self) if self.runner.ahead is not None else None
        try:
            with self.runner.access.busy(), torch.inference_mode():
                chosen = self._step(members) if ahead is None else self._advance(members, ahead)
        except BaseException:
            if ahead is not None:
                ahead.abandon()
            for member in members:
                self._drop(member)
            raise
        seconds = time.perf_counter() - started
        for member in members:
            member.sequence.spoilt = False
        for member, _ in chosen:
            member.timing.decode_s += seconds
            member.timing.decode_steps += 1
        with self.runner.torch_threads.one():
            return [self._pick(member, choose) for member, choose in chosen]

    def _step(self, members: list[Member]) -> list[tuple[Member, Callable[[], Token]]]:
        """Feed each member's token; what then chooses its next one."""
        logits = self.runner.batch_step(
            self.arena,
            [member.arena for member in members if member.arena is not None],
            [member.sequence for member in members],
            [member.next for member in members if member.next is not None],
            window=self.runner.cache.window,
        )
        return [
            (member, partial(member.picker.pick, logits[i]))
            for i, member in enumerate(members)
            if member.picker is not None
        ]

    def _advance(self, members: list[Member], ahead: Ahead) -> list[tuple[Member, Callable[[], Token]]]:
        """The same where the next step is under way before this one is read: a newcomer comes into the next one."""
        seats: dict[int, Member] = {}
        for member in members:
            assert member.picker is not None
            assert member.next is not None
            member.seat = member.seat or Seat(member.sequence, member.picker, member.next)
            member.seat.arena = member.arena
            seats[id(member.seat)] = member
        found = ahead.advance(
            [member.seat for member in members if member.seat is not None], room=min(self.most, len(self))
        )
        return [(seats[id(one.seat)], partial(one.seat.picker.accept, one.token, one.logits)) for one in found]

    def _pick(self, member: Member, choose: Callable[[], Token]) -> Outcome:
        """Choose a member's next token; where its reply ends with it, the member leaves."""
        started = time.perf_counter()
        try:
            token = choose()
        except CakeError as error:
            self._drop(member)
            return Outcome(member.sequence, error=error, finished=True)
        member.timing.decode_s += time.perf_counter() - started
        member.next = token.id
        if token.finish_reason == "stop":
            member.timing.finished_by = token.id
        if token.finish_reason is not None:
            self._drop(member, keep=member.keep)
        return Outcome(member.sequence, token, finished=token.finish_reason is not None)

    def _read(self, pieces: int | None, end: float = math.inf) -> list[Outcome]:
        """Read on in a prompt, up to so many (layer, chunk) pieces or to the time `end`; nothing if more is left."""
        member = self._read_last = next_reader(self._members, self._read_last, self.readers, self.arena)
        if member is None:
            return []
        started, done = time.perf_counter(), 0
        self.runner.torch_threads.all()
        try:
            with self.runner.access.busy(), torch.inference_mode():
                if member.reading is None:
                    member.reading = self._begin(member)
                last = False  # what is left then is to keep the last layer's rows, and the logits
                while pieces is None or (done < pieces and (not done or time.perf_counter() < end)) or last:
                    told = next(member.reading)
                    done += 1
                    layers = self.runner.decoder.config.num_layers
                    last = told[0] == layers - 1 and told[1] == told[2]
                    member.unread = (layers - told[0]) * told[2] - told[1]
                    if member.on_chunk is not None:
                        member.on_chunk(*told)
        except StopIteration as end_of_prompt:
            member.timing.prefill_s += time.perf_counter() - started
            return [self._end(member, end_of_prompt.value)]
        except CakeError as error:
            self._drop(member)
            return [Outcome(member.sequence, error=error, finished=True)]
        except BaseException:
            self._drop(member)
            raise
        member.timing.prefill_s += time.perf_counter() - started
        return []

    def _begin(self, member: Member) -> Reading[Tensor]:
        """Give a newcomer its part of the arena, with what it holds from before."""
        sequence = member.sequence
        assert not sequence.spoilt, "a spoilt sequence was continued"
        self.runner.access.land()  # rows of the others may move
        others = [one.size for one in self._members if one.arena is None and one is not member]
        member.arena = self.arena.admit(member.size, others)
        if sequence.parked is not None:
            # without the last reply's headroom, for which there may be no room beside what is read
            member.arena.load(sequence.parked.tight())
            sequence.parked = None
        sequence.spoilt = True
        return self.runner.reading(member.arena, sequence, member.ids, member.limit)

    def _end(self, member: Member, logits: Tensor) -> Outcome:
        """A prompt has been read: the first token comes out of it."""
        sequence, timing, arena = member.sequence, member.timing, member.arena
        assert arena is not None
        sequence.spoilt, member.reading = False, None
        arena.settle()
        timing.prompt_tokens, timing.total = len(member.ids), sequence.total
        timing.lengths = tuple(tuple(int(n) for n in row) for row in arena.held)
        member.picker = self.runner.picker(sequence, member.generation, member.limit, member.stop_ids)
        if member.limit == 0:
            self._drop(member, keep=member.keep)
            return Outcome(sequence, finished=True)
        if member.limit > 1:
            prepare_reply(self.runner, arena, sequence, self.on_wait)
        with self.runner.torch_threads.one():
            return self._pick(member, partial(member.picker.pick, logits))
