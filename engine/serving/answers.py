"""OpenAI's answers, made of pieces: whole ones, and the chunks of a stream."""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from ...models.tokenizer import Tokenizer
from ..results import Piece
from ..statistics import Statistics
from .jobs import Job, ReplyJob

NEVER = -9999.0  # OpenAI's figure for a probability of 0, which JSON has no logarithm for
DONE = b"data: [DONE]\n\n"


def event(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


@dataclass
class Choice:
    """What has come of one reply so far."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    tokens: int = 0
    length: int = 0  # characters
    finish_reason: str | None = None
    stats: Statistics | None = None


class Answer:
    """The answer to one request of several choices. `kind`: of a whole answer; chunks have a kind of their own."""

    kind = chunk_kind = prefix = ""

    def __init__(
        self,
        jobs: list[ReplyJob],
        model: str,
        tokenizer: Tokenizer,
        *,
        prompt_tokens: int,
        cached_tokens: int = 0,
        wants_usage: bool = False,
        wants_stats: bool = False,
        fingerprint: str | None = None,
    ) -> None:
        self.model, self.tokenizer, self.jobs = model, tokenizer, jobs
        self.prompt_tokens, self.cached_tokens = prompt_tokens, cached_tokens
        self.wants_usage, self.wants_stats = wants_usage, wants_stats
        self.fingerprint = fingerprint
        self.choices = [Choice() for _ in jobs]
        self.id, self.created = f"{self.prefix}-{uuid.uuid4().hex}", int(time.time())
        # everything of a chunk of plain text but the text: most chunks are that
        self._plain = [self._around(index) for index in range(len(jobs))]

    @property
    def finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)

    def take(self, job: Job, piece: Piece) -> None:
        """Add a piece to the whole answer."""
        choice = self.choices[job.index]
        choice.texts.append(piece.text)
        if piece.id is not None:
            choice.tokens += 1
            if piece.top_logprobs is not None:
                choice.logprobs.append(self.logprob(piece, choice))
        choice.length += len(piece.text)
        if piece.finish_reason is not None:
            choice.finish_reason, choice.stats = piece.finish_reason, piece.stats

    def whole(self) -> dict[str, Any]:
        """The answer, once it is finished."""
        choices = [
            {"index": index, **self.content("".join(choice.texts)), **self.end_of(choice, whole=True)}
            for index, choice in enumerate(self.choices)
        ]
        return self._head(self.kind) | {"choices": choices, "usage": self.usage()} | self._stats()

    def chunks(self, job: Job, piece: Piece) -> bytes:
        """The events that a piece brings."""
        choice, index = self.choices[job.index], job.index
        found = b"" if choice.tokens or choice.texts else self.opening(index)
        before = len(choice.logprobs)
        self.take(job, piece)
        logprobs = choice.logprobs[before:]
        choice.texts = [""]
        if logprobs:
            delta = self.delta(piece.text) | {"logprobs": self.listed(logprobs), "finish_reason": None}
            found += self._chunk([{"index": index, **delta}])
            choice.logprobs.clear()
        elif piece.text:
            head, tail = self._plain[index]
            found += head + json.dumps(piece.text, ensure_ascii=False).encode() + tail
        if piece.finish_reason is not None:
            last = {"index": index, **self.delta(None), **self.end_of(choice, whole=False)}
            found += self._chunk([last], self._stats() if self.finished else {})
            if self.finished:
                if self.wants_usage:
                    found += event(self._head(self.chunk_kind) | {"choices": [], "usage": self.usage()})
                found += DONE
        return found

    def usage(self) -> dict[str, Any]:
        new = sum(choice.tokens for choice in self.choices)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": new,
            "total_tokens": self.prompt_tokens + new,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    # -- what chat and completion have of their own -------------------------------------------------------------------

    def content(self, text: str) -> dict[str, Any]:
        """A choice's text in a whole answer."""
        raise NotImplementedError

    def delta(self, text: str | None) -> dict[str, Any]:
        """A choice's new text in a chunk; None in the last one."""
        raise NotImplementedError

    def opening(self, index: int) -> bytes:
        """What a choice's first chunk is preceded by."""
        return b""

    def logprob(self, piece: Piece, choice: Choice) -> dict[str, Any]:
        """What is told of one token."""
        raise NotImplementedError

    def listed(self, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        """What is told of several."""
        raise NotImplementedError

    # -- parts --------------------------------------------------------------------------------------------------------

    def end_of(self, choice: Choice, *, whole: bool) -> dict[str, Any]:
        logprobs = self.listed(choice.logprobs) if whole and choice.logprobs else None
        return {"logprobs": logprobs, "finish_reason": choice.finish_reason}

    def token_text(self, index: int) -> str:
        """A token as text; the bytes of a part of a character become U+FFFD. Special tokens show as they are spelt."""
        if index in self.tokenizer.special_ids:
            return self.tokenizer.token(index)
        return self.tokenizer.token_bytes(index).decode("utf-8", "replace")

    def _head(self, kind: str) -> dict[str, Any]:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return head | {"system_fingerprint": self.fingerprint}

    def _stats(self) -> dict[str, Any]:
        if not self.wants_stats:
            return {}
        return {"cake": {"stats": [choice.stats and choice.stats.as_dict() for choice in self.choices]}}

    def _chunk(self, choices: list[dict[str, Any]], more: dict[str, Any] | None = None) -> bytes:
        usage = {"usage": None} if self.wants_usage else {}
        return event(self._head(self.chunk_kind) | {"choices": choices} | usage | (more or {}))

    def _around(self, index: int) -> tuple[bytes, bytes]:
        mark = uuid.uuid4().hex
        choice = {"index": index, **self.delta(mark), "logprobs": None, "finish_reason": None}
        head, tail = self._chunk([choice]).split(f'"{mark}"'.encode())
        return head, tail


class ChatAnswer(Answer):
    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def delta(self, text: str | None) -> dict[str, Any]:
        return {"delta": {} if text is None else {"content": text}}

    def opening(self, index: int) -> bytes:
        delta = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return self._chunk([{"index": index, **delta}])

    def logprob(self, piece: Piece, choice: Choice) -> dict[str, Any]:
        assert piece.id is not None
        wanted = self.jobs[0].generation.logprobs or 0
        top = [self._one(token, value) for token, value in (piece.top_logprobs or ())[:wanted]]
        return self._one(piece.id, piece.logprob) | {"top_logprobs": top}

    def listed(self, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        return {"content": list(logprobs), "refusal": None}

    def _one(self, index: int, logprob: float | None) -> dict[str, Any]:
        data = self.tokenizer.token_bytes(index)
        value = NEVER if logprob is None else logprob
        return {"token": self.token_text(index), "logprob": value, "bytes": list(data)}


class CompletionAnswer(Answer):
    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def content(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def delta(self, text: str | None) -> dict[str, Any]:
        return {"text": text or ""}

    def logprob(self, piece: Piece, choice: Choice) -> dict[str, Any]:
        assert piece.id is not None
        return {
            "token": self.token_text(piece.id),
            "logprob": NEVER if piece.logprob is None else piece.logprob,
            "top": {
                self.token_text(token): NEVER if value is None else value for token, value in piece.top_logprobs or ()
            },
            "offset": choice.length,
        }

    def listed(self, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "tokens": [one["token"] for one in logprobs],
            "token_logprobs": [one["logprob"] for one in logprobs],
            "top_logprobs": [one["top"] for one in logprobs],
            "text_offset": [one["offset"] for one in logprobs],
        }
