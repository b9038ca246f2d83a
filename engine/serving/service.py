"""What the routes call: requests turned into jobs of one engine, and the jobs' answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from functools import partial
from typing import Any, TypeVar

from ...cache.budget import Budget
from ...cache.config import CacheConfig
from ...cache.policies import make_policy
from ...cache.policies.base import Policy
from ..document import CHOSEN, ROOM, Document, as_document, document_cache, document_ids, open_document
from ..engine import Engine
from ..fitting import room_for_reply
from ..generation import MAX_SEED, GenerationConfig
from ..results import Piece
from ..sequence import Sequence
from .answers import Answer, ChatAnswer, CompletionAnswer
from .documents import Shelf
from .errors import ApiError, invalid
from .jobs import Event, Job, Read, ReadJob, ReplyJob
from .metrics import Metrics
from .options import ServeOptions
from .replying import Reading, Running, Stream, WholeReply
from .scheduler import Scheduler
from .schemas import CakeOptions, ChatRequest, CompletionRequest, DocumentRequest, Sampling

MOST_POLICIES = 64  # that are remembered, by name and budget
ENCODERS = 2  # threads that turn texts into tokens
Found = TypeVar("Found")


class Service:
    """One engine behind the routes. `names`: what a request may call the model, the first of them is its own name.

    defaults: options of a reply that a request leaves open. Start it in the event loop that the routes run in.
    """

    def __init__(
        self,
        engine: Engine,
        options: ServeOptions,
        *,
        names: tuple[str, ...],
        limit: int,
        defaults: GenerationConfig | None = None,
    ) -> None:
        self.engine, self.options, self.names, self.limit = engine, options, names, limit
        self.defaults = defaults or GenerationConfig()
        self.metrics = Metrics()
        self.shelf = Shelf(options.documents, options.document_bytes)
        self._encoders = ThreadPoolExecutor(ENCODERS, thread_name_prefix="cake-infer-encode")
        self._fingerprint = f"fp_{engine.fingerprint[:12]}"
        self._policies: dict[tuple[str, int], Policy] = {}
        self._created = int(time.time())
        self._loop: asyncio.AbstractEventLoop | None = None
        self.scheduler = Scheduler(
            engine,
            parallel=options.parallel,
            queue=options.queue,
            limit=limit,
            slice_s=options.slice,
            post=self._post,
            watcher=self.metrics,
        )

    @property
    def model(self) -> str:
        return self.names[0]

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.scheduler.start()

    def close(self) -> None:
        self.scheduler.close()
        self._encoders.shutdown(wait=False, cancel_futures=True)

    def _post(self, function: Callable[[], None]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(function)

    # -- answers ------------------------------------------------------------------------------------------------------

    async def chat(self, body: bytes) -> Running:
        """The response to /v1/chat/completions. Raises ApiError, CakeError."""
        request = ChatRequest.parse(body)
        self.check_model(request.model)
        return await self._away(partial(self._chat, request))

    async def complete(self, body: bytes) -> Running:
        """The response to /v1/completions."""
        request = CompletionRequest.parse(body)
        self.check_model(request.model)
        return await self._away(partial(self._complete, request))

    async def read(self, body: bytes) -> Running:
        """The response to POST /v1/documents."""
        request = DocumentRequest.parse(body)
        self.check_model(request.model)
        self.shelf.check_room()
        job = await self._away(partial(self._read, request))

        def keep(piece: Piece) -> dict[str, Any]:
            assert isinstance(piece, Read)
            assert piece.document is not None
            return self.shelf.add(piece.document, request.name).told()

        return Reading(self.scheduler, job, keep)

    def told_model(self) -> dict[str, Any]:
        """The one model, as a list of models shows it."""
        told = {"id": self.model, "object": "model", "created": self._created, "owned_by": "cake-infer"}
        return told | {"max_model_len": self.engine.context}

    def check_model(self, name: str | None) -> None:
        """Raises ApiError for another model than the one that there is."""
        if name is not None and name not in self.names:
            there = f"there is no model {name!r} here, only {self.model!r}"
            raise ApiError(404, there, param="model", code="model_not_found")

    async def _away(self, work: Callable[[], Found]) -> Found:
        """What takes long for a long text, in another thread."""
        return await asyncio.get_running_loop().run_in_executor(self._encoders, work)

    # -- jobs ---------------------------------------------------------------------------------------------------------

    def _chat(self, request: ChatRequest) -> Running:
        self._check_replies(request, 1)
        if len(request.messages) > self.engine.context:  # and each of them has a token
            told = f"there are {len(request.messages):,} messages, but the model's context is {self.engine.context:,}"
            raise invalid(f"{told}: shorten the conversation", "messages", "context_length_exceeded")
        messages, document = request.plain_messages(), self._document(request.cake)
        if document is None:
            ids = self.engine.encode(messages=messages)
        else:
            if isinstance(document.source, str):
                raise invalid("this document was read raw: ask by /v1/completions", "cake.document")
            if [message["role"] for message in messages] != ["user"]:
                raise invalid("a question to a document is one message of the user: the document is before it")
            ids = self.engine.encode(messages[0]["content"], cache=document)
        return self._reply(request, [ids], document, ChatAnswer)

    def _complete(self, request: CompletionRequest) -> Running:
        document = self._document(request.cake)
        if document is not None and not isinstance(document.source, str):
            raise invalid("this document was read as a chat: ask by /v1/chat/completions", "cake.document")
        given, prompts = request.prompts(), []
        self._check_replies(request, len(given))
        for prompt in given:
            text, ids = (prompt, None) if isinstance(prompt, str) else (None, prompt)
            prompts.append(self.engine.encode(text, ids=ids, cache=document))
        return self._reply(request, prompts, document, CompletionAnswer)

    def _document(self, cake: CakeOptions) -> Document | None:
        if cake.document is None:
            return None
        if cake.budget is not None or cake.policy is not None:
            raise invalid("budget and policy have no effect on a document, which is read already", "cake")
        return self.shelf.find(cake.document)

    def _reply(
        self, request: Sampling, prompts: list[list[int]], document: Document | None, kind: type[Answer]
    ) -> Running:
        copies = request.n or 1
        generation = self.engine.resolved(request.generation(self.defaults))
        before = 0 if document is None else document.tokens
        jobs: list[ReplyJob] = []
        for ids in prompts:
            self._check_prompt(before + len(ids), generation.max_new_tokens or 0)
            for copy in range(copies):
                job = ReplyJob(
                    self.engine,
                    ids,
                    replace(generation, seed=((generation.seed or 0) + copy) & MAX_SEED),
                    self._sequence(request.cake, ids) if document is None else open_document(self.engine, document),
                    frozenset() if request.ignore_eos else self.engine.stop_ids,
                    _nowhere,
                    index=len(jobs),
                )
                jobs.append(job)
        answer = kind(
            jobs,
            self.model,
            self.engine.text_tokenizer(),
            prompt_tokens=sum(before + len(ids) for ids in prompts),
            cached_tokens=before * len(prompts),
            wants_usage=request.wants_usage,
            wants_stats=request.cake.stats,
            fingerprint=self._fingerprint,
        )
        if request.streams:
            return Stream(self.scheduler, answer, room=self.options.backlog)
        return WholeReply(self.scheduler, answer)

    def _read(self, request: DocumentRequest) -> ReadJob:
        if request.cake.document is not None:
            raise invalid("a document is made of a text, not of another document", "cake.document")
        messages = None
        if not request.raw:
            system = [] if request.system is None else [{"role": "system", "content": request.system}]
            messages = [*system, {"role": "user", "content": request.text}]
        elif request.system is not None:
            raise invalid("system has no effect on a raw text: write it into the text", "system")
        ids, source = document_ids(self.engine, request.text if request.raw else None, messages, None)
        self._check_prompt(len(ids), 1)
        generation = self.engine.resolved(GenerationConfig(max_new_tokens=ROOM, temperature=0.0))
        policy = document_cache(self.engine.cache, request.cake.policy).policy
        return ReadJob(
            self.engine,
            ids,
            generation,
            self._sequence(request.cake.model_copy(update={"policy": policy}), ids),
            self.engine.stop_ids,
            _nowhere,
            finish=lambda sequence: as_document(self.engine, sequence, source),
        )

    def _check_replies(self, request: Sampling, prompts: int) -> None:
        """Raises ApiError for more replies than may run together: before a prompt is looked at."""
        replies = (request.n or 1) * prompts
        if replies > self.options.parallel:
            raise invalid(f"these are {replies:,} replies, and {self.options.parallel} are the most", "n")

    def _check_prompt(self, tokens: int, new_tokens: int) -> None:
        most = self.options.max_prompt
        if most is not None and tokens > most:
            raise invalid(
                f"the prompt has {tokens:,} tokens, and this server takes at most {most:,}",
                code="context_length_exceeded",
            )
        room_for_reply(tokens, new_tokens, self.engine.context)

    def _sequence(self, cake: CakeOptions, ids: list[int]) -> Sequence:
        """A new sequence with a request's own budget and policy. Raises ApiError, BudgetError, OptionError."""
        config = self.engine.cache
        name = config.policy if cake.policy is None else cake.policy
        if name == "full":
            if cake.budget is not None:
                raise invalid("the policy full keeps everything: a budget has no effect", "cake.budget")
            if config.policy == "full":
                return Sequence()
            if config.decode_policy == "hold":
                raise invalid("the policy full has no size to hold, as this server does", "cake.policy")
            return Sequence(budget=max(len(ids), config.window))  # of the engine's policy, which finds nothing to evict
        if cake.budget is None and cake.policy is None:
            return Sequence()
        budget = Budget.parse(config.budget if cake.budget is None else cake.budget)
        tokens = budget.tokens(len(ids), config.window)
        own = None if name == config.policy else self._policy(name, tokens)
        return Sequence(budget=tokens, policy=own)

    def _policy(self, name: str, budget: int) -> Policy:
        """Another policy than the server's, with its own constants: what the server was told is of its policy."""
        if (name, budget) not in self._policies:
            base = self.engine.cache
            plain: dict[str, Any] = {field.name: field.default for field in fields(CacheConfig) if field.name in CHOSEN}
            config = replace(base, **{**plain, "policy": name, "budget": budget})
            if config.spare != base.spare:
                raise invalid(f"the policy {name} holds rows in another way than this server", "cake.policy")
            if len(self._policies) >= MOST_POLICIES:
                self._policies.clear()
            self._policies[name, budget] = make_policy(config, self.engine.runner.model, budget)
        return self._policies[name, budget]


def _nowhere(job: Job, events: list[Event]) -> None:
    """The sink of a job that nobody has asked for yet."""
