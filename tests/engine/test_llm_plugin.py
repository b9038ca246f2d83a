"""The plugin for the `llm` command line, run by that command itself on a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from cake_infer import Engine
from cake_infer.models.registry import ALIASES

pytestmark = pytest.mark.skipif(find_spec("llm") is None, reason="needs the extra llm")

DOCUMENT = "the harbour office keeps watch on channel fourteen. " * 6
OPTIONS = {"budget": 48, "window": 8, "step": "eager"}
SAMPLED = {"max_tokens": 12, "temperature": 0.8, "top_p": 0.9, "seed": 7}


@pytest.fixture
def plugin(monkeypatch, tmp_path):
    """The plugin, registered as its entry point would, with a user folder of llm's own."""
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path / "llm"))
    monkeypatch.setattr("llm.plugins.LLM_LOAD_PLUGINS", "")  # none that happens to be installed
    import llm
    from cake_infer.engine.apps import llm_plugin

    llm.plugins.load_plugins()
    llm.plugins.pm.register(llm_plugin, name="cake")
    yield llm_plugin
    llm_plugin.KEPT.close()
    llm.plugins.pm.unregister(name="cake")


@pytest.fixture
def run(plugin):
    """A function `(*words, input=None, **options)` that runs `llm -m cake` and returns click's result."""
    from click.testing import CliRunner
    from llm.cli import cli

    def call(*words, input=None, **options):
        given = [word for name, value in options.items() for word in ("-o", name, str(value))]
        return CliRunner().invoke(cli, ["-m", "cake", *given, *words], input=input)

    return call


@pytest.fixture
def logs(plugin):
    """A function `(*words)` that runs `llm logs`."""
    from click.testing import CliRunner
    from llm.cli import cli

    return lambda *words: CliRunner().invoke(cli, ["logs", *words])


@pytest.fixture
def folder(model_folder) -> Path:
    return model_folder(max_position_embeddings=512)


def expected(folder, *messages, **options):
    """The reply of the engine itself, asked alone."""
    with Engine.load(folder, **OPTIONS) as engine:
        names = {"max_tokens": "max_new_tokens"}
        given = {names.get(name, name): value for name, value in options.items()}
        chat = [{"role": role, "content": content} for role, content in messages]
        return engine.generate(messages=chat, **given)


def test_a_document_on_standard_input_and_a_question_are_answered(run, folder):
    done = run("What is it?", input=DOCUMENT, model=folder, **OPTIONS, **SAMPLED)
    assert done.exit_code == 0, done.output
    reply = expected(folder, ("user", f"{DOCUMENT} What is it?"), **SAMPLED)
    assert done.output == reply.text + "\n"
    assert reply.stats.kept_tokens == 48 < reply.stats.prompt_tokens


def test_system_text_stop_and_no_stream(run, folder):
    words = ("-s", "be brief", "--no-stream", "What?")
    done = run(*words, model=folder, **OPTIONS, max_tokens=400, temperature=0.8, seed=3, stop="e,zz")
    reply = expected(
        folder, ("system", "be brief"), ("user", "What?"), max_tokens=400, temperature=0.8, seed=3, stop=("e", "zz")
    )
    assert done.output == reply.text + "\n"
    assert "e" not in reply.text
    assert reply.finish_reason == "stop"


def test_what_is_logged_has_the_tokens_and_what_was_kept(run, logs, folder):
    run("What is it?", input=DOCUMENT, model=folder, **OPTIONS, **SAMPLED)
    reply = expected(folder, ("user", f"{DOCUMENT} What is it?"), **SAMPLED)
    (row,) = json.loads(logs("list", "--json").output)
    assert (row["input_tokens"], row["output_tokens"]) == (reply.stats.prompt_tokens, len(reply.ids))
    assert json.loads(row["token_details"]) == {"kept_tokens": 48.0, "of": reply.stats.full_tokens}
    logged = row["response_json"]
    assert logged["finish_reason"] == reply.finish_reason
    assert logged["statistics"]["layer_lengths"] == [list(heads) for heads in reply.stats.layer_lengths]


def test_a_conversation_of_one_process_reads_only_what_is_new(plugin, folder):
    import llm

    conversation = llm.get_model("cake").conversation()
    options = {"model": str(folder), **OPTIONS, "max_tokens": 8, "temperature": 0.0}
    texts, replies = [], []
    for text in (DOCUMENT, "and?", "why?"):
        replies.append(conversation.prompt(text, system="be brief", **options))
        texts.append(replies[-1].text())
    with Engine.load(folder, **OPTIONS) as engine:
        chat = engine.chat("be brief")
        for text, reply, read in zip((DOCUMENT, "and?", "why?"), texts, replies, strict=True):
            pieces = list(chat.send(text, max_new_tokens=8, temperature=0.0))
            assert "".join(piece.text for piece in pieces) == reply
            assert read.usage().input == pieces[-1].stats.prompt_tokens
    assert replies[1].usage().input < 40 < replies[0].usage().input


def test_a_conversation_that_is_gone_on_with_later_is_read_again(run, plugin, folder):
    first = run(DOCUMENT, model=folder, **OPTIONS, max_tokens=8, temperature=0.0)
    assert first.exit_code == 0, first.output
    plugin.KEPT.close()  # another process
    second = run("and?", "-c", model=folder, **OPTIONS, max_tokens=8, temperature=0.0)
    turns = ("user", DOCUMENT), ("assistant", first.output[:-1]), ("user", "and?")
    assert second.output == expected(folder, *turns, max_tokens=8, temperature=0.0).text + "\n"


def test_two_conversations_and_other_options_do_not_meet(plugin, folder):
    import llm

    options = {"model": str(folder), **OPTIONS, "max_tokens": 8, "temperature": 0.0}
    model = llm.get_model("cake")
    one, two = model.conversation(), model.conversation()
    first = one.prompt("What is it?", **options).text()
    two.prompt("Where?", **options).text()
    kept = plugin.KEPT._engine
    again = one.prompt("and?", **options).text()
    assert plugin.KEPT._engine is kept  # one engine, loaded once
    turns = ("user", "What is it?"), ("assistant", first), ("user", "and?")
    assert again == expected(folder, *turns, max_tokens=8, temperature=0.0).text
    model.prompt("What?", **{**options, "budget": 64}).text()
    assert plugin.KEPT._engine is not kept
    with pytest.raises(Exception, match="the engine is closed"):
        _ = kept.runner


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 4}, "budget of 4"),
        ({"policy": "nonsense"}, "unknown policy 'nonsense'"),
        ({"policy": "full", "budget": 64}, "a budget has no effect"),
        ({"temperature": -1}, "-o temperature must be a number between 0"),
        ({"kv_bits": 3}, "-o kv_bits must be one of 8, 4, 2"),
        ({"hold_by": "h2o"}, "-o hold_by has no effect with"),
        ({"budget": 64, "kv_memory": "1MiB"}, "-o budget and -o kv_memory both set the size of the cache"),
        ({"colour": 1}, "colour"),
        ({"threads": "many"}, "threads"),
        ({"model": "no/such-folder/here"}, "no folder no/such-folder/here"),
    ],
)
def test_errors_are_one_line_and_exit_1(run, folder, options, message):
    done = run("What?", **{"model": folder, **OPTIONS, **options} if "model" not in options else options)
    assert done.exit_code == 1
    assert message in done.output
    assert done.output.startswith("Error: ")
    assert len(done.output.strip().splitlines()) <= 2  # llm's own for options has two


def test_every_short_name_is_a_model_with_our_options(plugin):
    import llm

    models = {model.model_id: model for model in llm.get_models()}
    assert {f"cake/{alias}" for alias in ALIASES} | {"cake"} <= set(models)
    options = set(models["cake/mistral-7b"].Options.model_fields)
    assert {"budget", "policy", "max_tokens", "temperature", "top_p", "seed", "kv_memory", "threads"} <= options
    assert "model" not in options
    assert "model" in models["cake"].Options.model_fields


def test_listing_models_loads_no_torch(tmp_path):
    # installed, its entry point has registered it already
    code = "import sys, llm.cli; from cake_infer.engine.apps import llm_plugin; llm.plugins.load_plugins(); "
    code += "pm = llm.plugins.pm; pm.is_registered(llm_plugin) or pm.register(llm_plugin); "
    code += "llm.get_models(); print('torch' in sys.modules)"
    environment = {"LLM_USER_PATH": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.split() == ["False"]
