"""Messages to the text and the ids that a model was trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError

from ..errors import PromptError, TokenizerError
from ..ranges import shown
from .jinja_template import compile_template
from .literal_marks import LiteralMarks
from .token_files import read_json
from .tokenizer import Span, Tokenizer

ROLES = ("system", "user", "assistant")
EDGE = "\u2005"  # white space that no template writes, so that it shows whether a message's is stripped
Message = Mapping[str, Any]


@dataclass(frozen=True)
class Surroundings:
    """What stands before and after a message's text, and where in both no control token may be seen.

    strips_start, strips_end: whether white space there is left out of the text.
    """

    before: str
    literals_before: tuple[Span, ...]
    after: str
    literals_after: tuple[Span, ...]
    strips_start: bool
    strips_end: bool


class ChatTemplate:
    """The chat template of a model folder.

    A message is a mapping with `role` (system, user or assistant) and `content`, a string (or a list of text parts).
    A system message that the template refuses or ignores is put in front of the first user message. What a user writes
    never becomes a control token, whatever it spells. Messages that the template refuses are a PromptError.
    """

    def __init__(self, source: str, tokenizer: Tokenizer, *, where: str = "chat template") -> None:
        self.source = source
        self.tokenizer = tokenizer
        self._where = where

    @staticmethod
    def load(folder: str | Path, tokenizer: Tokenizer) -> ChatTemplate | None:
        """The default template of a folder, None if it has none.

        chat_template.jinja and chat_templates/*.jinja win over tokenizer_config.json, which has one template or a list
        of named ones. TokenizerError where there are several and none is called "default".
        """
        folder = Path(folder)
        where = "chat_template.jinja"
        templates = {path.stem: path for path in sorted((folder / "chat_templates").glob("*.jinja"))}
        if (folder / where).is_file():
            templates["default"] = folder / where
        try:
            found = {name: path.read_text(encoding="utf-8") for name, path in templates.items()}
        except (OSError, UnicodeDecodeError) as error:
            raise TokenizerError(f"{folder}: a chat template cannot be read ({error})") from error
        if not found:
            where = "tokenizer_config.json"
            found = _named_templates(read_json(folder / where).get("chat_template"), folder / where)
        if not found:
            return None
        if "default" not in found and len(found) > 1:
            names = ", ".join(sorted(found))
            raise TokenizerError(f"{folder}: has the chat templates {names}, and none of them is called 'default'")
        source = found.get("default") or next(iter(found.values()))
        return ChatTemplate(source, tokenizer, where=str(folder / where))

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **extra: Any) -> str:
        """The text of `messages`. `extra` are further variables of the template, such as enable_thinking=False."""
        return self._render(self._prepare(messages), add_generation_prompt, extra)

    def encode(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **extra: Any) -> list[int]:
        """The ids of `messages`, with exactly one BOS in front if the tokenizer adds one or the template writes one."""
        prepared = self._prepare(messages)
        marks = self._marks([message["content"] for message in prepared])
        rendered = self._render(_marked(prepared, marks), add_generation_prompt, extra)
        return self.tokenizer.with_one_bos(self.tokenizer.encode_with_literals(*marks.unmark(rendered)))

    def around(self, messages: Sequence[Message]) -> Surroundings:
        """What the template writes around the text of the last message, which has yet to come: its content is ignored.

        Raises PromptError where the template does more with a message than to write it down.
        """
        prepared = self._prepare([*messages[:-1], {**messages[-1], "content": ""}])
        marks = self._marks([message["content"] for message in prepared])
        prepared = _marked(prepared, marks)
        prepared[-1]["content"] += f"{EDGE}{marks.other}{EDGE}"
        text, spans = marks.unmark(self._render(prepared, True, {}))
        before, found, after = text.partition(marks.other)
        if not found or marks.other in after:
            raise PromptError(
                f"{self._where}: the chat template does not write a message as it stands, so none can come in pieces: "
                "read the text whole, or raw"
            )
        split = len(before)
        strips = not before.endswith(EDGE), not after.startswith(EDGE)
        before = before if strips[0] else before[:-1]
        first = split + len(found) + (not strips[1])
        return Surroundings(
            before,
            tuple((start, end) for start, end in spans if end <= len(before)),
            text[first:],
            tuple((start - first, end - first) for start, end in spans if start >= first),
            *strips,
        )

    def encode_turn(self, message_text: str, *, finished_by: int | None = None) -> list[int]:
        """The ids that a further user message adds after a reply of the assistant.

        They are what the template writes after a reply: the end of that turn, the message, and the generation prompt.
        finished_by: the end token that the reply was finished by, which has not been fed. The template's own end of
        turn takes its place; it comes first only where the template separates turns by plain text.
        """
        marks = self._marks([message_text])
        text, literals = marks.unmark(self._turn(marks.mark(message_text), marks.other))
        ids = self.tokenizer.encode_with_literals(text, literals, continues=True)
        if finished_by is not None and not self._marks_turns:
            ids.insert(0, finished_by)
        return ids

    def differs_from_full_render(self, messages: Sequence[Message]) -> bool:
        """Whether the text of all `messages` differs from what was fed turn by turn, white space aside.

        Some templates move the system text to the last message or drop the reasoning of earlier replies.
        """
        prepared = self._prepare(messages)
        replies = [at for at, message in enumerate(prepared) if message["role"] == "assistant"]
        if not replies:
            return False
        other = self._marks([message["content"] for message in prepared]).other
        try:
            fed = self._render(prepared[: replies[0]], True, {})
            for at, following in zip(replies, [*replies[1:], len(prepared)], strict=True):
                fed += prepared[at]["content"]
                for message in prepared[at + 1 : following]:
                    fed += self._turn(message["content"], other)
            full = self._render(prepared, prepared[-1]["role"] != "assistant", {})
        except PromptError:
            return True
        return not "".join(full.split()).startswith("".join(fed.split()))

    @cached_property
    def takes_system(self) -> bool:
        """Whether a system message shows up in the rendered text."""
        marks = self._marks([])
        try:
            rendered = self._render([_message("system", marks.other), _message("user", "Hello")], True, {})
        except PromptError:
            return False
        return marks.other in rendered

    @cached_property
    def _marks_turns(self) -> bool:
        """Whether the template writes a special token between a reply and the next message."""
        marks = self._marks([])
        between = self._turn(marks.joint, marks.other).split(marks.joint)[0]
        ids = self.tokenizer.encode_with_literals(between, (), continues=True)
        return not self.tokenizer.special_ids.isdisjoint(ids)

    @cached_property
    def _template(self) -> Template:
        try:
            return compile_template(self.source)
        except TemplateSyntaxError as error:
            raise TokenizerError(
                f"{self._where}: the chat template is not valid Jinja (line {error.lineno}: {_one_line(error)})"
            ) from error

    def _marks(self, texts: Sequence[str]) -> LiteralMarks:
        return LiteralMarks.unused_in([self.source, *texts], self.tokenizer)

    def _turn(self, message: str, stand_in: str) -> str:
        """What follows the reply in a conversation of a message, a reply and `message`."""
        messages = [_message("user", stand_in), _message("assistant", stand_in), _message("user", message)]
        _, found, after = self._render(messages, True, {}).rpartition(stand_in)
        if not found:
            raise PromptError(f"{self._where}: the chat template leaves out the assistant's replies")
        return after

    def _prepare(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Checked copies of the messages, the system text moved where the template has no place for it."""
        if not messages:
            raise PromptError("the chat is empty: it needs at least one message")
        prepared = [_checked(message, number) for number, message in enumerate(messages, start=1)]
        if prepared[0]["role"] != "system" or self.takes_system:
            return prepared
        system, *rest = prepared
        for message in rest:
            if message["role"] == "user":
                message["content"] = f"{system['content']}\n\n{message['content']}"
                return rest
        raise PromptError("the model's chat template has no system role, and there is no user message to put it in")

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool, extra: Mapping[str, Any]) -> str:
        variables: dict[str, Any] = {**self.tokenizer.special_tokens, "tools": None, "documents": None, **extra}
        variables |= {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        template = self._template
        try:
            return template.render(variables)
        except TemplateError as error:  # raise_exception, an undefined variable, something the sandbox forbids
            raise PromptError(f"the model's chat template refuses these messages: {_one_line(error)}") from error
        except Exception as error:  # templates are programs: they may divide by zero
            name = type(error).__name__
            raise PromptError(
                f"the model's chat template fails on these messages: {name}: {_one_line(error)}"
            ) from error


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _marked(messages: Sequence[dict[str, Any]], marks: LiteralMarks) -> list[dict[str, Any]]:
    return [{**message, "content": marks.mark(message["content"])} for message in messages]


def _checked(message: Message, number: int) -> dict[str, Any]:
    if not isinstance(message, Mapping) or "role" not in message:
        raise PromptError(f"message {number} is not a mapping with 'role' and 'content'")
    if message["role"] not in ROLES:
        raise PromptError(f"message {number} has the role {shown(message['role'])}; roles are {', '.join(ROLES)}")
    unknown = [key for key, value in message.items() if key not in ("role", "content") and value is not None]
    if unknown:
        raise PromptError(
            f"message {number} has {', '.join(map(repr, unknown))}: only 'role' and 'content' are supported"
        )
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        texts = [text for text in parts if isinstance(text, str)]
        content = "\n".join(texts) if len(texts) == len(parts) else None
    if not isinstance(content, str):
        raise PromptError(f"message {number} has no text content")
    return _message(message["role"], content)


def _named_templates(value: Any, path: Path) -> dict[str, str]:
    """`chat_template` of tokenizer_config.json: a template, or a list of {name, template}."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    try:
        return dict(value) if isinstance(value, Mapping) else {entry["name"]: entry["template"] for entry in value}
    except (TypeError, KeyError) as error:
        raise TokenizerError(f"{path}: chat_template is neither a template nor a list of named ones") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
