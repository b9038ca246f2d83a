"""What a caller gives as a prompt, checked and turned into token ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import index
from typing import TYPE_CHECKING

from ..errors import CakeError, OptionError, PromptError
from ..ranges import shown
from .results import Progress
from .text import check_text

if TYPE_CHECKING:
    from ..models.tokenizer import Tokenizer
    from .document import Document
    from .engine import Engine, Message
    from .reply import OnProgress

AT_ONCE = 1 << 18  # characters that are tokenized without a look beforehand: less than a second
PIECE = 1 << 16  # characters counted at a time
LONGEST_WORD = 256  # how far back from a piece's end a space is looked for
CUT_TOKENS = 16  # tokens that a piece's two ends may have more than the same characters inside the text


def prompt_ids(
    engine: Engine, prompt: str | None, messages: list[Message] | None, ids: Sequence[int] | None
) -> list[int]:
    """The ids of a plain text, of messages or of ids themselves; see `Engine.encode`."""
    if sum(given is not None for given in (prompt, messages, ids)) != 1:
        raise OptionError("give exactly one of a prompt text, messages and ids")
    if ids is not None:
        if isinstance(ids, (str, bytes, Mapping)) or not hasattr(ids, "__iter__"):
            raise PromptError(f"ids are a list of token ids, not {shown(ids)}")
        if any(isinstance(token, bool) for token in ids):
            raise PromptError("token ids are whole numbers, not True or False")
        try:
            result = [index(token) for token in ids]
        except TypeError as error:
            raise PromptError(f"token ids are whole numbers: {error}") from None
        wrong = [token for token in result if not 0 <= token < engine.config.vocab_size]
        if wrong:
            size = engine.config.vocab_size
            raise PromptError(f"token id {shown(wrong[0])} is outside the model's vocabulary of {size:,}")
    elif messages is not None:
        if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
            raise PromptError(f"messages are a list of mappings with 'role' and 'content', not {shown(messages)}")
        for message in messages:
            if isinstance(message, dict) and isinstance(content := message.get("content"), str):
                role = message.get("role")
                check_text(content, f"the {role if isinstance(role, str) else 'chat'} message")
                check_length(engine, content)
        result = engine.chat_template().encode(messages)
    else:
        if not isinstance(prompt, str):
            raise PromptError(f"a prompt is a text (or, for generate, a list of texts), not {shown(prompt)}")
        check_text(prompt, "the prompt")
        check_length(engine, prompt)
        result = engine.text_tokenizer().encode(prompt)
    if not result:
        raise PromptError("the prompt is empty: there is no token to read")
    return result


def listed_ids(engine: Engine, prompt: object, number: int, count: int, cache: Document | None = None) -> list[int]:
    """The ids of one of several prompts: a text, a list of messages or a list of ids; or of questions to a document.
    Errors carry its number."""
    try:
        if isinstance(prompt, (list, tuple)) and prompt:
            if isinstance(prompt[0], dict):
                return engine.encode(messages=list(prompt), cache=cache)
            return engine.encode(ids=prompt, cache=cache)
        if not isinstance(prompt, str):
            kinds = "a text, a list of messages or a list of ids"
            raise PromptError(f"each prompt of a list is {kinds}, not {shown(prompt)}")
        return engine.encode(prompt, cache=cache)
    except CakeError as error:
        raise (type(error)(f"prompt {number} of {count}: {error}") if count > 1 else error) from None


def check_length(engine: Engine, text: str, before: int = 0, on_progress: OnProgress | None = None) -> None:
    """Refuse a text that cannot fit the context behind `before` tokens, without tokenizing all of it.

    That would take long, 30 times the text's size in memory, and no interrupt meanwhile. A long text is counted in
    pieces until there are too many tokens; between them an interrupt, or `on_progress`, can end it.
    """
    room = engine.context - before
    if engine.tokenizer is None or len(text) <= AT_ONCE:
        return
    least = 0
    for done, tokens in token_counts(engine.tokenizer, text):
        least += tokens
        if least >= room:
            behind = f" behind the {before:,} there are" if before else ""
            raise PromptError(
                f"the prompt has at least {least:,} tokens{behind}, but the model's context is {engine.context:,}: "
                "shorten the prompt, or stretch the context with the option rope_scaling (KIND:FACTOR)"
            )
        if on_progress is not None:
            on_progress(Progress("tokenize", done, len(text)))


def token_counts(tokenizer: Tokenizer, text: str) -> Iterator[tuple[int, int]]:
    """Characters of a text so far, and how many tokens each piece of it has at least.

    A cut can only change the tokens beside it; a piece ends before a single space if it can, where words are split
    anyway, and what the two ends may add is taken off.
    """
    start = 0
    while start < len(text):
        end = min(start + PIECE, len(text))
        if end < len(text):
            space = text.rfind(" ", end - LONGEST_WORD, end)
            end = space if space > start else end
        ids = tokenizer.encode(text[start:end], add_bos=False, allow_special=False)
        yield end, max(0, len(ids) - CUT_TOKENS)
        start = end
