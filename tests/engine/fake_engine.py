"""A stand-in for a loaded engine, slow on demand; `python fake_engine.py [command] [flags]` is the command line on it.

Texts are their UTF-8 bytes, control tokens are ids above 255. The reply to a message is scripted; a chat keeps its
history as the real one does: a turn that ends before its first token is dropped, one that is cut later stays.

FAKE_DELAY: seconds a token takes. FAKE_STEPS: a file descriptor of which a byte is read before each token.
FAKE_PREFILL: seconds of a prefill. FAKE_ENDLESS: a letter for each reply, p for one that gets no further than into its
prefill, t for one whose words come again and again, - for one that ends. FAKE_TOKENS: the reply's words. FAKE_CONTEXT:
the model's context. FAKE_MARKS: a file that gets a "p" when a prefill begins and a "t" for each token. FAKE_SENT: a
file that gets all messages of the chat, as JSON. LINE_EDITOR=readline: as if prompt_toolkit were not installed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Generator, Iterator
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cake_infer.cli import main
from cake_infer.engine.results import Piece, Progress
from cake_infer.engine.statistics import Statistics
from cake_infer.errors import BudgetError, MemoryLimit, PromptError

BOS, USER, REPLY, SYSTEM, END = 256, 257, 258, 259, 260
ROLES = {"user": USER, "assistant": REPLY, "system": SYSTEM}


def mark(letter: str) -> None:
    if "FAKE_MARKS" in os.environ:
        with open(os.environ["FAKE_MARKS"], "a") as marks:
            marks.write(letter)


class FakeTokenizer:
    special_ids = frozenset({BOS, USER, REPLY, SYSTEM, END})
    vocab_size = 261

    def __init__(self, bos: bool = False) -> None:
        self.bos = bos

    def encode(self, text: str, *, add_bos: bool = True, allow_special: bool = True) -> list[int]:
        return [BOS] * (self.bos and add_bos) + list(text.encode())


class FakeTemplate:
    def encode(self, messages: list[dict[str, str]]) -> list[int]:
        ids = [token for m in messages for token in (ROLES[m["role"]], *m["content"].encode(), END)]
        return [*ids, REPLY]


class FakeEngine:
    """What the command line needs of an Engine. `calls` has the arguments of everything that reached it."""

    def __init__(self, name: str = "fake", *, template: bool = True, bos: bool = False, context: int = 4096) -> None:
        self.model_path = Path(name)
        self.tokenizer: FakeTokenizer | None = FakeTokenizer(bos)
        self.template = FakeTemplate() if template else None
        self.config = SimpleNamespace(vocab_size=261, eos_token_ids=(END,))
        self.context = context
        self.calls: list[tuple[str, Any]] = []
        self.words = os.environb.get(b"FAKE_TOKENS", b"one two three four five six").decode().split(" ")
        self.delay = float(os.environ.get("FAKE_DELAY", "0"))
        self.prefill = float(os.environ.get("FAKE_PREFILL", "0"))
        self.endless = iter(os.environ.get("FAKE_ENDLESS", ""))
        self.memory_limit: int | None = None
        self.closed_streams = 0

    def load(self, model: str, **options: Any) -> FakeEngine:
        """Takes the place of `Engine.load`."""
        self.calls.append(("load", {"model": model, **options}))
        options["on_progress"](Progress("load", 1, 1))
        if options["before_weights"] is not None:
            options["before_weights"](self)
        self.calls.append(("weights", None))
        return self

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.calls.append(("close", None))

    def check_room(
        self,
        prompt_tokens: int | None,
        generation: Any = None,
        *,
        conversation: bool = False,
        stream_prefill: int | None = None,
    ) -> None:
        self.calls.append(("check_room", prompt_tokens))
        if prompt_tokens is None:
            return
        if prompt_tokens >= self.context:
            raise PromptError(f"the prompt has {prompt_tokens} tokens, but the model's context is {self.context}")
        if self.memory_limit is not None and prompt_tokens > self.memory_limit:
            raise MemoryLimit("this run needs more than there is")

    def load_document(self, path: str) -> Any:
        self.calls.append(("load_document", path))
        return SimpleNamespace(source=None, kept_tokens=2.0)

    def encode(self, text: str, *, cache: Any) -> list[int]:
        return list(text.encode())

    def compress(
        self,
        text: str | None,
        *,
        messages: Any,
        on_progress: Any,
        policy: str = "auto",
        stream_prefill: int | None = None,
    ) -> Any:
        self.calls.append(("compress", text or messages))
        self.calls.append(("compress in pieces", stream_prefill))
        lengths = ((2, 2), (4, 4))

        def save(path: Path) -> None:
            self.calls.append(("save", path))
            path.touch()

        return SimpleNamespace(tokens=9, kept_tokens=3.0, layer_lengths=lengths, save=save, policy="auto")

    def stream(
        self,
        prompt: Any = None,
        *,
        messages: Any = None,
        ids: list[int] | None = None,
        config: Any,
        on_progress: Any,
        cache: Any = None,
        stream_prefill: int | None = None,
    ) -> Iterator[Piece]:
        if messages is not None:  # the last one's text comes piece by piece
            *before, last = messages
            ids = FakeTemplate().encode([*before, {**last, "content": "".join(last["content"])}])
        elif ids is None:
            ids = list("".join(prompt).encode())
        self.calls.append(("stream", {"ids": ids, "config": config, "stream_prefill": stream_prefill}))
        return self.reply(len(ids), config, on_progress)

    def reply(self, prompt_tokens: int, config: Any, on_progress: Any, prefix: str = "") -> Iterator[Piece]:
        endless = next(self.endless, "")
        try:
            mark("p")
            for step in range(10):
                on_progress(Progress("prefill", step + 1, 10, step, 10))
                time.sleep(self.prefill / 10)
                while endless == "p" and step == 4:  # until Ctrl-C
                    on_progress(Progress("prefill", step + 1, 10, step, 10))
                    time.sleep(0.01)
            limit = 512 if config.max_new_tokens is None else config.max_new_tokens
            words = self.words[:limit]
            for index, word in enumerate(cycle(words) if endless == "t" else words):
                time.sleep(0.02 if endless == "t" else self.delay)
                if "FAKE_STEPS" in os.environ:
                    os.read(int(os.environ["FAKE_STEPS"]), 1)
                top = None if config.logprobs is None else tuple((token, -1.5) for token in range(config.logprobs))
                text = prefix + word if index == 0 else " " + word
                mark("t")
                yield Piece(text, index, logprob=None if top is None else -0.5, top_logprobs=top)
            stats = Statistics(
                prompt_tokens, new_tokens=len(words), kept_tokens=3, full_tokens=9, layer_lengths=((2, 2), (4, 4))
            )
            reason = "length" if len(words) < len(self.words) else "stop"
            yield Piece("", None, finish_reason=reason, stats=stats)
        finally:
            self.closed_streams += 1

    def chat(self, system: str | None = None, *, stream_prefill: int | None = None) -> FakeChat:
        self.calls.append(("chat", system))
        self.calls.append(("chat in pieces", stream_prefill))
        return FakeChat(self, system)


class FakeChat:
    """A conversation; a reply begins with how many messages it follows, so that the history shows."""

    def __init__(self, engine: FakeEngine, system: str | None) -> None:
        self.engine, self.system, self.context = engine, system, engine.context
        self.budget: int | str | None = None
        self.clear()

    def clear(self) -> None:
        self.messages: list[dict[str, str]] = []
        self.tokens_used = 0
        self.before: tuple[list[dict[str, str]], int] | None = None
        self.stats: Statistics | None = None

    @property
    def budget_text(self) -> str:
        return f"{self.budget} in words"

    def set_budget(self, budget: str) -> None:
        if budget.isdigit() and int(budget) < 32:
            raise BudgetError(f"a budget of {budget} tokens is below the window: the minimum is 32")
        self.budget = budget

    def send(self, text: str, *, config: Any, on_progress: Any) -> Iterator[Piece]:
        if not text.strip():
            raise PromptError("the message is empty")
        return self._turn(text, config, on_progress)

    def undo(self) -> str:
        if self.before is None:
            raise PromptError("there is no turn to take back")
        text = self.messages[-2]["content"]
        (self.messages, self.tokens_used), self.before = self.before, None
        return text

    def regenerate(self, *, config: Any, on_progress: Any) -> Iterator[Piece]:
        if self.before is None:
            raise PromptError("there is no reply to write again")
        now, before = (self.messages, self.tokens_used), self.before
        pieces = self._turn(self.undo(), config, on_progress)
        try:
            yield from pieces
        finally:
            pieces.close()
            if self.before is None:  # no token came
                (self.messages, self.tokens_used), self.before = now, before

    def _turn(self, text: str, config: Any, on_progress: Any) -> Generator[Piece, None, None]:
        needed = len(text) + 2
        if self.tokens_used + needed >= self.context:
            raise PromptError(f"{self.tokens_used + needed} tokens, but the context is {self.context}")
        self.engine.calls.append(("send", {"text": text, "config": config, "messages": len(self.messages)}))
        if "FAKE_SENT" in os.environ:
            sent = [argument["text"] for name, argument in self.engine.calls if name == "send"]
            Path(os.environ["FAKE_SENT"]).write_text(json.dumps(sent))
        shown: list[str] = []
        try:
            for piece in self.engine.reply(needed, config, on_progress, f"[{len(self.messages)}] "):
                shown.append(piece.text)
                self.stats = piece.stats
                yield piece
        finally:
            if shown:
                self.before = (list(self.messages), self.tokens_used)
                self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": "".join(shown)}]
                self.tokens_used += needed + len(shown)


if __name__ == "__main__":
    if os.environ.get("LINE_EDITOR") == "readline":
        sys.modules["prompt_toolkit"] = None  # type: ignore[assignment]
    context = int(os.environ.get("FAKE_CONTEXT", "4096"))
    sys.exit(main(sys.argv[1:], FakeEngine(context=context).load))
