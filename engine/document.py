"""A compressed document: read once, asked many questions, each on a copy of its rows, which stay as they are."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..cache.budget import Budget
from ..cache.config import CacheConfig
from ..cache.policies import DOCUMENT_POLICY, make_policy
from ..cache.snapshot import Snapshot, read_snapshot, write_snapshot
from ..errors import OptionError, PromptError, SnapshotError
from ..ranges import shown
from .encoding import check_length, prompt_ids
from .piece_memory import piece_budget
from .pieces import ListedPieces
from .piecewise import check_pieces, read_pieces
from .reply import OnProgress, chunk_reporter, tell_if_raised, token_reporter
from .saving import are_messages, check_model, pack, unpack
from .sequence import Sequence as TextSequence
from .text import check_text
from .timing import Timing

if TYPE_CHECKING:
    from .engine import Engine, Message

log = logging.getLogger(__name__)

# Beginnings of questions that tokenizers join to what is in front of them in different ways: what is the same before
# all of them is the document's, and the few tokens behind that are fed with each question.
BEGINNINGS = ("What", " a", "\n\n\n", "1", "?", "s")
# what says how tokens are chosen
CHOSEN = ("policy", "indicator", "allocation", "heads", "merge", "policy_options", "tau1", "tau2", "gamma", "pool")
ROOM = 512  # tokens of question and reply for which rotary frequencies that depend on the length are chosen


@dataclass(frozen=True)
class Document:
    """What is kept of a text that was read, by `Engine.compress` or `Engine.load_document`.

    source: the text or the messages, for the tokens of a question behind them; None where ids were given.
    """

    snapshot: Snapshot
    source: str | list[Message] | None
    name: str = "the document"

    @property
    def tokens(self) -> int:
        """How many tokens were read."""
        return len(self.snapshot.ids)

    @property
    def kept_tokens(self) -> float:
        """How many are kept in an average row."""
        return float(self.snapshot.rows.held.mean())

    @property
    def layer_lengths(self) -> tuple[tuple[int, ...], ...]:
        """Kept tokens of each layer and KV head."""
        return tuple(tuple(heads) for heads in self.snapshot.rows.held.tolist())

    @property
    def policy(self) -> str:
        """What chose them, as it describes itself."""
        return str(self.snapshot.about["policy"])

    @property
    def nbytes(self) -> int:
        """Bytes of the kept keys and values."""
        return self.snapshot.rows.nbytes

    def save(self, path: str | Path) -> None:
        """Write it to a file, in place of one that may be there. Raises SnapshotError; then that one is as it was."""
        write_snapshot(path, self.snapshot)


def compress(
    engine: Engine,
    text: str | None,
    messages: list[Message] | None,
    ids: Sequence[int] | None,
    policy: str | None,
    on_progress: OnProgress | None,
    piece: int | None = None,
) -> Document:
    """See `Engine.compress`. piece: tokens read at a time, None for all."""
    fed, source = document_ids(engine, text, messages, ids)
    runner, sequence = engine.runner, TextSequence()
    cache = document_cache(engine.cache, policy)
    if piece is not None:
        pieces = ListedPieces(fed, piece)
        check_pieces(runner, pieces, ROOM)
        sequence.budget = piece_budget(
            engine.config,
            engine.cache,
            runner.layout,
            tokens=len(fed),
            piece=piece,
            new_tokens=ROOM,
            context=engine.context,
        )
        if cache != engine.cache:
            sequence.policy = make_policy(cache, runner.model, sequence.budget or 0)
        read_pieces(runner, sequence, pieces, ROOM, timing=Timing(), on_tokens=token_reporter(on_progress))
        return as_document(engine, sequence, source)
    with runner.access.alone():
        runner.prepare(sequence, len(fed), ROOM)
        if cache != engine.cache:
            sequence.policy = make_policy(cache, runner.model, sequence.budget or 0)
        if sequence.budget is not None and engine.cache.kv_memory is None:
            tell_if_raised(Budget.parse(engine.cache.budget), len(fed), engine.cache.window)
        with runner.access.whole(sequence):
            runner.feed(sequence, fed, 0, on_chunk=chunk_reporter(engine.config.num_layers, on_progress))
        return as_document(engine, sequence, source)


def document_ids(
    engine: Engine, text: str | None, messages: list[Message] | None, ids: Sequence[int] | None
) -> tuple[list[int], str | list[Message] | None]:
    """What is fed of a document before a question is known, and its source. Raises PromptError and OptionError."""
    if sum(given is not None for given in (text, messages, ids)) != 1:
        raise OptionError("give exactly one of a text, messages and ids")
    source: str | list[Message] | None = None
    if ids is not None:
        fed = prompt_ids(engine, None, None, ids)
    elif messages is not None:
        fed = prompt_ids(engine, None, messages, None)  # checks them
        if messages[-1]["role"] != "user" or not isinstance(messages[-1]["content"], str):
            raise PromptError("the last message is the document: it must be the user's, and a text")
        source = [{"role": message["role"], "content": message["content"]} for message in messages]
        fed = _before_question(engine, source)
    else:
        prompt_ids(engine, text, None, None)
        source = text
        fed = _before_question(engine, text or "")
    if not fed or source == "" or (isinstance(source, list) and not source[-1]["content"]):
        raise PromptError("the document is empty: there is nothing to keep of it")
    return fed, source


def as_document(engine: Engine, sequence: TextSequence, source: str | list[Message] | None) -> Document:
    """The document of a sequence that has read it and nothing else, in the arena or set aside."""
    kept = engine.runner.copy(sequence)
    kind = "ids" if source is None else "text" if isinstance(source, str) else "messages"
    return Document(pack(engine, kept, "document", given=kind, source=source), source)


def document_cache(cache: CacheConfig, policy: str | None) -> CacheConfig:
    """An engine's options with a policy by name for a document; without a name that for unknown questions, unless
    somebody chose the engine's own policy, if only by the default's name, or a part of it. Raises OptionError."""
    default = CacheConfig()
    if policy is None:
        untouched = not cache.policy_given and all(getattr(cache, name) == getattr(default, name) for name in CHOSEN)
        # recascade measures CAKE's preferences, which no other policy has
        policy = DOCUMENT_POLICY if untouched and cache.recascade is None else cache.policy
    if policy == cache.policy:
        return cache
    if cache.policy == "full" or policy == "full":
        raise OptionError(f"the policy {policy} needs an engine of its own: load the model with it")
    named: dict[str, Any] = {name: getattr(default, name) for name in CHOSEN} | {"policy": policy}
    chosen = replace(cache, **named)
    if chosen.late and not cache.late:  # the engine's arena has no room for all layers at once
        raise OptionError(f"the policy {policy} evicts when all layers are read: load the model with it")
    return chosen


def load_document(engine: Engine, path: str | Path) -> Document:
    """See `Engine.load_document`."""
    snapshot = read_snapshot(path)
    check_model(engine, snapshot.about, path, "document")
    given, source = snapshot.about.get("given"), snapshot.about.get("source")
    if not (
        (given == "ids" and source is None)
        or (given == "text" and isinstance(source, str))
        or (given == "messages" and are_messages(source))
    ):
        raise SnapshotError(f"{path} is inconsistent: it does not say what was read")
    return Document(snapshot, source, str(path))


def open_document(engine: Engine, document: Document, *, warn: bool = True) -> TextSequence:
    """A sequence that goes on from the document's rows, of which `Tenancy` makes a copy in the arena. warn: see
    `saving.unpack`."""
    if engine.cache.recascade is not None:
        raise OptionError("a document's rows keep their lengths: leave the option recascade out")
    return unpack(engine, document.snapshot, document.name, "document", fixed=True, warn=warn)


def question_ids(
    engine: Engine,
    document: Document,
    prompt: str | None,
    messages: list[Message] | None,
    ids: Sequence[int] | None,
) -> list[int]:
    """The ids that a question feeds behind a document: those of the one-shot prompt that are not yet in it.

    Raises PromptError and OptionError.
    """
    if not isinstance(document, Document):
        raise OptionError(f"cache is a document that compress or load_document has returned, not {shown(document)}")
    if messages is not None:
        raise OptionError("a question to a document is a text or ids: its messages are the document's own")
    if ids is not None:
        return prompt_ids(engine, prompt, None, ids)
    if not isinstance(prompt, str):
        raise PromptError(f"a question to a document is a text, not {shown(prompt)}")
    check_text(prompt, "the question")
    check_length(engine, prompt, document.tokens)
    read, source, tokenizer = document.snapshot.ids, document.source, engine.text_tokenizer()
    if not prompt.strip() and not isinstance(source, str):
        raise PromptError("the question is empty")
    if source is None:
        fed = tokenizer.encode_with_literals(prompt, (), continues=True)
    else:
        whole = _one_shot(engine, source)(prompt)
        fed = whole[len(read) :]
        if whole[: len(read)] != read:
            log.info("read in one go the text would have other tokens: those of the document stay as they are")
            if isinstance(source, str):
                alone = tokenizer.encode(source)
                behind = alone[len(read) :] if alone[: len(read)] == read else []
                fed = [*behind, *tokenizer.encode_with_literals(prompt, (), continues=True)]
            else:  # the template writes something else by now, such as the date
                fed = whole[len(_before_question(engine, source)) :]
    if not fed:
        raise PromptError("the question is empty")
    return fed


def _one_shot(engine: Engine, source: str | list[Message]) -> Callable[[str], list[int]]:
    """What gives the ids of a document and a question behind it, read in one go."""
    if isinstance(source, str):
        return lambda question: engine.text_tokenizer().encode(source + question)
    *before, last = source
    template = engine.chat_template()
    return lambda question: template.encode([*before, {**last, "content": f"{last['content']}\n\n{question}"}])


def _before_question(engine: Engine, source: str | list[Message]) -> list[int]:
    """The ids of a document that are the same whatever is asked."""
    one_shot = _one_shot(engine, source)
    encodings = [one_shot(beginning) for beginning in BEGINNINGS]
    if isinstance(source, str) and (start := _last_word(source)):  # the question may go on with it
        encodings.append(engine.text_tokenizer().encode(source[:start]))
    first, *others = encodings
    same = min(map(len, [first, *others]))
    for other in others:
        same = next((at for at in range(same) if first[at] != other[at]), same)
    return first[:same]


def _last_word(text: str) -> int:
    """Where the last word of a text begins, white space in front of it included; 0 where there is but one."""
    words = text.rstrip()
    return len(words[: max(words.rfind(" "), words.rfind("\n"), 0)].rstrip())
