"""What a caller gives as a prompt, checked and turned into token ids."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import TYPE_CHECKING

from ..errors import OptionError, PromptError
from .text import check_text

if TYPE_CHECKING:
    from .engine import Engine, Message

ROOMY = 16  # characters a token of the context; shorter texts are simply tokenized


def prompt_ids(
    engine: Engine, prompt: str | None, messages: list[Message] | None, ids: Sequence[int] | None
) -> list[int]:
    """The ids of a plain text, of messages or of ids themselves; see `Engine.encode`."""
    if sum(given is not None for given in (prompt, messages, ids)) != 1:
        raise OptionError("give exactly one of a prompt text, messages and ids")
    if ids is not None:
        try:
            result = [index(token) for token in ids]
        except TypeError as error:
            raise PromptError(f"token ids are whole numbers: {error}") from None
        wrong = [token for token in result if not 0 <= token < engine.config.vocab_size]
        if wrong:
            raise PromptError(f"token id {wrong[0]} is outside the model's vocabulary of {engine.config.vocab_size}")
    elif messages is not None:
        for message in messages:
            if isinstance(message, dict) and isinstance(content := message.get("content"), str):
                check_text(content, f"the {message.get('role', 'chat')} message")
                check_length(engine, content)
        result = engine.chat_template().encode(messages)
    else:
        if not isinstance(prompt, str):
            raise PromptError(f"a prompt is a text (or, for generate, a list of texts), not {prompt!r}")
        check_text(prompt, "the prompt")
        check_length(engine, prompt)
        result = engine.text_tokenizer().encode(prompt)
    if not result:
        raise PromptError("the prompt is empty: there is no token to read")
    return result


def check_length(engine: Engine, text: str) -> None:
    """Refuse a text that cannot fit the context before it is tokenized, which takes 30 times its size in memory."""
    tokenizer = engine.tokenizer
    if tokenizer is None or len(text) <= ROOMY * engine.context:
        return
    longest = max(len(tokenizer.token_bytes(index)) for index in range(tokenizer.vocab_size))
    least = len(text.encode()) // max(longest, 1)
    if least >= engine.context:
        raise PromptError(
            f"the prompt has at least {least:,} tokens, but the model's context is {engine.context:,}: shorten the "
            "prompt, or stretch the context with --rope-scaling KIND:FACTOR"
        )
