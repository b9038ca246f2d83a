"""Chats to text and ids: as transformers renders them, with one BOS, and with control tokens out of users' reach."""

from __future__ import annotations

import json
from datetime import datetime
from functools import cache
from pathlib import Path

import pytest
from cake_infer.errors import PromptError, TokenizerError
from cake_infer.models.chat_template import ChatTemplate
from cake_infer.models.tokenizer import Tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Reference
from transformers import PreTrainedTokenizerFast

BOS, EOS, IM_START, IM_END = range(1, 5)

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Llama 2: the system text goes into the first user turn, BOS before every turn, contents are stripped.
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set system = messages[0]['content'] %}"
    "{% else %}{% set rest = messages %}{% set system = false %}{% endif %}{% for message in rest %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if loop.index0 == 0 and system != false %}"
    "{% set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
# Mistral 7B v0.2 and Gemma refuse a system message; Mistral 7B v0.3 moves it to the last user turn.
NO_SYSTEM = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
IGNORES_SYSTEM = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
)
SYSTEM_LAST = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set rest = messages[1:] %}"
    "{% else %}{% set rest = messages %}{% endif %}{{ bos_token }}{% for message in rest %}"
    "{% if message['role'] == 'user' %}{% if loop.last and system is defined %}"
    "{{ '[INST] ' + system + '\n\n' + message['content'] + '[/INST]' }}"
    "{% else %}{{ '[INST] ' + message['content'] + '[/INST]' }}{% endif %}"
    "{% else %}{{ ' ' + message['content'] | trim + eos_token }}{% endif %}{% endfor %}"
)
DROPS_THINKING = (
    "{%- for message in messages %}{%- set content = message.content %}"
    "{%- if message.role == 'assistant' and '</think>' in content and not loop.last %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
PLAIN_TEXT_TURNS = (
    "{% for message in messages %}{{ '### ' + message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant:' }}{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "llama2": LLAMA2,
    "no_system": NO_SYSTEM,
    "ignores_system": IGNORES_SYSTEM,
    "system_last": SYSTEM_LAST,
    "drops_thinking": DROPS_THINKING,
    "plain_text_turns": PLAIN_TEXT_TURNS,
}
KINDS = ("byte", "spm")


@cache
def compiled(name: str, tokenizer: Tokenizer) -> ChatTemplate:
    return ChatTemplate(TEMPLATES[name], tokenizer)


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def system(content: str) -> dict[str, str]:
    return {"role": "system", "content": content}


@pytest.fixture(scope="module")
def folders(write_byte_tokenizer, write_spm_tokenizer, tmp_path_factory) -> dict[str, Path]:
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    write_byte_tokenizer(folders["byte"], bos=False)
    write_spm_tokenizer(folders["spm"])
    return folders


@pytest.fixture(scope="module")
def tokenizers(folders) -> dict[str, Tokenizer]:
    return {kind: Tokenizer.load(folder) for kind, folder in folders.items()}


@pytest.fixture(scope="module")
def theirs(folders) -> dict[str, PreTrainedTokenizerFast]:
    return {kind: PreTrainedTokenizerFast.from_pretrained(folder) for kind, folder in folders.items()}


@pytest.fixture
def byte_tokenizer(tokenizers) -> Tokenizer:
    return tokenizers["byte"]


contents = st.one_of(
    st.text(max_size=20),
    st.lists(st.sampled_from(["the", " ", "\n", "<", "|", ">", "</", "im_", "_end|>", "s>", "猫", "😀"])).map("".join),
)
conversations = st.builds(
    lambda first, pairs: [user(first), *(m for reply, text in pairs for m in (assistant(reply), user(text)))],
    contents,
    st.lists(st.tuples(contents, contents), max_size=2),
)


# As transformers renders them


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "drops_thinking"])
@settings(deadline=None, max_examples=20)
@given(messages=conversations, prompt=st.booleans())
def test_text_and_ids_are_those_of_apply_chat_template(tokenizers, theirs, kind, name, messages, prompt):
    tokenizer, template = tokenizers[kind], compiled(name, tokenizers[kind])
    options = {"chat_template": TEMPLATES[name], "add_generation_prompt": prompt}
    text = theirs[kind].apply_chat_template(messages, tokenize=False, **options)
    assert template.render(messages, add_generation_prompt=prompt) == text
    if any(tokenizer.control_pattern.search(message["content"]) for message in messages):
        return
    expected = theirs[kind].apply_chat_template(messages, tokenize=True, return_dict=False, **options)
    ids = template.encode(messages, add_generation_prompt=prompt)
    if kind == "spm" and expected[:1] != [BOS]:  # transformers leaves BOS to the template alone
        assert ids == [BOS, *expected]
    else:
        assert ids == expected


def test_what_templates_on_the_hub_count_on_is_there(byte_tokenizer):
    source = """
{%- set ns = namespace(found=false) %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- continue %}
    {%- endif %}
    {%- if ns.found %}
        {%- break %}
    {%- endif %}
    {%- set ns.found = true %}
    {{- strftime_now('%d %b %Y') }} {{ message | tojson }} {{ {'b': '<é>', 'a': 1} | tojson(indent=1, sort_keys=true) }}
{%- endfor %}
  {% if tools is none and documents is none %}
none
  {% endif %}
{% generation %}{{ dict(a=1).a }}{{ eos_token }}{{ undefined_name }}{% endgeneration %}"""
    before = datetime.now().strftime("%d %b %Y")
    text = ChatTemplate(source, byte_tokenizer).render([assistant("x"), user("猫 <b>'\"&"), user("y")])
    after = datetime.now().strftime("%d %b %Y")
    message = '{"role": "user", "content": "猫 <b>\'\\"&"}'
    assert text in [f'{day} {message} {{\n "a": 1,\n "b": "<é>"\n}}none\n1</s>' for day in (before, after)]


def test_variables_are_handed_to_the_template(byte_tokenizer):
    template = ChatTemplate("{{ messages[0].content }}{% if not enable_thinking %}</think>{% endif %}", byte_tokenizer)
    assert template.render([user("a")], enable_thinking=False) == "a</think>"
    assert template.render([user("a")], enable_thinking=True) == "a"
    assert template.encode([user("a")], enable_thinking=True) == byte_tokenizer.encode("a")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''.__class__.__base__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ namespace.__init__.__globals__['json'] }}",
        "{{ namespace(__class__=1) }}",
        "{% set n = namespace(a=1) %}{% set n.__class__ = 1 %}",
        "{{ messages.append(1) }}",
        "{{ dict.__class__ }}{{ dict.__init__.__globals__ }}",
        "{{ ('%s' % messages.__class__).foo.bar }}",
    ],
)
def test_templates_cannot_reach_the_internals_of_python(byte_tokenizer, source):
    with pytest.raises(PromptError):
        ChatTemplate(source, byte_tokenizer).render([user("a")])


def test_a_template_that_fails_is_one_line(byte_tokenizer):
    for source in (
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 1 }}",
        "{{ raise_exception('first\nsecond') }}",
        "{{ a.b.c }}",
    ):
        with pytest.raises(PromptError, match="chat template") as error:
            ChatTemplate(source, byte_tokenizer).render([user("a")])
        assert "\n" not in str(error.value)
    with pytest.raises(TokenizerError, match=r"not valid Jinja \(line 2"):
        ChatTemplate("a\n{% if %}", byte_tokenizer).render([user("a")])


# Where the template is


def write_config(folder: Path, chat_template: object) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": chat_template}), "utf-8")


def test_the_template_is_found_where_models_keep_it(write_byte_tokenizer, tmp_path):
    write_byte_tokenizer(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)

    def rendered() -> str | None:
        template = ChatTemplate.load(tmp_path, tokenizer)
        return None if template is None else template.render([user("x")])

    assert rendered() is None
    write_config(tmp_path, "from the config: {{ messages[0].content }}")
    assert rendered() == "from the config: x"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "default of the list"}]
    write_config(tmp_path, named)
    assert rendered() == "default of the list"
    write_config(tmp_path, named[:1])
    assert rendered() == "tools"
    (tmp_path / "chat_templates").mkdir()
    (tmp_path / "chat_templates" / "rag.jinja").write_text("rag", "utf-8")
    assert rendered() == "rag"
    (tmp_path / "chat_templates" / "tools.jinja").write_text("tools", "utf-8")
    with pytest.raises(TokenizerError, match="rag, tools"):
        rendered()
    (tmp_path / "chat_template.jinja").write_text("from the file é", "utf-8")
    assert rendered() == "from the file é"


@pytest.mark.parametrize("value", [3, ["a"], [{"name": "default"}]])
def test_a_malformed_list_of_templates_is_refused(write_byte_tokenizer, tmp_path, value):
    write_byte_tokenizer(tmp_path)
    write_config(tmp_path, value)
    with pytest.raises(TokenizerError, match="chat_template"):
        ChatTemplate.load(tmp_path, Tokenizer.load(tmp_path))


# Roles


@pytest.mark.parametrize("name", ["no_system", "ignores_system"])
def test_a_system_text_without_a_place_goes_into_the_first_user_turn(byte_tokenizer, name):
    template = ChatTemplate(TEMPLATES[name], byte_tokenizer)
    messages = [system("Be brief."), user("Hi"), assistant("Hello"), user("Bye")]
    text = template.render(messages)
    assert "[INST] Be brief.\n\nHi [/INST]" in text
    assert text == template.render([user("Be brief.\n\nHi"), *messages[2:]])
    assert template.encode(messages) == template.encode([user("Be brief.\n\nHi"), *messages[2:]])
    assert messages[1] == user("Hi")
    with pytest.raises(PromptError, match="no user message"):
        template.render([system("Be brief.")])


def test_a_template_with_a_system_role_keeps_it(byte_tokenizer):
    text = ChatTemplate(CHATML, byte_tokenizer).render([system("Be brief."), user("Hi")])
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>")
    assert "<<SYS>>\nBe brief.\n<</SYS>>" in ChatTemplate(LLAMA2, byte_tokenizer).render(
        [system("Be brief."), user("Hi")]
    )


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "empty"),
        ([user("a"), user("b")], "must alternate"),
        ([assistant("a")], "must alternate"),
        ([user("a"), system("b")], "Only user and assistant roles"),
        ([{"role": "tool", "content": "a"}], "message 1 has the role 'tool'; roles are system, user, assistant"),
        ([user("a"), {"role": "assistant"}], "message 2 has no text content"),
        ([user("a"), {"role": "assistant", "content": None}], "message 2 has no text content"),
        ([{"content": "a"}], "message 1 is not a mapping"),
        (["a"], "message 1 is not a mapping"),
        ([{**user("a"), "tool_calls": []}], "'tool_calls'"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "no text content"),
    ],
)
def test_chats_that_cannot_be_rendered_are_refused_in_one_line(byte_tokenizer, messages, message):
    template = ChatTemplate(NO_SYSTEM, byte_tokenizer)
    for act in (template.render, template.encode):
        with pytest.raises(PromptError, match=message) as error:
            act(messages)
        assert "\n" not in str(error.value)


def test_content_may_be_a_list_of_text_parts(byte_tokenizer):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "user\na\nb<|im_end|>" in ChatTemplate(CHATML, byte_tokenizer).render([{"role": "user", "content": parts}])


# One BOS


@pytest.mark.parametrize("start", ["", "{{ bos_token }}", "{{ bos_token }}{{ bos_token }}"])
def test_a_chat_has_one_bos_whoever_writes_it(write_byte_tokenizer, write_spm_tokenizer, tmp_path, start):
    for write in (write_byte_tokenizer, write_spm_tokenizer):
        write(tmp_path)
        template = ChatTemplate(start + CHATML, Tokenizer.load(tmp_path))
        ids = template.encode([user("Hi")])
        assert ids[:2] == [BOS, IM_START]
        assert ids.count(BOS) == 1


def test_a_chat_has_no_bos_where_neither_tokenizer_nor_template_has_one(byte_tokenizer):
    assert ChatTemplate(CHATML, byte_tokenizer).encode([user("Hi")])[0] == IM_START


# Control tokens in what users write


def control_ids(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    return [index for index in ids if index in tokenizer.special_ids]


hostile = st.lists(
    st.sampled_from(
        ["<|im_end|>", "<|im_start|>", "</s>", "<s>", "<|im_", "end|>", "<", "|", ">", "s>", "/", " ", "a\n"]
    ),
    max_size=6,
).map("".join)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TEMPLATES)
@settings(deadline=None, max_examples=25)
@given(texts=st.tuples(hostile, hostile, hostile))
def test_what_users_write_never_becomes_a_control_token(tokenizers, kind, name, texts):
    tokenizer, template = tokenizers[kind], compiled(name, tokenizers[kind])
    first, reply, second = texts
    harmless = template.encode([user("a"), assistant("b"), user("c")])
    ids = template.encode([user(first), assistant(reply), user(second)])
    assert control_ids(tokenizer, ids) == control_ids(tokenizer, harmless)
    turn = template.encode_turn(second)
    assert control_ids(tokenizer, turn) == control_ids(tokenizer, template.encode_turn("c"))


def test_control_tokens_that_users_write_are_read_as_text(tokenizers):
    for tokenizer in tokenizers.values():
        content = "Say <|im_end|> or </s>, please"
        template = ChatTemplate(CHATML, tokenizer)
        ids = template.encode([user(content)])
        assert control_ids(tokenizer, ids) == control_ids(tokenizer, template.encode([user("Say")]))
        assert content in tokenizer.decode(ids)
        inner = tokenizer.encode(content, add_bos=False, allow_special=False)
        text = ",".join(map(str, ids))
        assert ",".join(map(str, inner[1:])) in text  # from the second id on: what is before it is a newline here


def test_two_texts_side_by_side_cannot_make_a_control_token(tokenizers):
    """The system text ends with its first half, the template puts the message right behind it."""
    side_by_side = "{{ messages[0].content }}{{ messages[1].content }}{{ eos_token }}"
    for tokenizer in tokenizers.values():
        template = ChatTemplate(side_by_side, tokenizer)
        for cut in range(1, 9):
            ids = template.encode([system("a <|im_end|>"[: 2 + cut]), user("<|im_end|> b"[cut:])])
            assert control_ids(tokenizer, ids)[-1:] == [EOS]
            assert IM_END not in ids
            assert tokenizer.decode(ids) == "a <|im_end|> b"
        assert IM_END not in template.encode([system("<|im_"), user("end|>")])


def test_a_text_and_the_template_beside_it_cannot_make_a_control_token(tokenizers):
    for tokenizer in tokenizers.values():
        for source, content in (
            ("{{ messages[0].content }}end|>", "<|im_"),
            ("<|im_{{ messages[0].content }}", "end|>"),
        ):
            ids = ChatTemplate(source, tokenizer).encode([user(content)])
            assert IM_END not in ids
            assert tokenizer.decode(ids) == "<|im_end|>"


def test_a_template_that_takes_text_apart_cannot_be_made_to_forge_tokens(byte_tokenizer):
    for source in ("{{ messages[0].content.split('X') | join('') }}", "{{ messages[0].content | replace('X', '') }}"):
        for content in ("</s>X", "X</s>", "a</s>bX</s>"):
            assert EOS not in ChatTemplate(source, byte_tokenizer).encode([user(content)])
    cut = ChatTemplate("{{ messages[0].content.split('</s>')[0] }}{{ eos_token }}", byte_tokenizer)
    assert cut.encode([user("a</s>b")]) == [*byte_tokenizer.encode("a"), EOS]


def test_private_use_characters_are_left_alone(byte_tokenizer):
    content = "".join(map(chr, range(0xF0000, 0xF0008))) + "</s>"
    ids = ChatTemplate("{{ messages[0].content }}", byte_tokenizer).encode([user(content)])
    assert byte_tokenizer.decode(ids) == content


def test_added_tokens_that_are_not_special_count_as_control_tokens(write_byte_tokenizer, tmp_path):
    write_byte_tokenizer(tmp_path)
    library = Reference.from_file(str(tmp_path / "tokenizer.json"))
    library.add_tokens(["<tool_call>"])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    tool = tokenizer.token_id("<tool_call>")
    template = ChatTemplate("<tool_call>{{ messages[0].content }}", tokenizer)
    assert template.encode([user("a<tool_call>")]).count(tool) == 1


# Turns


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["chatml", "llama2", "no_system", "ignores_system", "plain_text_turns"])
def test_a_turn_is_what_the_whole_conversation_has_after_the_reply(tokenizers, kind, name):
    tokenizer, template = tokenizers[kind], ChatTemplate(TEMPLATES[name], tokenizers[kind])
    messages = [user("the first"), assistant("one word"), user("and the last")]
    whole, start = template.encode(messages), template.encode(messages[:1])
    turn = template.encode_turn("and the last")
    assert whole[: len(start)] == start
    assert whole[len(whole) - len(turn) :] == turn
    reply = tokenizer.decode(whole[len(start) : len(whole) - len(turn)])
    assert reply.strip() == "one word"


def test_a_turn_begins_with_the_end_of_the_reply(tokenizers):
    for tokenizer in tokenizers.values():
        assert ChatTemplate(CHATML, tokenizer).encode_turn("a")[0] == IM_END
        assert ChatTemplate(NO_SYSTEM, tokenizer).encode_turn("a")[0] == EOS
        llama2 = ChatTemplate(LLAMA2, tokenizer).encode_turn("a")
        assert tokenizer.decode(llama2[:2], skip_special=False).strip() == "</s>"
        assert llama2[1:3] == [EOS, BOS]


def test_a_turn_takes_the_place_of_the_end_token_that_was_not_fed(byte_tokenizer):
    template = ChatTemplate(CHATML, byte_tokenizer)
    assert (
        template.encode_turn("a", finished_by=EOS)
        == template.encode_turn("a")
        == template.encode_turn("a", finished_by=IM_END)
    )
    plain = ChatTemplate(PLAIN_TEXT_TURNS, byte_tokenizer)
    assert plain.encode_turn("a", finished_by=EOS) == [EOS, *plain.encode_turn("a")]


def test_a_turn_the_template_refuses_is_a_prompt_error(byte_tokenizer):
    single = (
        "{% if messages | length > 1 %}{{ raise_exception('one message only') }}{% endif %}{{ messages[0].content }}"
    )
    with pytest.raises(PromptError, match="one message only"):
        ChatTemplate(single, byte_tokenizer).encode_turn("a")
    forgetful = "{{ messages[-1].content }}"
    with pytest.raises(PromptError, match="leaves out"):
        ChatTemplate(forgetful, byte_tokenizer).encode_turn("a")


@pytest.mark.parametrize(
    ("name", "messages", "differs"),
    [
        ("chatml", [system("s"), user("a"), assistant("b"), user("c"), assistant("d"), user("e")], False),
        ("chatml", [user("a"), assistant("b")], False),
        ("llama2", [system("s"), user("a"), assistant(" b "), user("c")], False),
        ("no_system", [system("s"), user("a"), assistant("b"), user("c")], False),
        ("no_system", [user("a"), assistant("b"), user("c"), user("d")], True),
        ("system_last", [user("a"), assistant(" b"), user("c")], False),
        ("system_last", [system("s"), user("a")], False),
        ("system_last", [system("s"), user("a"), assistant("b"), user("c")], True),
        ("drops_thinking", [user("a"), assistant("b"), user("c")], False),
        ("drops_thinking", [user("a"), assistant("<think>\nhm\n</think>\n\nb")], False),
        ("drops_thinking", [user("a"), assistant("<think>\nhm\n</think>\n\nb"), user("c")], True),
    ],
)
def test_a_conversation_that_would_be_rendered_otherwise_is_recognised(byte_tokenizer, name, messages, differs):
    assert ChatTemplate(TEMPLATES[name], byte_tokenizer).differs_from_full_render(messages) is differs


# A message that comes in parts


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "drops_thinking"])
@pytest.mark.parametrize("system", [None, "Be <|im_end|> brief. "])
@pytest.mark.parametrize("text", ["  the text\n\u2003of <|im_start|>it \n", "<s>", "|im_end|>x<|im_"])
def test_what_stands_around_a_message_and_the_message_are_the_whole(tokenizers, kind, name, system, text):
    template = ChatTemplate(TEMPLATES[name], tokenizers[kind])
    before = [] if system is None else [{"role": "system", "content": system}]
    expected = template.encode([*before, {"role": "user", "content": text}])
    around = template.around([*before, {"role": "user", "content": "ignored"}])
    text = text.lstrip() if around.strips_start else text
    text = text.rstrip() if around.strips_end else text
    whole = around.before + text + around.after
    start = len(around.before)
    literals = [*around.literals_before, (start, start + len(text))]
    literals += [(a + start + len(text), b + start + len(text)) for a, b in around.literals_after]
    assert tokenizers[kind].with_one_bos(tokenizers[kind].encode_with_literals(whole, literals)) == expected
    assert (around.strips_start, around.strips_end) == (name == "llama2" and system is None, name == "llama2")


def test_a_message_that_a_template_does_more_with_cannot_come_in_parts(tokenizers):
    for source in ("{{ messages[0].content }}{{ messages[0].content }}", "{{ messages[0].content | length }}"):
        with pytest.raises(PromptError, match="does not write a message as it stands"):
            ChatTemplate(source, tokenizers["byte"]).around([{"role": "user", "content": ""}])
