"""A row as token ids: what is compressed, what comes after compression, and the reference answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...errors import PromptError
from .rows import Row

if TYPE_CHECKING:
    from ..engine import Engine

INSIDE, AFTER = "inside", "after"
MARGIN = 8  # tokens by which a text that is cut in the middle may grow where its halves meet


@dataclass(frozen=True)
class EncodedRow:
    """prefix: read and compressed. suffix: fed afterwards. answer: the first reference answer. cut: tokens taken out
    of the prompt's middle."""

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    answer: tuple[int, ...]
    cut: int = 0


def encode_row(engine: Engine, row: Row, protocol: str, *, limit: int, answer_tokens: int, raw: bool) -> EncodedRow:
    """The ids of a row under a protocol: "inside" compresses the whole prompt, "after" all but the question.

    A prompt of more than `limit` tokens loses its middle, as LongBench does it. raw: without a chat template, as for
    models that have none. Raises PromptError where the question cannot be told apart.
    """
    plain = raw or row.plain or engine.template is None
    text, cut = row.text, 0
    ids = _encode(engine, text, plain)
    if len(ids) > limit:
        text = without_middle(engine, text, len(ids) - limit)
        shorter = _encode(engine, text, plain)
        ids, cut = shorter, len(ids) - len(shorter)
    answer = _answer(engine, row, text, plain)[:answer_tokens]
    if protocol == INSIDE:
        return EncodedRow(tuple(ids), (), tuple(answer), cut)
    if row.question is None:
        raise PromptError(f"{row.name} has no context apart from its question: use --question inside")
    if not row.question or not text.endswith(row.question):
        raise PromptError(f"{row.name} has no question that could come after compression: use --question inside")
    split = common(ids, _encode(engine, text.removesuffix(row.question), plain))
    if not 0 < split < len(ids):
        raise PromptError(f"{row.name}: the context cannot be told apart from its question")
    return EncodedRow(tuple(ids[:split]), tuple(ids[split:]), tuple(answer), cut)


def without_middle(engine: Engine, text: str, over: int) -> str:
    """The text without `over` tokens and a few more in its middle."""
    tokenizer = engine.text_tokenizer()
    ids = tokenizer.encode(text, add_bos=False, allow_special=False)
    half = (len(ids) - over - MARGIN) // 2
    if half < 1:
        raise PromptError(f"a prompt of {len(ids):,} tokens cannot lose {over:,}: allow longer prompts")
    return tokenizer.decode(ids[:half]) + tokenizer.decode(ids[-half:])


def common(first: list[int], second: list[int]) -> int:
    """How many ids two texts begin with alike."""
    return next((i for i, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), len(second))


def _encode(engine: Engine, text: str, plain: bool) -> list[int]:
    if plain:
        return engine.text_tokenizer().encode(text, allow_special=False)
    return engine.chat_template().encode([{"role": "user", "content": text}])


def _answer(engine: Engine, row: Row, text: str, plain: bool) -> list[int]:
    """The first answer as it would go on from the prompt."""
    if not row.answers or not row.answers[0]:
        return []
    answer = row.answers[0].strip()
    if plain and text and not text[-1].isspace():
        answer = " " + answer
    tokenizer = engine.text_tokenizer()
    spans = tuple(match.span() for match in tokenizer.control_pattern.finditer(answer))
    return tokenizer.encode_with_literals(answer, spans, continues=True)
